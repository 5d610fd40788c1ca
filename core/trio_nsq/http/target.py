"""The request target: path and query, by the rules of Go's net/url, which are nsqd's."""

from collections.abc import Mapping
from urllib.parse import unquote

_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")


def split_target(target: bytes) -> tuple[str, str]:
    """Take a request target apart.

    Args:
        target: As it stands in the request line: `/path?query`, `http://host/path?query`, or `*`.

    Returns:
        The path, decoded, and the query string as it was sent.

    Raises:
        ValueError: The path is badly percent-encoded.
    """
    path, _, query = target.decode("latin-1").partition("?")
    if not path.startswith("/"):
        # RFC 9112 3.2.2: the absolute form is to be accepted, though only proxies are sent it.
        _, scheme_end, rest = path.partition("://")
        if scheme_end:
            path = "/" + rest.partition("/")[2]
    return (_decode(path) if "%" in path else path), query


def parse_query(query: str) -> Mapping[str, str]:
    """Read a query string.

    Args:
        query: Without the `?`.

    Returns:
        The decoded parameters, the first value of each; `""` for one given without `=`.

    Raises:
        ValueError: It is badly percent-encoded, or has a semicolon, which may once have been a separator.
    """
    if ";" in query:
        raise ValueError("semicolon in a query string")
    encoded = "%" in query or "+" in query
    parameters: dict[str, str] = {}
    for pair in query.split("&"):
        if pair:
            name, _, value = pair.partition("=")
            if encoded:
                name, value = _decode(name.replace("+", " ")), _decode(value.replace("+", " "))
            parameters.setdefault(name, value)
    return parameters


def _decode(text: str) -> str:
    for rest in text.split("%")[1:]:
        if len(rest) < 2 or not _HEX_DIGITS.issuperset(rest[:2]):
            raise ValueError(f"bad percent-encoding in {text!r}")
    # What is not UTF-8 becomes U+FFFD: valid in no name, and safe to print.
    return unquote(text)
