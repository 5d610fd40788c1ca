"""Recognizes the protocol of a client from its first bytes."""

_HTTP_METHODS = (b"GET ", b"POST", b"PUT ", b"HEAD", b"OPTI", b"DELE", b"PATC", b"CONN", b"TRAC", b"PRI ")
_TLS = b"\x16\x03"
"""The record of a handshake, of any version since SSL 3."""


def protocol_of(data: bytes) -> str:
    """Return `HTTP`, `TLS` or `NSQ`; empty if the first bytes, four or more, are of none of them."""
    if data.startswith(_HTTP_METHODS):
        return "HTTP"
    if data.startswith(_TLS):
        return "TLS"
    return "NSQ" if data.startswith(b"  V") else ""
