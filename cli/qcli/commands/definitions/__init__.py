"""`qcli definitions`: topics, channels and their settings as a file."""
