"""Act: the loop, rollouts, traffic, telemetry, store, console and command line."""
