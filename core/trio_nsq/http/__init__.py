"""The small HTTP server that the broker, the discovery service and the admin endpoints share.

`httptools` parses requests, a `Router` finds the route, and its async handler answers. `serve_connection` handles
keep-alive, limits, deadlines and closing. Each client has a task; with a `Poller`, the poller reads the clients, and a
route can answer there by its `begin`, without a task switch.
"""
