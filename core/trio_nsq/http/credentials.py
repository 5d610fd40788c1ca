"""The token in a request's Authorization header."""

import binascii
from base64 import b64decode
from collections.abc import Mapping

MAX_TOKEN_BYTES = 4096


CONSOLE_HEADER = "nsq-console-authorization"
"""The own credentials of a console that asks about a viewer's token. It delays the viewers whose token is wrong itself,
by their addresses, which the server does not know."""


def is_bearer(headers: Mapping[str, str]) -> bool:
    """Whether a request has a Bearer token. Only programs send one: browsers repeat Basic credentials by themselves."""
    return headers.get("authorization", "")[:7].lower() == "bearer "


def token_of(headers: Mapping[str, str], header: str = "authorization") -> bytes | None:
    """Return the token of a request: `Bearer TOKEN`, or Basic with the token as the password.

    Basic is for clients that know nothing else, such as `curl -u` and Prometheus; the user name is ignored. Returns
    None without an Authorization header, and `b""`, which is no valid token, for one that cannot be parsed.
    """
    value = headers.get(header)
    if value is None:
        return None
    scheme, _, parameter = value.partition(" ")
    parameter = parameter.strip(" ")
    if len(parameter) > MAX_TOKEN_BYTES:
        return b""
    if scheme.lower() == "bearer":
        return parameter.encode("latin-1")
    if scheme.lower() == "basic":
        try:
            return b64decode(parameter, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""
