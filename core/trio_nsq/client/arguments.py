"""Checks of names that a caller gives. Not compiled: compiled functions have errors of their own for wrong types."""

from trio_nsq.protocol import is_valid_name
from trio_nsq.protocol.names import is_valid_producer
from trio_nsq.text.arguments import check_type


def check_name(what: str, name: str) -> None:
    """Check the name of a topic or channel. Raises TypeError or ValueError."""
    try:
        valid = is_valid_name(name)
    except TypeError:
        raise TypeError(f"the name of a {what} must be a string, not {type(name).__name__}") from None
    if not valid:
        raise ValueError(f"{name!r} is not a valid {what} name")


def check_producer(name: str) -> None:
    """Check the name of an idempotent producer. Raises TypeError or ValueError."""
    check_type("the name of a producer", name, str)
    if not is_valid_producer(name):
        raise ValueError(
            f"{name!r} is not the name of a producer, 1 to 64 of the characters A-Z a-z 0-9 . _ : -"
        )
