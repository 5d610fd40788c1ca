"""What can be set for a single topic or channel, while the broker runs; it is kept with the topic's state.

Nothing of it is there for a client of the V2 protocol to see, unless it is switched on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar, get_args

from ...protocol import NSQError, is_valid_name

WhenFull = Literal["reject", "drop-oldest"]
FOREVER = -1


class SettingsError(NSQError):
    """A setting that is not there, or a value that it cannot have; the text is for whoever sent it."""


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """One topic's settings. 0 means "no such rule", except where it says otherwise.

    Attributes:
        retention_time_ms: Messages that every channel has passed stay readable for this long; -1: for ever.
        retention_bytes: And no more than the newest so many bytes of them; -1: whatever their size. With both at 0
            they go as soon as a segment is passed; with one at 0 the other alone decides.
        ttl_ms: A message that has waited longer than this since it was published is dropped instead of delivered.
        max_messages: Messages that a channel of the topic, or the topic itself, may have waiting: its depth.
        max_bytes: Bytes of the topic's log, about, from the oldest message that a channel has yet to deliver.
        when_full: What happens to a publish that would exceed one of the two: it is refused, or the oldest make room.
    """

    retention_time_ms: int = 0
    retention_bytes: int = 0
    ttl_ms: int = 0
    max_messages: int = 0
    max_bytes: int = 0
    when_full: WhenFull = "reject"

    @property
    def keeps(self) -> bool:
        """Whether messages stay readable that every channel has passed."""
        return bool(self.retention_time_ms or self.retention_bytes)

    @property
    def is_limited(self) -> bool:
        """Whether only so much may wait."""
        return bool(self.max_messages or self.max_bytes)

    @property
    def limits(self) -> tuple[int, int, WhenFull]:
        """What limits how much may wait."""
        return self.max_messages, self.max_bytes, self.when_full

    @property
    def drops(self) -> bool:
        """Whether the oldest make room when it is full."""
        return self.is_limited and self.when_full == "drop-oldest"


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """One channel's settings.

    Attributes:
        max_attempts: After so many deliveries a message that comes back goes to the dead-letter topic, or is dropped
            if there is none. 0: it is delivered for ever. At most 65535: nobody counts further.
        dead_letter_topic: Where it goes; empty: nowhere.
    """

    max_attempts: int = 0
    dead_letter_topic: str = ""


Settings = TypeVar("Settings", TopicSettings, ChannelSettings)

_MAY_BE_FOREVER = ("retention_time_ms", "retention_bytes")
_BIGGEST = 2**53  # what every JSON reader can hold
_MOST_ATTEMPTS = 0xFFFF  # what a message frame has room for


def change(
    defaults: Settings, own: Mapping[str, Any], changes: Mapping[str, Any]
) -> tuple[Settings, dict[str, Any]]:
    """Settings with some of them changed.

    Args:
        defaults: What holds where nothing else is said.
        own: Values by name that are said already.
        changes: New ones, as JSON has them; None goes back to the default.

    Returns:
        The settings in force, and the values that are now said.

    Raises:
        SettingsError: One of the changes is none.
    """
    kinds = {field.name: field.default for field in fields(defaults)}
    said = dict(own)
    for name, value in changes.items():
        if name not in kinds:
            raise SettingsError(f"there is no setting {name}; there are {', '.join(kinds)}")
        if value is None:
            said.pop(name, None)
        else:
            said[name] = _checked(name, value, kinds[name])
    return replace(defaults, **said), said


def _checked(name: str, value: Any, default: object) -> Any:
    if isinstance(default, int):
        least = FOREVER if name in _MAY_BE_FOREVER else 0
        if type(value) is not int or not least <= value <= _BIGGEST:
            raise SettingsError(f"{name} is {value!r}; it must be a whole number, {least} or more")
        if name == "max_attempts" and value > _MOST_ATTEMPTS:
            raise SettingsError(f"{name} is {value}; {_MOST_ATTEMPTS} is the most")
    elif name == "when_full":
        if value not in get_args(WhenFull):
            raise SettingsError(f"{name} is {value!r}; it must be {' or '.join(get_args(WhenFull))}")
    elif not isinstance(value, str) or (value and not is_valid_name(value)):
        raise SettingsError(f"{name} is {value!r}; it must be the name of a topic, or empty")
    return value
