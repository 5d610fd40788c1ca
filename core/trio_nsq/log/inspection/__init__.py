"""Reading and checking the files of a log without its owner: for `qcli log`, the import, and spooled exports."""
