"""Suggests the name that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """What is put behind a sentence about a name that is not known, before its full stop; may be nothing."""
    near = alike(name, names)
    return f" (did you mean {near}?)" if near else ""


def alike(name: str, names: Sequence[str]) -> str | None:
    """The name that was probably meant: one that is written alike, or one that this begins, or is begun by."""
    # Below this, 'rename' is like 'create'.
    if close := difflib.get_close_matches(name, names, 1, cutoff=0.7):
        return close[0]
    # Two letters that changed places weigh too much in a short word.
    if mixed := [each for each in names if sorted(each) == sorted(name)]:
        return mixed[0]
    begun = [each for each in names if len(name) > 1 and (each.startswith(name) or name.startswith(each))]
    return begun[0] if begun else None
