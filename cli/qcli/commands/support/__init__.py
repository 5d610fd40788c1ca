"""`qcli support`: what a bug report needs."""
