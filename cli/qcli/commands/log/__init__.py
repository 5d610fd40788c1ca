"""`qcli log`: data folders, without a broker."""
