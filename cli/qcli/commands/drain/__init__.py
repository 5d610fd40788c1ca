"""`qcli drain`."""
