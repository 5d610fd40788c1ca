"""`qcli bench`: the speed of a broker, as seen by clients."""
