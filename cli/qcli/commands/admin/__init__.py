"""`qcli admin`: the web console."""
