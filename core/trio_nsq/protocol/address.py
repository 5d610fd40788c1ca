"""Parse and format addresses: `host:port`, `[v6]:port`."""

import ipaddress
import re

MAX_PORT = 65535
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_ZONE = re.compile(r"[A-Za-z0-9_.-]{1,15}")  # the longest name of an interface
_LABEL = "[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,254}}\Z)(?:{_LABEL}\.)*{_LABEL}\.?", re.ASCII)


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
    if "://" in text:
        scheme = text.partition("://")[0]
        raise ValueError(f"address {text!r} has a scheme; write it as host:port, without {scheme}://")
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
    if not is_number or not 0 < int(port_text) <= MAX_PORT:
        raise ValueError(f"address {text!r} has no valid port; it must be a number from 1 to {MAX_PORT}")
    return host, int(port_text)


def is_unix_path(address: str) -> bool:
    """Whether an address is the path of a unix socket: it has a slash, and a colon only if it begins as a path does."""
    return "/" in address and (address.startswith(("/", ".")) or ":" not in address)


def check_host(text: str) -> None:
    """Check a host without a port: a name, or an address without brackets. It is not resolved. Raises ValueError."""
    if text.startswith("["):
        raise ValueError(f"{text!r} is not a host: write an IPv6 address without brackets, such as ::1")
    try:
        ipaddress.ip_address(text)
        return
    except ValueError:
        pass
    if _NAME.fullmatch(text):
        return
    host, colon, port = text.rpartition(":")
    if colon and _NAME.fullmatch(host) and port.isdigit():
        raise ValueError(f"{text!r} has a port: write the host alone, {host}")
    raise ValueError(
        f"{text!r} is not a host name of letters, digits, dots, - and _, nor an IP address; a name in another script "
        "is written as xn--..."
    )


def check_host_pattern(text: str) -> None:
    """Check a host in which `*` stands for any characters. Raises ValueError."""
    check_host(text.replace("*", "a"))


def format_address(host: str, port: int) -> str:
    """Format an address, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def next_port(tcp_address: str) -> str:
    """Return the HTTP address that belongs to a TCP address by convention: the next port."""
    host, _, port = tcp_address.rpartition(":")
    return f"{host}:{min(int(port) + 1, MAX_PORT)}"


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


def is_ip_peer(text: str) -> bool:
    """Whether a text is the address of an IP socket in the form of `format_peer`. It may come from anybody."""
    host, _, port = text.rpartition(":")
    if not _PORT.fullmatch(port) or int(port) > MAX_PORT:
        return False
    is_v6 = host.startswith("[") and host.endswith("]")
    host, percent, zone = (host[1:-1] if is_v6 else host).partition("%")
    if percent and not (is_v6 and _ZONE.fullmatch(zone)):
        return False
    try:
        return ipaddress.ip_address(host).version == (6 if is_v6 else 4)
    except ValueError:
        return False


def host_of(address: str) -> str:
    """Return the host of an address, of a server or in the form of `format_peer`; empty for a unix socket."""
    return "" if is_unix_path(address) else address.removeprefix("https://").rpartition(":")[0].strip("[]")


def network_of(host: str) -> str:
    """Return the key of a client's address: of IPv6 the network (64 bits), because one client can use all addresses of
    it; of everything else the address itself."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped
    return str(mapped) if mapped is not None else address.packed[:8].hex()


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
