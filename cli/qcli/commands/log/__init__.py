"""`qcli log`: data folders of brokers that do not run."""
