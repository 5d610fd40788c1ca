"""A node of several broker processes, which share a TCP port and an HTTP address: docs/decisions/0047."""
