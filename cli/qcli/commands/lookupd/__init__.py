"""`qcli lookupd`: the discovery service."""
