"""Open-loop load and what it measured."""
