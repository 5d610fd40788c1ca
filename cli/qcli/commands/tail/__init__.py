"""`qcli tail`: print the messages of a topic."""
