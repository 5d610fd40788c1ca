"""Who may do what: identities, their grants, and the file of tokens. Shared by the broker and the discovery service.

Everything is synchronous, does no network IO and takes the time as a parameter; except `access` and `authentication`,
which are parts of a running server.
"""
