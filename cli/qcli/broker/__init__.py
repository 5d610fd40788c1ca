"""How commands reach a broker: addresses, connection options, HTTP requests, and reading a topic's log."""
