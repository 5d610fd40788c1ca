"""One file or folder per command; a folder holds the click command in `command.py`."""
