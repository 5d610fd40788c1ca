"""Progress and questions on a terminal."""
