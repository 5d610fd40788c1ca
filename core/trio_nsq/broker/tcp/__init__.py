"""Clients of the TCP protocol: their connections, TLS and compression, who they are and what they may do."""
