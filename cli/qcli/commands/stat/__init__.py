"""`qcli stat`: statistics of topics and channels."""
