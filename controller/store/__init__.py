"""What must survive a kill: SQLAlchemy models, migrations, the decision log."""
