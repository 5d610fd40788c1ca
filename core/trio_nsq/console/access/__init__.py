"""Who may do what in the console."""
