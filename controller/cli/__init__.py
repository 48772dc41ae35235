"""The trimtab command."""
