"""Brokers and transports of other frameworks on NSQ; each module needs the extra of its name."""
