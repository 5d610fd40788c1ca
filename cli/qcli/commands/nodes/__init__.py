"""`qcli nodes`: the brokers and discovery services of a fleet, their state, and checks for monitoring."""
