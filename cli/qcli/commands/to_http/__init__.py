"""`qcli to-http`: send messages to HTTP receivers."""
