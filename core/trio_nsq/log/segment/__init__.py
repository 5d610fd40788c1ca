"""One file of a log: its format, and reading, appending to and recovering it."""
