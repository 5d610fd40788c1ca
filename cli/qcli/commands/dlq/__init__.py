"""`qcli dlq`: dead letters."""
