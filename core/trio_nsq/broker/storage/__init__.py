"""Persistent storage: the data folder, checkpoints, retention."""
