"""The settings of topics and channels as people write them: `retention_time=7d`, for commands and the console."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict

from .durations import FOREVER, duration_text, parse_long_duration_ms, parse_retention_ms, retention_text
from .sizes import UNLIMITED, parse_size, size_text

DEFAULT = "default"
"""As a value: the broker's default."""
SettingChange = TypedDict("SettingChange", {"from": str | int, "to": str | int})
"""The old and the new value of a setting, as definitions have it."""


class Setting(NamedTuple):
    """A setting of topics or channels.

    Attributes:
        name: The name for people.
        key: The broker's name, with the unit.
        parse, show: Convert text to the broker's value, and back. `parse` raises ValueError.
        about: The description.
        words: Values that are words, without `DEFAULT`.
        is_choice: Whether no other values are possible.
        may_be_empty: Whether the empty text is a value.
    """

    name: str
    key: str
    parse: Callable[[str], int | str]
    show: Callable[[Any], str]
    about: str
    words: tuple[str, ...] = ()
    is_choice: bool = False
    may_be_empty: bool = False


def _whole_number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is not an integer of 0 or more; '{DEFAULT}' is the broker's default")
    return int(text)


_EXPIRE_IDLE = ("expire_idle", "expire_idle_ms", parse_long_duration_ms, duration_text)


def _rate(text: str) -> int:
    number = text.removesuffix("/s")
    if not (number.isascii() and number.isdigit()):
        raise ValueError(f"{text!r} is not a rate such as 100/s, or 0 for no limit")
    return int(number)


def _rate_text(per_s: int) -> str:
    return f"{per_s}/s" if per_s else "0"


_FOR_TOPICS = (
    Setting(
        "retention_time",
        "retention_time_ms",
        parse_retention_ms,
        retention_text,
        f"keep messages that every channel has passed for this long, such as 12h or 7d, or {FOREVER}",
        (FOREVER,),
    ),
    Setting(
        "retention_bytes",
        "retention_bytes",
        parse_size,
        size_text,
        f"keep at most this many bytes of those messages, such as 10GiB, or {UNLIMITED}",
        (UNLIMITED,),
    ),
    Setting(
        "ttl",
        "ttl_ms",
        parse_retention_ms,
        retention_text,
        "do not deliver messages that are older than this",
    ),
    Setting("max_messages", "max_messages", _whole_number, str, "limit the number of waiting messages"),
    Setting("max_bytes", "max_bytes", parse_size, size_text, "limit the bytes of waiting messages"),
    Setting(
        "when_full",
        "when_full",
        str,
        str,
        "at one of these two limits: reject new messages, or drop-oldest",
        ("reject", "drop-oldest"),
        is_choice=True,
    ),
    Setting(
        *_EXPIRE_IDLE,
        "delete the topic when it was idle for this long: no publish, no consumer, no waiting message",
    ),
    Setting(
        "table",
        "table",
        str,
        str,
        "the table that 'qcli pipeline run' keeps for the topic: delta:URL, iceberg:CATALOG/NAMESPACE.TABLE or "
        "parquet:URL; empty (table=): none",
        may_be_empty=True,
    ),
)
_FOR_CHANNELS = (
    Setting(
        "max_attempts",
        "max_attempts",
        _whole_number,
        str,
        "do not deliver a message again after this many failed deliveries",
    ),
    Setting(
        "dead_letter_topic",
        "dead_letter_topic",
        str,
        str,
        "publish such messages to this topic; empty (dead_letter_topic=): drop them",
        may_be_empty=True,
    ),
    Setting(
        "order_by",
        "order_by",
        str,
        str,
        "deliver the messages of a key one after the other; the key is a member of JSON bodies, such as json:user.id, "
        "or a header, such as header:user; empty (order_by=): without an order",
        may_be_empty=True,
    ),
    Setting(
        "rate_limit",
        "rate_limit_per_s",
        _rate,
        _rate_text,
        "deliver at most this many messages per second, such as 100/s",
    ),
    Setting(
        *_EXPIRE_IDLE,
        "delete the channel when it was idle for this long: no consumer, no message",
    ),
)
SETTINGS: Mapping[str, tuple[Setting, ...]] = {"topic": _FOR_TOPICS, "channel": _FOR_CHANNELS}
