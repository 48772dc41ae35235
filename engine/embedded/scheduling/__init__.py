"""The scheduler and what it decides by."""
