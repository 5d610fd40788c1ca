"""Checks of arguments, whose errors name the argument."""

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Item = TypeVar("_Item")

MAX_INT = 2**63 - 1
"""Larger integers do not fit into the fields of the protocol."""
MAX_SECONDS = MAX_INT // 1000
"""The longest time in seconds that is accepted where the protocol has a number of milliseconds."""
_DESCRIPTIONS: dict[Any, str] = {
    bool: "True or False",
    str: "a string",
    PathLike: "a path",
    Path: "a pathlib.Path",
    Callable: "a function",
}

_LISTS = {
    (Sequence, str): "list of strings",
    (tuple, str): "tuple of strings",
    (tuple, float): "tuple of numbers",
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


def in_milliseconds(seconds: float) -> int:
    """Return a time in whole milliseconds, rounded; a time above 0 is at least 1, as 0 often has another meaning."""
    return max(1, round(seconds * 1000)) if seconds else 0


def check_options(options: "DataclassInstance") -> None:
    """Check that each field of a dataclass has the type of its annotation. Raises TypeError or ValueError."""
    for each in fields(options):
        check_type(each.name, getattr(options, each.name), each.type)


def check_type(name: str, value: object, annotation: Any) -> None:
    """Check that a value has a type: a class, a union, a Literal, a sequence of strings, or a tuple of one type.

    Raises:
        TypeError: It is something else. A bool is no number.
        ValueError: It is not a value of the Literal, NaN, or an integer that the protocol cannot have.
    """
    kinds = get_args(annotation) or (annotation,)
    if (origin := get_origin(annotation)) is Sequence or origin is tuple:
        wanted_class = tuple if origin is tuple else Sequence
        if isinstance(value, str | bytes) or not isinstance(value, wanted_class):
            raise TypeError(f"{name} is {value!r}; it must be a {_LISTS[origin, kinds[0]]}")
        for item in value:
            check_type(f"an item of {name}", item, kinds[0])
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
                _DESCRIPTIONS.get(kind, f"an instance of {kind.__qualname__}")
                for kind in classes
                if kind is not type(None)
            )
            raise TypeError(f"{name} is {value!r}; it must be {wanted}")


def warn_deprecated(text: str) -> None:
    """Warn of a deprecated argument at the line of the program that called into this package.

    The frames are counted here, because compiled functions have none.
    """
    level, frame = 1, sys._getframe()
    package = __name__.partition(".")[0]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, DeprecationWarning, stacklevel=level)
