"""`qcli archive`: the archives of brokers, without a broker."""
