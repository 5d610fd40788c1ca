"""A segment, which is one file of a log: its format, and reading, appending and recovery."""
