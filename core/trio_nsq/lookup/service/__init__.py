"""The discovery service: brokers register over TCP; consumers and administrators use its HTTP API.

`server` starts it. `listeners` accepts clients, with TLS or in plain text, and gives them to `broker_connection` or to
the HTTP server with the routes of `http_api`. `registry` is the state, without IO; `names_saver` writes its names.
"""
