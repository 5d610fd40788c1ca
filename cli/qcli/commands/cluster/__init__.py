"""`qcli cluster`: the members of a cluster, who leads it, and changes of both."""
