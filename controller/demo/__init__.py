"""The whole loop on one machine in a few minutes, on a real model with real traffic."""
