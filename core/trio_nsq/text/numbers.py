"""Parse numbers as people write them: decimal and hexadecimal integers, and decimal fractions.

`int` and `float` of Python also accept blanks, digits of other scripts, and words such as `nan`.
"""

import math
import re

_INTEGER = re.compile(r"[+-]?(?:0[xX](?:_?[0-9a-fA-F])+|[1-9](?:_?[0-9])*|0(?:_?0)*)")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_MAX_DIGITS = 1000
"""Python converts no more than 4300 decimal digits."""


def parse_integer(text: str) -> int:
    """Parse an integer such as `4096`, `-1`, `4_096` or `0x1000`. Raises ValueError, also for 010: is it octal?"""
    if len(text) > _MAX_DIGITS or _INTEGER.fullmatch(text) is None:
        raise ValueError(f"{text[:_MAX_DIGITS]!r} is not an integer")
    return int(text, 0)


def parse_decimal(text: str) -> float:
    """Parse a number such as `2`, `0.5`, `.5` or `1e-3`. Raises ValueError, also if it is not finite."""
    if len(text) > _MAX_DIGITS or _DECIMAL.fullmatch(text) is None or math.isinf(number := float(text)):
        raise ValueError(f"{text[:_MAX_DIGITS]!r} is not a number")
    return number
