"""What is published, on its way into the log."""
