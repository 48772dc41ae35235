"""Trimtab: an adaptive optimization control plane for LLM inference.

Five rooms, one verb each: ``kernels`` compute, ``engine`` serves, ``policies`` decide,
``experiments`` measure, ``controller`` acts. ``docs/architecture.md`` draws how they meet.
"""

__version__ = "0.1.0"
