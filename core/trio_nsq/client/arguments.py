"""Checks of arguments, whose errors name the argument."""

import math
import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from numbers import Integral, Real
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

from trio_nsq.protocol import is_valid_name
from trio_nsq.protocol.names import is_valid_producer

from ..event_loop.retries import Delays

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Item = TypeVar("_Item")

MAX_INT = 2**63 - 1
"""Larger integers do not fit into the fields of the protocol."""
_DESCRIPTIONS: dict[Any, str] = {
    bool: "True or False",
    str: "a string",
    PathLike: "a path",
    Callable: "a function",
    ssl.SSLContext: "an ssl.SSLContext",
}


def check_int(name: str, value: int, least: int, most: int | None = None) -> None:
    """Check that a value is an integer within this range; None: what the protocol can have.

    Raises TypeError or ValueError.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be an integer")
    greatest = MAX_INT if most is None else most
    if not least <= value <= greatest:
        within = f"at least {least}" if most is None and value < least else f"within {least}..{greatest}"
        raise ValueError(f"{name} is {value}; it must be {within}")


def check_number(name: str, value: float) -> None:
    """Check that a value is a number; infinity is one. Raises TypeError, and ValueError for NaN."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    if math.isnan(value):
        raise ValueError(f"{name} is {value}; it must be a number")


def check_seconds(name: str, value: float, *, positive: bool = False) -> None:
    """Check that a value is a time of at least 0, or more than 0. Raises TypeError or ValueError."""
    check_number(name, value)
    if value < 0 or (positive and value == 0):
        raise ValueError(f"{name} is {value}; it must be {'more than' if positive else 'at least'} 0")


def reconnect_delays(min_s: float, max_s: float, random: Callable[[], float]) -> Delays:
    """Return the delays of these options. Raises TypeError or ValueError."""
    check_seconds("reconnect_min_s", min_s, positive=True)
    check_seconds("reconnect_max_s", max_s, positive=True)
    if min_s > max_s:
        raise ValueError(f"reconnect_min_s is {min_s}, more than reconnect_max_s, {max_s}")
    return Delays(min_s, max_s, random)


def check_options(options: "DataclassInstance") -> None:
    """Check that each field of a dataclass has the type of its annotation. Raises TypeError or ValueError."""
    for each in fields(options):
        check_type(each.name, getattr(options, each.name), each.type)


def check_type(name: str, value: object, annotation: Any) -> None:
    """Check that a value has a type: a class, a union, a Literal, or a sequence of strings.

    Raises:
        TypeError: It is something else. A bool is no number.
        ValueError: It is not a value of the Literal, NaN, or an integer that the protocol cannot have.
    """
    kinds = get_args(annotation) or (annotation,)
    if get_origin(annotation) is Sequence:
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise TypeError(f"{name} is {value!r}; it must be a list of strings")
        for item in value:
            check_type(f"an item of {name}", item, str)
    elif value is None and type(None) in kinds:
        return
    elif int in kinds:
        check_int(name, value, -MAX_INT, MAX_INT)  # type: ignore[arg-type]  # this is what it checks
    elif float in kinds:
        check_number(name, value)  # type: ignore[arg-type]  # this is what it checks
    elif isinstance(kinds[0], str):
        if value not in kinds:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(kinds)}")
    else:
        classes = tuple(get_origin(kind) or kind for kind in kinds)
        if not isinstance(value, classes):
            wanted = " or ".join(
                _DESCRIPTIONS.get(kind, str(kind)) for kind in classes if kind is not type(None)
            )
            raise TypeError(f"{name} is {value!r}; it must be {wanted}")


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


def list_of(bodies: Iterable[_Item]) -> Sequence[_Item]:
    """Return messages as a sequence. Raises TypeError if these are not several messages."""
    if isinstance(bodies, list | tuple):
        return bodies
    if isinstance(bodies, str | bytes | bytearray | memoryview) or not isinstance(bodies, Iterable):
        raise TypeError(f"the messages must be a list, or another iterable, not {type(bodies).__name__}")
    return list(bodies)


def check_bytes(bodies: Sequence[bytes]) -> None:
    """Check that messages are bytes: otherwise the writer fails, and other publishes with it. Raises TypeError."""
    for body in bodies:
        if not isinstance(body, bytes):
            raise TypeError(f"a message must be bytes, not {type(body).__name__}")
