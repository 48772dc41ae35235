"""Decide: manifests, search space, objective, judge. Pure functions: no I/O, no clock, no network."""
