"""Settings of single topics and channels. They can change while the broker runs, and are saved with the topic's state.

The defaults behave as nsqd: a client of the V2 protocol sees no difference unless a setting is changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar, get_args

from ...protocol import NSQError, is_valid_name
from ...protocol.tables import DeclaredTable
from .message_keys import MessageKeys

WhenFull = Literal["reject", "drop-oldest"]
UNLIMITED = -1


class SettingsError(NSQError):
    """A setting is unknown, or its value is invalid. The text is the answer to the client."""


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """One topic's settings. 0 disables a rule unless stated otherwise.

    Attributes:
        retention_time_ms: How long messages that every channel has passed stay readable; -1: without limit.
        retention_bytes: Maximum bytes of such messages, the newest are kept; -1: without limit. If both are 0, the
            broker removes a segment as soon as every channel has passed it. If one is 0, only the other applies.
        ttl_ms: Maximum age of a message. Older messages are dropped instead of delivered.
        max_messages: Maximum depth of each channel, and of the topic.
        max_bytes: Approximate maximum bytes of the topic's log from the oldest undelivered message on.
        when_full: What the broker does if a publish would exceed `max_messages` or `max_bytes`: refuse it (`reject`),
            or drop the oldest messages (`drop-oldest`).
        expire_idle_ms: How long the topic may be idle before it is deleted: without a publish, a consumer, or a message
            that waits.
        table: The table that `qcli pipeline run` keeps for the topic, see `DeclaredTable`; empty: none. The broker does
            not write it.
    """

    retention_time_ms: int = 0
    retention_bytes: int = 0
    ttl_ms: int = 0
    max_messages: int = 0
    max_bytes: int = 0
    when_full: WhenFull = "reject"
    expire_idle_ms: int = 0
    table: str = ""

    @property
    def expires_after_ms(self) -> int:
        """How long the topic must be idle to be deleted: also as long as it keeps messages. 0: it is not deleted."""
        is_kept = self.retention_time_ms < 0 or (self.retention_bytes and not self.retention_time_ms)
        if not self.expire_idle_ms or is_kept:
            return 0
        return max(self.expire_idle_ms, self.retention_time_ms)

    @property
    def keeps(self) -> bool:
        """Whether messages stay readable after every channel has passed them."""
        return bool(self.retention_time_ms or self.retention_bytes)

    @property
    def is_limited(self) -> bool:
        """Whether the number or bytes of waiting messages are limited."""
        return bool(self.max_messages or self.max_bytes)

    @property
    def limits(self) -> tuple[int, int, WhenFull]:
        """The settings that limit waiting messages."""
        return self.max_messages, self.max_bytes, self.when_full

    @property
    def drops(self) -> bool:
        """Whether a full topic drops its oldest messages."""
        return self.is_limited and self.when_full == "drop-oldest"


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """One channel's settings.

    Attributes:
        max_attempts: How many deliveries of a message may fail. After the last one, the message goes to the dead-letter
            topic, or is dropped if there is none. 0: without limit. At most 65535. A delivery that ended before the
            client began the message does not count, as far as the broker knows.
        dead_letter_topic: The topic for exhausted messages; empty: drop them.
        order_by: Where a message has its key, see `MessageKeys`. At most one message of a key is in flight, and those
            of a key are delivered by sequence. Empty: without an order.
        rate_limit_per_s: The most deliveries per second, see `RateLimit`. 0: without limit.
        expire_idle_ms: How long the channel may be idle before it is deleted: without a consumer or a message. 0: for
            ever.
    """

    max_attempts: int = 0
    dead_letter_topic: str = ""
    order_by: str = ""
    rate_limit_per_s: int = 0
    expire_idle_ms: int = 0

    def discloses_more_than(self, before: "ChannelSettings") -> bool:
        """Whether more messages go to a dead-letter topic than before, or messages go to another one."""
        if not self.dead_letter_topic:
            return False
        return self.dead_letter_topic != before.dead_letter_topic or (
            0 < self.max_attempts < (before.max_attempts or _MAX_ATTEMPTS + 1)
        )


Settings = TypeVar("Settings", TopicSettings, ChannelSettings)

_MAY_BE_UNLIMITED = ("retention_time_ms", "retention_bytes")
_MAX_VALUE = 2**53  # the largest integer that every JSON reader represents exactly
_MAX_ORDER_BY = 1024
_MAX_ATTEMPTS = 0xFFFF  # the message frame has 16 bits for attempts


def change(
    defaults: Settings, own: Mapping[str, Any], changes: Mapping[str, Any]
) -> tuple[Settings, dict[str, Any]]:
    """Return settings with some values changed.

    Args:
        defaults: Values of settings that are not set.
        own: Values by name that are set already.
        changes: New values by name, as in JSON; None restores the default.

    Returns:
        The settings in force, and the values by name that are now set.

    Raises:
        SettingsError: A name is unknown or a value invalid.
    """
    kinds = {field.name: field.default for field in fields(defaults)}
    own = dict(own)
    for name, value in changes.items():
        if name not in kinds:
            raise SettingsError(f"unknown setting {name}; the settings are {', '.join(kinds)}")
        if value is None:
            own.pop(name, None)
        else:
            own[name] = _checked(name, value, kinds[name])
    return replace(defaults, **own), own


def _check_order(value: Any) -> None:
    """Raise ValueError if messages cannot be ordered by this."""
    if not isinstance(value, str):
        raise ValueError("it must be a string")
    if len(value) > _MAX_ORDER_BY:
        raise ValueError(f"the maximum is {_MAX_ORDER_BY} characters")
    if value:
        MessageKeys(value)


def _check_table(value: Any) -> None:
    """Raise ValueError if this is not the form of a table."""
    if not isinstance(value, str):
        raise ValueError("it must be a string")
    if value:
        DeclaredTable.parse(value)


_CHECKS = {"order_by": _check_order, "table": _check_table}


def _checked(name: str, value: Any, default: object) -> Any:
    if isinstance(default, int):
        least = UNLIMITED if name in _MAY_BE_UNLIMITED else 0
        if type(value) is not int or value < least:
            raise SettingsError(f"{name} is {value!r}; it must be a whole number, {least} or more")
        most = _MAX_ATTEMPTS if name == "max_attempts" else _MAX_VALUE
        if value > most:
            raise SettingsError(f"{name} is {value}; the maximum is {most}")
    elif name == "when_full":
        if value not in get_args(WhenFull):
            raise SettingsError(f"{name} is {value!r}; it must be {' or '.join(get_args(WhenFull))}")
    elif name in _CHECKS:
        try:
            _CHECKS[name](value)
        except ValueError as exc:
            raise SettingsError(f"{name} is {value!r}; {exc}") from exc
    elif not isinstance(value, str) or (value and not is_valid_name(value)):
        raise SettingsError(f"{name} is {value!r}; it must be the name of a topic, or empty")
    return value
