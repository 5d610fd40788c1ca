"""Conditions on the members of JSON bodies, such as `level=error` or `user.age>=18`.

    FIELD OP VALUE     OP: = != < <= > >=. A message without the field does not meet it.
    FIELD              The field exists.
    !FIELD             The field does not exist.

Names of nested members are separated by dots; a backslash before a dot, another operator or a backslash makes it a part
of the name. Numbers are compared by value, with all digits: `id=9007199254740993` does not match 9007199254740992. A
string equals a value with the same text; `VALUE` in double quotes is always a string. Strings are ordered by code
points, and only with values that are not numbers.
"""

import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from ..protocol.untrusted_json import decode_json
from .json_text import members_of

Path = tuple[str, ...]
"""The names that lead to a member."""

_CONDITION = re.compile(
    r"(?P<absent>!\s*)?(?P<field>(?:\\.|[^\\=!<>])+)(?:(?P<op>==|=|!=|<=|>=|<|>)(?P<value>.*))?", re.DOTALL
)
_NAME = re.compile(r"(?:\\.|[^\\.])+", re.DOTALL)
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", re.ASCII)
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def parse_path(text: str) -> Path:
    """Parse the names of nested members, separated by dots. Raises ValueError."""
    names = _NAME.findall(text)
    # With the separators, the names are the whole text, unless a name is empty.
    if sum(map(len, names)) + len(names) - 1 != len(text):
        raise ValueError(f"{text!r} is not a field such as user.name")
    return tuple(re.sub(r"\\(.)", r"\1", name, flags=re.DOTALL) for name in names)


def find(members: Mapping[str, str], path: Path) -> str | None:
    """Return the text of a member; None if there is none."""
    value = members.get(path[0])
    for name in path[1:]:
        inner = members_of(value) if value is not None else None
        if inner is None:
            return None
        value = inner.get(name)
    return value


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on one member.

    Attributes:
        op: An operator; or `exists` or `absent`.
        text: The value to compare with, as a string.
        number: The value as a number; None: it is none.
        is_string: The value is a string only.
    """

    path: Path
    op: str
    text: str = ""
    number: Decimal | None = None
    is_string: bool = False

    def holds(self, members: Mapping[str, str]) -> bool:
        """Return whether an object meets it."""
        value = find(members, self.path)
        if self.op == "absent" or value is None:
            return value is None and self.op == "absent"
        if self.op == "exists":
            return True
        if self.op == "=":
            return self._equals(value)
        if self.op == "!=":
            return not self._equals(value)
        return self._is_ordered(value)

    def _equals(self, value: str) -> bool:
        if value.startswith('"'):
            return bool(json.loads(value) == self.text)
        if self.is_string:
            return False
        if self.number is not None:
            found = _number(value)
            return found is not None and found == self.number
        return value == self.text and value in ("true", "false", "null")

    def _is_ordered(self, value: str) -> bool:
        order = _ORDERS[self.op]
        if self.number is not None:
            found = _number(value)
            return found is not None and order(found, self.number)
        return value.startswith('"') and order(json.loads(value), self.text)


def parse_condition(text: str) -> Condition:
    """Parse a condition, see above. Raises ValueError."""
    match = _CONDITION.fullmatch(text.strip())
    if match is None or (match["absent"] and match["op"]):
        raise ValueError(f"{text!r} is not a condition such as level=error, age>=18, user.name or !error")
    path = parse_path(match["field"].strip())
    if match["op"] is None:
        return Condition(path, "absent" if match["absent"] else "exists")
    op, value = match["op"].replace("==", "="), match["value"].strip()
    if value.startswith('"'):
        try:
            string = decode_json(value)
        except ValueError:
            raise ValueError(f"{text!r}: the value is not a JSON string") from None
        return Condition(path, op, string, is_string=True)
    if value.startswith(("<", ">", "=")):
        raise ValueError(
            f"{text!r}: {match['op']}{value[0]} is no operator: use = != < <= > >=; if the value begins with "
            f"{value[0]}, put it in double quotes"
        )
    if not value and op in _ORDERS:
        raise ValueError(f"{text!r}: the value to compare with is missing")
    return Condition(path, op, value, _number(value))


def has_member(name: str) -> Condition:
    """Return the condition that an object has a member; the name may have dots."""
    return Condition((name,), "exists")


def member_equals(name: str, value: str) -> Condition:
    """Return the condition that a member equals a value; the name may have dots."""
    return Condition((name,), "=", value, _number(value))


def _number(text: str) -> Decimal | None:
    if _NUMBER.fullmatch(text) is None:
        return None
    try:
        return Decimal(text)
    except InvalidOperation:
        return None  # an exponent of more than 18 digits
