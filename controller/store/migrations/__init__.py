"""Alembic migrations of the state store, run by ``Store.open``."""
