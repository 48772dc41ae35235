"""Measure: workloads, load, trials, studies, quality, reports."""
