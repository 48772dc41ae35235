"""Policies that ship with Trimtab."""
