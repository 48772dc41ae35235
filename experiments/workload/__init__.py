"""Arrival processes and request shapes."""
