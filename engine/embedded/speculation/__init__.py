"""Drafts: how they are made and how many pay."""
