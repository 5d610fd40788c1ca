"""Parse addresses of brokers and discovery services."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias
from urllib.parse import urlsplit

from ...protocol.address import format_address, parse_address

DEFAULT_NSQD_TCP_ADDRESS = "127.0.0.1:4150"

_PORTS = {"http": 80, "https": 443}


Addresses: TypeAlias = str | Sequence[str]
"""One address, or several."""


def addresses_of(nsqd: Addresses | None, lookupd: Addresses) -> tuple[list[str], list[str]]:
    """Parse the addresses of brokers and of discovery services, without duplicates.

    Without any, the broker is `127.0.0.1:4150`.

    Raises:
        TypeError: An argument is not a string or a list of strings.
        ValueError: An address is invalid, or there are none.
    """
    lookupds = _each_once("lookupd_http_addresses", lookupd, lookupd_address)
    if nsqd is None:
        nsqd = () if lookupds else DEFAULT_NSQD_TCP_ADDRESS
    brokers = _each_once("nsqd_tcp_addresses", nsqd, nsqd_address)
    if not brokers and not lookupds:
        raise ValueError("nsqd_tcp_addresses is empty; at least one is needed, or lookupd_http_addresses")
    return brokers, lookupds


def _each_once(name: str, given: Addresses, parse: Callable[[str], str]) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if isinstance(texts, bytes) or not isinstance(texts, Iterable):
        raise TypeError(f"{name} is {given!r}; it must be an address, or a list of addresses")
    for text in (texts := list(texts)):
        if not isinstance(text, str):
            raise TypeError(f"{name} has {text!r}; an address must be a string such as '127.0.0.1:4150'")
        if not text.isprintable() or " " in text:
            raise ValueError(f"{name} has {text!r}; an address has no blanks and control characters")
        if "," in text:
            raise ValueError(
                f"{name} has several addresses in one string, {text!r}; give a list of addresses"
            )
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
