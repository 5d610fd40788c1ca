"""Checks of names and times that a caller gives.

Not compiled: compiled functions have errors of their own for wrong types.
"""

from trio_nsq.protocol import is_valid_name
from trio_nsq.protocol.limits import SECOND_MS
from trio_nsq.protocol.names import is_valid_producer
from trio_nsq.text.arguments import (
    MAX_INT,
    MAX_SECONDS,
    check_int,
    check_seconds,
    check_type,
    in_milliseconds,
    warn_deprecated,
)
from trio_nsq.text.wording import NAME_RULE


def check_name(what: str, name: str) -> None:
    """Check the name of a topic or channel. Raises TypeError or ValueError."""
    try:
        valid = is_valid_name(name)
    except TypeError:
        raise TypeError(f"the name of a {what} must be a string, not {type(name).__name__}") from None
    if not valid:
        raise ValueError(f"{name!r} is not a valid {what} name: {NAME_RULE}")


def check_producer(name: str) -> None:
    """Check the name of an idempotent producer. Raises TypeError or ValueError."""
    check_type("the name of a producer", name, str)
    if not is_valid_producer(name):
        raise ValueError(
            f"{name!r} is not the name of a producer, 1 to 64 of the characters A-Z a-z 0-9 . _ : -"
        )


def in_ms(what: str, seconds: float | None, old_ms: int | None) -> int | None:
    """Return a time in milliseconds; None: none was given. For public methods, whose caller is warned.

    Args:
        what: `defer` or `delay`: the argument is `{what}_s`, and was `{what}_ms`.
        seconds: The argument.
        old_ms: The deprecated one, in milliseconds; None: not given.

    Raises TypeError, ValueError.
    """
    if old_ms is not None:
        check_int(f"{what}_ms", old_ms, 0, MAX_INT)
        if seconds:
            raise TypeError(f"{what}_s and {what}_ms are both given")
        if old_ms:  # 0 is the same in any unit
            warn_deprecated(f"{what}_ms is deprecated: use {what}_s={old_ms / SECOND_MS:g}, in seconds")
        return old_ms
    if seconds is None or (seconds == 0 and type(seconds) is int):  # most are
        return seconds
    check_seconds(f"{what}_s", seconds)
    if seconds > MAX_SECONDS:
        raise ValueError(f"{what}_s is {seconds}; it must be at most {MAX_SECONDS}")
    return in_milliseconds(seconds)
