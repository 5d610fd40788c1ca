"""Copy topics to files, HTTP servers and other brokers."""
