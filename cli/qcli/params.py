"""Values of arguments and options: durations, addresses, names, delimiters.

Each is a function from text to value, for click's `type=`; what it refuses is a usage error.
"""

from __future__ import annotations

import codecs
import re
from typing import NamedTuple

import click

_NS_PER_UNIT = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}
_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_DURATION = re.compile(rf"(?:{_DURATION_PART.pattern})+")
_HOST_PORT = re.compile(r"(?P<host>\[[^\s\[\]]+\]|[^\s:/\[\]]*):(?P<port>[0-9]{1,5})")
_MAX_PORT = 65535
_NAME_RULE = "1 to 64 of the characters . _ - a-z A-Z 0-9, optionally with #ephemeral at the end"


def duration(text: str) -> int:
    """Milliseconds of a length of time as Go writes it, such as `500ms` or `1m30s`."""
    if text == "0":
        return 0
    if re.fullmatch(r"\d+(\.\d*)?|\.\d+", text):
        raise click.BadParameter(f"{text!r} has no unit: write {text}s for seconds, or ms, m, h.")
    if _DURATION.fullmatch(text) is None:
        raise click.BadParameter(f"{text!r} is not a duration such as 500ms, 2s or 1m30s.")
    total_ns = sum(float(count) * _NS_PER_UNIT[unit] for count, unit in _DURATION_PART.findall(text))
    if 0 < total_ns < 10**6:
        raise click.BadParameter(f"{text!r} is less than a millisecond.")
    return round(total_ns / 10**6)


def positive_duration(text: str) -> int:
    """The same, 0 excluded."""
    value_ms = duration(text)
    if value_ms == 0:
        raise click.BadParameter("It has to be longer than 0.")
    return value_ms


def address(text: str) -> str:
    """`host:port` to connect to, an IPv6 host in brackets. Nothing is looked up."""
    host, port = _host_port(text)
    if port == 0:
        raise click.BadParameter(f"{text!r} has no valid port: 1 to {_MAX_PORT}.")
    if not host:
        raise click.BadParameter(f"{text!r} names no host.")
    return text


def listen_address(text: str) -> str:
    """`host:port` to listen on; port 0 is a free one."""
    host, _ = _host_port(text)
    if not host:
        raise click.BadParameter(f"{text!r} names no host: write 0.0.0.0{text} to listen on every interface.")
    return text


def optional_listen_address(text: str) -> str:
    """The same, or nothing."""
    return listen_address(text) if text else text


def _host_port(text: str) -> tuple[str, int]:
    found = _HOST_PORT.fullmatch(text)
    if found is None:
        hint = " Leave 'http://' out." if "://" in text else ""
        raise click.BadParameter(f"{text!r} is not host:port, such as 127.0.0.1:4150.{hint}")
    if int(found["port"]) > _MAX_PORT:
        raise click.BadParameter(f"{text!r} has no valid port: 1 to {_MAX_PORT}.")
    return found["host"], int(found["port"])


def delimiter(text: str) -> bytes:
    r"""Bytes between messages: text in which `\n`, `\t`, `\0`, `\xNN` and the like are understood."""
    try:
        # surrogateescape, because that is how an argument that is not UTF-8 came in
        value, _ = codecs.escape_decode(text.encode("utf-8", "surrogateescape"))
    except ValueError:
        raise click.BadParameter(f"{text!r} holds an escape that means nothing.") from None
    if not value:
        raise click.BadParameter("It may not be empty.")
    assert isinstance(value, bytes)
    return value


class Source(NamedTuple):
    """A topic, and one of its channels or None."""

    topic: str
    channel: str | None

    def __str__(self) -> str:
        return self.topic if self.channel is None else f"{self.topic}/{self.channel}"


def topic_name(text: str) -> str:
    """A valid topic name."""
    return _name(text, "topic")


def source(text: str) -> Source:
    """`TOPIC` or `TOPIC/CHANNEL`, each a valid name."""
    topic, slash, channel = text.partition("/")
    return Source(_name(topic, "topic"), _name(channel, "channel") if slash else None)


def channel_source(text: str) -> Source:
    """`TOPIC/CHANNEL`, each a valid name."""
    found = source(text)
    if found.channel is None:
        raise click.BadParameter(f"{text!r} names no channel: write {text}/CHANNEL.")
    return found


def _name(text: str, kind: str) -> str:
    # Imported here because the help pages do not need the protocol.
    from trio_nsq.protocol import is_valid_name

    if not is_valid_name(text):
        raise click.BadParameter(f"{text!r} is not a {kind} name: {_NAME_RULE}.")
    return text
