"""Values of arguments and options: durations, addresses, names, delimiters.

Each is a function from text to value, or a class if the shell can complete values, for click's `type=`. An invalid
text is a usage error.
"""

import codecs
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from trio_nsq.protocol.address import check_host, check_host_pattern, is_unix_path
from trio_nsq.text.durations import parse_duration_ms, parse_long_duration_ms, parse_retention_ms
from trio_nsq.text.numbers import parse_decimal, parse_integer
from trio_nsq.text.sizes import parse_size
from trio_nsq.text.wording import NAME_RULE

_T = TypeVar("_T")
_HOST_PORT = re.compile(r"(?P<host>\[[^\s/\[\]]+\]|[^\s:/\[\]]*):(?P<port>[0-9]{1,5})")
_PLAIN_HOST = re.compile(r"[A-Za-z0-9_-]{0,63}(\.[A-Za-z0-9_-]{1,63}){0,30}")
_MAX_PORT = 65535
_NO_INT64 = 2**63
_TRUTH = {"1": True, "t": True, "true": True, "0": False, "f": False, "false": False}
_OF_STATSD = " |:@#"


def duration(text: str) -> int:
    """Parse a duration in Go's format, such as `500ms` or `1m30s`, to milliseconds."""
    return parsed(parse_duration_ms, text)


def positive_duration(text: str) -> int:
    value_ms = duration(text)
    if value_ms == 0:
        raise click.BadParameter("It must be longer than 0.")
    return value_ms


def long_duration(text: str) -> int:
    """Parse a duration that may begin with days, `7d` or `1d12h`, to milliseconds."""
    return parsed(parse_long_duration_ms, text)


def retention_time(text: str) -> int:
    """Parse a duration as `long_duration`, to milliseconds; `forever` is -1."""
    return parsed(parse_retention_ms, text)


def byte_size(text: str) -> int:
    """Parse a size such as `4096`, `500MB` or `10GiB` to bytes; `unlimited` is -1."""
    return parsed(parse_size, text)


def parsed(parse: Callable[[str], _T], text: str) -> _T:
    """Return what a function of the library returns for a text. Raises BadParameter: the function raises ValueError."""
    try:
        return parse(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from error


def address(text: str, example: str = "127.0.0.1:4150") -> str:
    """Check `host:port` to connect to, an IPv6 host in brackets. Names are not resolved. Errors have the example."""
    host, port = _host_port(text, example)
    if port == 0:
        raise click.BadParameter(f"{text!r} has no valid port: 1 to {_MAX_PORT}.")
    if not host:
        raise click.BadParameter(f"{text!r} has no host.")
    return text


_HTTPS = "https://"


def is_https(text: str) -> bool:
    """Return whether an address from `http_address` uses TLS."""
    return text.startswith(_HTTPS)


def without_scheme(text: str) -> str:
    """Return an address from `http_address` without `https://`."""
    return text.removeprefix(_HTTPS)


_HTTP_EXAMPLE = "127.0.0.1:4151"


def tcp_address(text: str) -> str:
    if is_unix_path(text):
        raise click.BadParameter(
            f"{text!r} is a unix socket, over which only --nsqd-http-address can be reached: name host:port."
        )
    return address(text)


def http_address(text: str) -> str:
    """Parse a broker's HTTP address: `host:port`, a URL, `https://host:port`, or the path of a unix socket."""
    if is_unix_path(text):
        return text
    scheme, separator, rest = text.rpartition("://")
    rest = rest.removesuffix("/") if separator else rest
    if scheme.lower() == "https":
        return _HTTPS + address(rest, _HTTP_EXAMPLE)
    return address(rest if scheme.lower() == "http" else text, _HTTP_EXAMPLE)


def lookupd_address(text: str) -> str:
    """Parse a discovery service's HTTP address: `host:port`, or a URL."""
    from trio_nsq.client.connection import addresses

    return parsed(addresses.lookupd_address, text)


def tcp_listen_address(text: str) -> str:
    """Check `host:port` to listen on. As in Go, port 0 is a free port, and no host is every interface."""
    _host_port(text)
    return text


def listen_address(text: str) -> str:
    """Check `host:port` to listen on, or the path of a unix socket."""
    return text if is_unix_path(text) else tcp_listen_address(text)


def http_service(text: str) -> str:
    """Check the address of an HTTP service: `host`, `host:port` or a URL. Names are not resolved."""
    from urllib.parse import urlsplit

    try:
        url = urlsplit(text if "://" in text else f"http://{text}")
        found = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:
        found = False
    if not found or any(char.isspace() for char in text):
        from trio_nsq.protocol.address import without_secrets

        shown = without_secrets(text)
        raise click.BadParameter(f"{shown!r} is neither host:port nor an http:// or https:// URL.")
    return text


def _host_port(text: str, example: str = "127.0.0.1:4150") -> tuple[str, int]:
    found = _HOST_PORT.fullmatch(text)
    if found is None:
        scheme, is_url, _ = text.partition("://")
        hint = f" Leave '{scheme}://' out." if is_url else ""
        hint += " TLS over TCP is the option --tls." if is_url and scheme.lower() == "https" else ""
        raise click.BadParameter(f"{text!r} is not host:port, such as {example}.{hint}")
    if int(found["port"]) > _MAX_PORT:
        raise click.BadParameter(f"{text!r} has no valid port: 1 to {_MAX_PORT}.")
    host = found["host"]
    if _PLAIN_HOST.fullmatch(host) is None:
        try:
            host.encode("idna")  # as the resolver of Python does
        except UnicodeError:
            raise click.BadParameter(f"{text!r} has no valid host.") from None
    return host, int(found["port"])


def percentiles(text: str) -> tuple[float, ...]:
    """Parse quantiles, each above 0 and at most 1, separated by commas."""
    try:
        values = tuple(parse_decimal(part.strip(" ")) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number such as 0.99, nor several with commas.") from None
    for value in values:
        if not 0 < value <= 1:
            raise click.BadParameter(f"{value:g} is not above 0 and at most 1; 99 % is written 0.99.")
    return values


def or_nothing(convert: Callable[[str], str]) -> Callable[[str], str]:
    """Return a converter that also accepts an empty text."""
    return lambda text: convert(text) if text else text


def host(text: str) -> str | None:
    """Check a host to announce, without a port; an empty text is None."""
    return _checked(check_host, text) or None


def host_pattern(text: str) -> str | None:
    """Check a host name in which `*` stands for any characters; an empty text is None."""
    return _checked(check_host_pattern, text) or None


def metric_prefix(text: str) -> str:
    """Check the beginning of statsd's names: a character of statsd's own would change what its lines mean."""
    for character in text:
        if character in _OF_STATSD or not (character.isascii() and character.isprintable()):
            raise click.BadParameter(
                f"{text!r} contains {character!r}: use printable ASCII without blanks, '|', ':', '@' and '#'."
            )
    return text


def _checked(check: Callable[[str], None], text: str) -> str:
    if text:
        parsed(check, text)
    return text


class Integer(click.IntRange):
    """An integer as Go writes it, such as 4096, 4_096 or 0x1000; within bounds, and of 64 bits.

    010 is refused: Go would take it for 8.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = parsed(parse_integer, value) if isinstance(value, str) else value
        if number >= _NO_INT64:
            self.fail(f"{value} is 2**63 or more.", param, ctx)
        return super().convert(number, param, ctx)


class Number(click.FloatRange):
    """A number within bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(parsed(parse_decimal, value) if isinstance(value, str) else value, param, ctx)


def _truth(value: object) -> bool | None:
    """Return the boolean of a text that Go accepts; None: Go would refuse it."""
    return _TRUTH.get(str(value).lower())


class Boolean(click.Choice[str]):
    """`true` or `false`, or another text that Go accepts for them."""

    def __init__(self) -> None:
        super().__init__(["true", "false"])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = _truth(value)
        if found is None:
            self.fail(f"{value!r} is not true or false.", param, ctx)
        return found


class Word(click.Choice[str]):
    """One of several words, in upper or lower case. An empty text means `empty`; None: it is an error."""

    def __init__(self, words: Sequence[str], empty: str | None = None) -> None:
        super().__init__(words, case_sensitive=False)
        self._empty = empty

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "" and self._empty is not None:
            return self._empty
        return super().convert(value, param, ctx)


class CountOrWord(Word):
    """An integer within bounds, or a word. The value is a text; empty without one."""

    def __init__(self, least: int, most: int, word: str) -> None:
        super().__init__([word], empty="")
        self._number = Integer(least, most)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value)[:1].isdigit():
            return str(self._number.convert(value, param, ctx))
        return super().convert(value, param, ctx)


class BooleanOrWord(Word):
    """`true`, `false`, or one of several other words."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(["true", "false", *words])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = _truth(value)
        return super().convert(value if found is None else str(found).lower(), param, ctx)


class PathOrNothing(click.Path):
    """The path of a file or folder, with completion; an empty text is None.

    The command checks the path.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return Path(value) if str(value) else None


ESCAPE = r"""\\([\\'"abfnrtv]|x[0-9a-fA-F]{2}|(?![4-7][0-7]{2})[0-7]{1,3})"""
"""A regular expression for the escapes that `unescape` knows."""


def unescape(text: str) -> bytes:
    r"""Replace escapes such as `\n`, `\t`, `\0` and `\xNN`. Raises BadParameter: an escape is unknown."""
    if "\\" in (rest := re.sub(ESCAPE, "", text)):
        unknown = rest[rest.index("\\") :][:2]
        raise click.BadParameter(
            f"{unknown} is not an escape. Escapes are \\n, \\r, \\t, \\0 and so on, \\xNN for any byte, and \\\\ for a "
            "backslash."
        )
    # Python decodes arguments that are not UTF-8 with surrogateescape.
    value, _ = codecs.escape_decode(text.encode("utf-8", "surrogateescape"))
    assert isinstance(value, bytes)
    return value


def delimiter(text: str) -> bytes:
    if not (value := unescape(text)):
        raise click.BadParameter("It must not be empty.")
    return value


class Source(NamedTuple):
    """A topic, with or without one of its channels."""

    topic: str
    channel: str | None

    def __str__(self) -> str:
        return self.topic if self.channel is None else f"{self.topic}/{self.channel}"


def message_id(text: str) -> str:
    if re.fullmatch("[0-9a-f]{16}", text, re.ASCII) is None:
        raise click.BadParameter(f"{text!r} is not a message id: 16 of the digits 0-9 and a-f.")
    return text


def topic_name(text: str) -> str:
    return _name(text, "topic")


def topic_source(text: str) -> Source:
    return Source(topic_name(text), None)


def source(text: str) -> Source:
    """Parse `TOPIC` or `TOPIC/CHANNEL`."""
    topic, slash, channel = text.partition("/")
    return Source(_name(topic, "topic"), _name(channel, "channel") if slash else None)


def channel_source(text: str) -> Source:
    """Parse `TOPIC/CHANNEL`."""
    found = source(text)
    if found.channel is None:
        raise click.BadParameter(f"{text!r} has no channel: write {text}/CHANNEL.")
    return found


def _name(text: str, kind: str) -> str:
    # Imported here to keep --help fast.
    from trio_nsq.protocol import is_valid_name

    if not is_valid_name(text):
        raise click.BadParameter(f"{text!r} is not a {kind} name: {NAME_RULE}.")
    return text
