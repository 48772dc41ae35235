"""Live figures: one interface, two sources."""
