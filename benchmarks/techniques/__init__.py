"""The engine's techniques, one module each: what it measures in one round, and the rows that rounds make."""
