"""Copy topics to files, HTTP servers and other brokers; see docs/decisions/0019-connectors-read-logs.md."""
