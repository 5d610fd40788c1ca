"""`qcli channel`."""
