"""Parse addresses of brokers and discovery services."""

from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from ...protocol.address import format_address, parse_address

_PORTS = {"http": 80, "https": 443}


def each_once(name: str, texts: Sequence[str], parse: Callable[[str], str]) -> list[str]:
    """Parse the addresses of the argument `name`, without duplicates. Raises ValueError, also for a string."""
    if isinstance(texts, str):
        raise ValueError(f"{name} is the string {texts!r}; it must be a list of addresses")
    return list(dict.fromkeys(map(parse, texts)))


def nsqd_address(text: str) -> str:
    """Normalize the TCP address of a broker to `host:port`. Raises ValueError."""
    return format_address(*parse_address(text))


def lookupd_address(text: str) -> str:
    """Check an HTTP address of a discovery service, `host:port` or a URL; strip trailing slashes. Raises ValueError."""
    url = urlsplit(text if "://" in text else f"http://{text}")
    if url.scheme not in _PORTS or url.query or url.fragment:
        raise ValueError(
            f"{text!r} is not the HTTP address of an nsqlookupd; write it as host:port, or as a URL"
        )
    parse_address(url.netloc.rpartition("@")[2], _PORTS[url.scheme] if "://" in text else None)
    return text.rstrip("/")
