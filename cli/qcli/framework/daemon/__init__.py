"""What the commands that run a server share: their configuration file, their log and their life cycle."""
