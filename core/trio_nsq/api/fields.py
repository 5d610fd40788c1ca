"""Checks decoded JSON against a `TypedDict`, so that clients can rely on the types of what they read.

A field that the type requires may not be missing, and may be null only if its type says so. Others may be missing, and
then may be null, too; a missing list becomes an empty one.
"""

from collections.abc import Callable, Sequence
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints, is_typeddict

T = TypeVar("T")
_MAX = 1 << 63


class Field(NamedTuple):
    """A field of an object.

    Attributes:
        kind: `str`, `int`, `float`, `bool`, `list` or `dict`.
        inner: The type of a list's members, the `TypedDict` of an object, or `str` for an object of strings.
    """

    name: str
    kind: type
    inner: type | None = None
    needed: bool = False
    or_null: bool = False


def fields_of(kind: type) -> tuple[Field, ...]:
    return _fields_of(kind)


@cache
def _fields_of(kind: Any) -> tuple[Field, ...]:
    required: frozenset[str] = kind.__required_keys__
    return tuple(_field(name, hint, name in required) for name, hint in get_type_hints(kind).items())


def _field(name: str, hint: Any, needed: bool) -> Field:
    options = get_args(hint) if NoneType in get_args(hint) else (hint,)
    kind = next(each for each in options if each is not NoneType)
    inner = None
    if is_typeddict(kind):
        kind, inner = dict, kind
    elif get_origin(kind) is list:
        (inner,) = get_args(kind)
        kind = list
    elif get_origin(kind) is dict:
        _, of_values = get_args(kind)
        kind, inner = dict, None if of_values is Any else of_values
    return Field(name, kind, inner, needed, len(options) > 1)


def check(value: Any, kind: type[T]) -> T:
    """Return a value of this `TypedDict`, in place and with its other fields. Raises ValueError: it is none."""
    _check(value, fields_of(kind))
    checked: T = value
    return checked


def exactly(kind: type[T]) -> Callable[[Any], T]:
    """Return a function that checks a value as `check` does, and returns it without other fields."""

    def checked(value: Any) -> T:
        found: Any = only(value, fields_of(kind))
        return found  # type: ignore[no-any-return]  # of the type, as was just checked

    return checked


def value_of(name: str, kind: Any) -> Callable[[Any], Any]:
    """Return a function that returns the only field of an object that matters. It raises ValueError as `check`."""
    field = _field(name, kind, needed=True)
    return lambda value: only(value, (field,))[name]


def only(value: Any, fields: Sequence[Field]) -> dict[str, Any]:
    """Return an object with only these fields. Raises ValueError: one has another type, or is needed and missing."""
    _check(value, fields)
    return _known(value, fields)


def _known(value: Any, fields: Sequence[Field]) -> dict[str, Any]:
    by_name = {field.name: field for field in fields}
    found = {name: each for name, each in value.items() if name in by_name}
    for name, each in found.items():
        inner = by_name[name].inner
        if isinstance(each, str):
            each.encode()  # raises a ValueError for half a surrogate pair
        elif inner is str and isinstance(each, dict):
            "".join([*each, *each.values()]).encode()
        elif inner is not None and is_typeddict(inner):
            if isinstance(each, list):
                found[name] = [_known(member, fields_of(inner)) for member in each]
            elif each is not None:
                found[name] = _known(each, fields_of(inner))
    return found


def _check(value: Any, fields: Sequence[Field]) -> None:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    for name, kind, inner, needed, or_null in fields:
        found: Any = value.get(name)
        if found is None:
            if needed and (name not in value or not or_null):
                raise ValueError(f"{name} is missing")
            if kind is list:
                value[name] = []
        elif not _is(found, kind) or (isinstance(found, int) and not -_MAX <= found < _MAX):
            raise ValueError(f"{name} is not {kind.__name__}")
        elif kind is dict and inner is str:
            _check_members(name, list(found.values()), str)
        elif kind is dict and inner is not None:
            _check(found, fields_of(inner))
        elif isinstance(found, list) and inner is not None:
            _check_members(name, found, inner)


def _is(value: Any, kind: type) -> bool:
    return type(value) is kind or (kind is float and type(value) is int)  # JSON has one kind of numbers


def _check_members(name: str, members: list[Any], kind: type) -> None:
    if is_typeddict(kind):
        fields = fields_of(kind)
        for each in members:
            _check(each, fields)
    elif not all(type(each) is kind for each in members):
        raise ValueError(f"{name} has something that is not {kind.__name__}")
