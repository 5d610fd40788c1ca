"""What only a person at a terminal sees: progress lines and questions."""
