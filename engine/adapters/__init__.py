"""What Trimtab knows of each engine, as data and HTTP. No torch."""
