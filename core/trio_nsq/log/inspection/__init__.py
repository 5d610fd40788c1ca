"""Reading and verifying the files of a log without a broker: for `qcli log`, the import, and spooled exports."""
