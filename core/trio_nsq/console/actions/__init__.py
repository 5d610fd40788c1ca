"""What changes a fleet."""
