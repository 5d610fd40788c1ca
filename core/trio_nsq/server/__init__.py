"""What every server of this package has: listeners, limits, checks at the start, files that are read again."""
