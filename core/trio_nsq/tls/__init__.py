"""TLS for servers: the broker and the discovery service.

`settings` has the options, and is cheap to import; `context` reads the files; `session` is TLS without IO; `stream` is
a session over a trio stream. They use pyOpenSSL, because nsqd's policy `require` demands a certificate without
verifying it, which the standard library's `ssl` cannot do.
"""
