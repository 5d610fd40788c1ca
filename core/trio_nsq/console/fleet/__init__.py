"""What the console knows of a fleet: one poll for all viewers."""
