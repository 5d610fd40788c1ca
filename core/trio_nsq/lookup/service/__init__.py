"""The discovery service: brokers register over TCP; consumers and administrators use its HTTP API."""
