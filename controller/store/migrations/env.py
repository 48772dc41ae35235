"""Alembic's entry point: runs the migrations over the connection that ``Store.open`` hands in."""

from alembic import context

from trimtab.controller.store.tables import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
with context.begin_transaction():
    context.run_migrations()
