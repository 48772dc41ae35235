"""The staged move of traffic from stable to canary."""
