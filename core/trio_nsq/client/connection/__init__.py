"""Connections to brokers: settings, TLS, compression, handshake, reading, writing and reconnecting."""
