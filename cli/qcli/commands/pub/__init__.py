"""`qcli pub`: publish lines, or files, to a topic."""
