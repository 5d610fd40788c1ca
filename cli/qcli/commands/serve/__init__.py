"""`qcli serve`: the broker."""
