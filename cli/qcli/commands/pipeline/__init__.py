"""`qcli pipeline`: keeps the tables that topics declare."""
