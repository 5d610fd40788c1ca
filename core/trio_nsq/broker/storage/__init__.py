"""What survives a restart: the data folder, saved states, retention."""
