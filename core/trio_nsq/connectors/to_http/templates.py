"""Templates of URLs and header values: `{{name}}` is replaced by a value of the message.

Values come from producers, so they must not change anything but their own place:

- In a URL, every byte except RFC 3986's unreserved characters is percent-encoded. A value that would make a path
  segment `.` or `..` is refused, because clients and servers resolve such a segment even if it is encoded.
- In a header, control characters, bytes outside of ASCII and `%` are percent-encoded, so that no value ends the line.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from urllib.parse import quote, quote_plus

from ...protocol.message_json import rfc3339

MESSAGE_FIELDS = ("id", "timestamp", "timestamp_ns", "attempts", "body")
"""Placeholders that need a single message."""
FIELDS = ("topic", "channel", *MESSAGE_FIELDS)

_PLACEHOLDER = re.compile(r"\{\{\s*([a-z_]+)\s*\}\}")
_BRACES = re.compile(r"\{\{[^{}]*\}?\}?")
_IN_HEADERS = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
_HOST_AND_PORT = re.compile(r"(?:\[(?P<ip>[^\]]+)\]|(?P<host>[^][\\%:]+))(?::(?P<port>[0-9]{0,9}))?")
_DOT_SEGMENTS = re.compile(r"(?:^|/)(?:\.|%2e){1,2}(?=/|$)", re.IGNORECASE)


class TemplateError(ValueError):
    """A template is invalid. The text says why."""


class UnsafeValue(ValueError):
    """The value of a message cannot stand in this URL. The text says why."""


@dataclass(frozen=True, slots=True)
class Values:
    """What placeholders stand for.

    Attributes:
        body: The body; empty for a batch, whose templates have no placeholders for messages.
        timestamp_ns: When the message was published, Unix nanoseconds.
        headers: Those of the message; no placeholder stands for them.
    """

    topic: str
    channel: str
    id: bytes = b""
    timestamp_ns: int = 0
    attempts: int = 0
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


_READ: Mapping[str, Callable[[Values], bytes]] = {
    "topic": lambda values: values.topic.encode(),
    "channel": lambda values: values.channel.encode(),
    "id": lambda values: values.id,
    "timestamp": lambda values: (rfc3339(values.timestamp_ns) or "").encode(),
    "timestamp_ns": lambda values: b"%d" % values.timestamp_ns,
    "attempts": lambda values: b"%d" % values.attempts,
    "body": lambda values: values.body,
}


def _parse(text: str) -> list[str]:
    """Split a template: literal text at even places, names of placeholders at odd ones. Raises TemplateError."""
    parts = _PLACEHOLDER.split(text)
    for name in parts[1::2]:
        if name not in FIELDS:
            raise TemplateError(f"{{{{{name}}}}} is no placeholder; there are {', '.join(FIELDS)}")
    for literal in parts[::2]:
        if broken := _BRACES.search(literal):
            raise TemplateError(f"{broken[0]!r} is no placeholder; write {{{{name}}}}: {', '.join(FIELDS)}")
    return parts


def _is_host_and_port(text: str) -> bool:
    found = _HOST_AND_PORT.fullmatch(text)
    if found is None or not 0 < int(found["port"] or 1) < 65536:
        return False
    try:
        if found["ip"]:
            IPv6Address(found["ip"])
        else:
            found["host"].encode("idna")  # as name resolution does; not all of these errors are OSErrors
    except ValueError:
        return False
    return True


class HeaderTemplate:
    """The value of a header.

    Args:
        text: The value, with placeholders.

    Attributes:
        fields: The placeholders in it.

    Raises:
        TemplateError: A placeholder is unknown, or the text has control characters.
    """

    def __init__(self, text: str) -> None:
        if re.search(r"[\x00-\x08\x0a-\x1f\x7f]", text):
            raise TemplateError("a header must not contain control characters or line breaks")
        self._parts = _parse(text)
        self.fields: frozenset[str] = frozenset(self._parts[1::2])
        self._fixed = text.encode() if not self.fields else None

    def render(self, values: Values) -> bytes:
        """Return the header's value for a message."""
        if self._fixed is not None:
            return self._fixed
        texts = (
            _header_text(_READ[part](values)) if index % 2 else part for index, part in enumerate(self._parts)
        )
        return "".join(texts).encode()


def _header_text(value: bytes) -> str:
    text = quote(value, safe=_IN_HEADERS)
    core = text.strip(" ")  # receivers strip blanks at the ends of a header
    if core == text:
        return text
    before = len(text) - len(text.lstrip(" "))
    return "%20" * before + core + "%20" * (len(text) - len(core) - before)


class URLTemplate:
    """A URL of a receiver.

    Placeholders may stand in the path and in the query.

    Args:
        text: An http or https URL with placeholders.
        printf: Treat one `%s` as nsq_to_http does in a GET: it stands for the body, with blanks as `+`.

    Attributes:
        fields: The placeholders in it.
        userinfo: `user:password`, percent-encoded; empty: none.
        label: The URL for logs, without user, password, query and fragment, which may be secret.

    Raises:
        TemplateError: The URL is invalid, or a placeholder is unknown or in another part of the URL.
    """

    def __init__(self, text: str, *, printf: bool = False) -> None:
        scheme, separator, rest = text.partition("://")
        if not separator or scheme.lower() not in ("http", "https"):
            raise TemplateError("a URL must begin with http:// or https://")
        found = re.match(r"[^/?#]*", rest)
        authority = found[0] if found else ""
        path, mark, query = rest[len(authority) :].partition("#")[0].partition("?")
        self.userinfo, _, host = authority.rpartition("@")
        self.label = shown = f"{scheme}://{host}{path}"
        if "{{" in authority or "%s" in authority:
            raise TemplateError(f"{shown!r}: a placeholder may stand in the path and in the query only")
        if not host:
            raise TemplateError(f"{shown!r} has no host")
        if re.search(r"[\x00-\x20\x7f]", text.replace("{{ ", "{{").replace(" }}", "}}")):
            raise TemplateError(f"{shown!r} contains blanks or control characters; percent-encode them")
        if not _is_host_and_port(host):
            # The URL is not shown: after a mistake, a part of the password may stand in the host or path.
            raise TemplateError(
                "a URL has no valid host and port. In a password, percent-encode the characters / ? # and @"
            )
        self._start = f"{scheme}://{host}"
        self._path = _parse(path or "/")
        self._query = _parse(mark + query)
        if len(self._path) > 1 and _DOT_SEGMENTS.search("x".join(self._path[::2])):
            raise TemplateError(f"{shown!r}: a path segment must not be . or ..")
        self._printf = printf and "%s" in path + query
        if not printf and "%s" in path + query:
            raise TemplateError(f"{shown!r}: %s stands for the body in --get only; write {{{{body}}}}")
        if (path + query).count("%s") > 1:
            raise TemplateError(f"{shown!r} contains %s more than once; write {{{{body}}}}")
        self.fields = frozenset([*self._path[1::2], *self._query[1::2], *(["body"] if self._printf else [])])
        self._fixed = None if self.fields else f"{self._start}{path or '/'}{mark}{query}"

    def render(self, values: Values) -> str:
        """Return the URL for a message.

        Raises:
            UnsafeValue: A value would make a path segment `.` or `..`.
        """
        if self._fixed is not None:
            return self._fixed
        path = self._fill(self._path, values)
        if _DOT_SEGMENTS.search(path):
            raise UnsafeValue("a value of the message makes a path segment '.' or '..' of the URL")
        return self._start + path + self._fill(self._query, values)

    def _fill(self, parts: list[str], values: Values) -> str:
        texts = [
            quote(_READ[part](values), safe="") if index % 2 else part for index, part in enumerate(parts)
        ]
        if self._printf:
            for index in range(0, len(texts), 2):
                texts[index] = texts[index].replace("%s", quote_plus(values.body))
        return "".join(texts)
