"""`qcli spark`: prepare for spark-submit."""
