"""Parse and format addresses: `host:port`, `[v6]:port`."""

import ipaddress

_MAX_PORT = 65535


def parse_address(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Split an address into host and port.

    Args:
        text: `host:port` or `[v6]:port`; with a default port also the host alone. A host that contains colons must be
            in brackets. The host is not resolved.
        default_port: The port of an address without a port; None: the address must have a port.

    Returns:
        The host, without brackets, and the port.

    Raises:
        ValueError: The address is invalid, or the port is not within 1..65535.
    """
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"address {text!r} is not of the form [v6]:port")
        colon, port_text = rest[:1], rest[1:]
    else:
        host, colon, port_text = text.partition(":")
        if ":" in port_text:
            raise ValueError(f"address {text!r} has too many colons; write an IPv6 address as [v6]:port")
    if not host or any(char.isspace() for char in host):
        raise ValueError(f"address {text!r} has no host; write it as host:port")
    if not colon:
        if default_port is None:
            raise ValueError(f"address {text!r} has no port; write it as host:port")
        return host, default_port
    # ASCII digits only: int() also accepts signs, spaces, underscores and the digits of other scripts.
    is_number = port_text.isascii() and port_text.isdigit() and len(port_text) <= 5
    if not is_number or not 0 < int(port_text) <= _MAX_PORT:
        raise ValueError(f"address {text!r} has no valid port; it must be a number from 1 to {_MAX_PORT}")
    return host, int(port_text)


def format_address(host: str, port: int) -> str:
    """Format an address, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host name or IP address is this machine by its form; names are not resolved."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified  # connecting to 0.0.0.0 or :: reaches this machine


def format_peer(address: tuple[str, int] | tuple[str, int, int, int] | str | bytes) -> str:
    """Format the address of a socket as nsqd does.

    Args:
        address: The result of `getpeername`. For an IP socket a tuple. For a unix socket its path, `""` if it has none
            (as for most clients), or bytes with a leading zero for a name in Linux's abstract namespace.

    Returns:
        `host:port`; for a unix socket its path, or `@` and its abstract name, if any.
    """
    if isinstance(address, tuple):
        return format_address(*address[:2])
    if isinstance(address, bytes):
        address = address.replace(b"\0", b"@", 1).decode("utf-8", "backslashreplace")
    name = address or "@"
    return name if name.isprintable() else ascii(name)  # the client chooses the name, and it is logged


def host_of(peer: str) -> str:
    """Return the host of a client's address in the form of `format_peer`; empty for a unix socket."""
    return peer.rpartition(":")[0].strip("[]")


def without_secrets(url: str) -> str:
    """Replace user, password and query of an address or URL by `xxxxx`, for logs and answers.

    Everything up to the last `@` is replaced, because a password may contain URL separators.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    _, at, place = rest.rpartition("@")
    place, question, _ = place.partition("?")
    return f"{scheme}{separator}{'xxxxx@' if at else ''}{place}{'?xxxxx' if question else ''}"
