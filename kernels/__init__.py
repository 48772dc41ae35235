"""Compute: tensor operations, each with a PyTorch reference."""
