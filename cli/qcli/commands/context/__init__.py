"""`qcli context`: named sets of addresses and connection options."""
