"""Serve: what Trimtab knows about engines, and its own embedded one."""
