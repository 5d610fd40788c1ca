"""The long form of tests: `make soak` runs all of it, `make test` a part.

`SOAK=1` in the environment selects the long form. Tests that only it runs have the mark `soak`:
`SOAK=1 make pytest ARGS='-m soak'` runs these.
"""

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

SOAK = os.environ.get("SOAK") == "1"
"""Whether all tests run, with all examples."""
_SHARE = 5
Value = TypeVar("Value")


def examples(full: int = 100) -> int:
    """Return how many examples a property test draws: a fifth of the full number, which the long form draws."""
    return full if SOAK else -(-full // _SHARE)


def some(values: Sequence[Value], *always: Value) -> list[Value]:
    """Return the values that a loop tries, in their order: each fifth and those in `always`; all in the long form."""
    return [each for at, each in enumerate(values) if SOAK or at % _SHARE == 0 or each in always]


def in_soak(*values: Any) -> list[Any]:
    """Return parameters of a test or fixture for the long form alone; a tuple has the values of several names."""
    sets = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*each, marks=pytest.mark.soak) for each in sets]
