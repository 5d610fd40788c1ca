"""Connections to brokers: settings, TLS and compression, handshake, reading and writing, and when to reconnect."""
