"""`qcli to-file`: write the messages of topics to files."""
