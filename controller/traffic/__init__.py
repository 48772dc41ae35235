"""How a weight becomes a share of requests."""
