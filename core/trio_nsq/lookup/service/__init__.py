"""The discovery service: brokers register over TCP, consumers and administrators ask over HTTP."""
