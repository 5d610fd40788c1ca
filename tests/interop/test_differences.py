"""docs/differences.md and the scripts agree: every difference shown has its row, every row is shown or excused."""

import re
from collections import Counter

from interop.same import (
    authorizing,
    channels,
    consuming,
    identifying,
    limits,
    lines,
    publishing,
    requests,
    restarting,
    timing,
    upgrades,
)
from interop.same.stage import Script
from interop.same.table import DOCUMENT, NOT_BY_SCRIPT, rows

TABLES: list[dict[str, Script]] = [
    *(module.SCRIPTS for module in (lines, identifying, publishing, consuming, channels, timing, limits)),
    *(requests.SCRIPTS, requests.STATS_SCRIPTS),
    {name: parts.before for name, parts in restarting.SCRIPTS.items()},
    {name: parts.after for name, parts in restarting.SCRIPTS.items()},
    *(upgrades.SCRIPTS, upgrades.TLS_REQUIRED, upgrades.TLS_REQUIRED_OVER_TCP),
    *(authorizing.SCRIPTS, authorizing.OVER_TLS),
]
SHOWN = Counter(script.row for table in TABLES for script in table.values() if script.row)


def test_every_difference_that_is_shown_has_a_row() -> None:
    assert SHOWN.keys() <= rows().keys()


def test_every_row_is_shown_or_it_is_said_why_not() -> None:
    """A new row wants a script that `differs` by its key; or its key in NOT_BY_SCRIPT, with what shows it instead."""
    assert rows().keys() - SHOWN.keys() - NOT_BY_SCRIPT.keys() == set()


def test_no_excuse_is_left_over() -> None:
    assert NOT_BY_SCRIPT.keys() - rows().keys() == set()
    assert NOT_BY_SCRIPT.keys() & SHOWN.keys() == set()


def test_the_tests_named_instead_are_there() -> None:
    named = re.findall(r"tests/\S+", " ".join(NOT_BY_SCRIPT.values()))
    assert [path for path in named if not (DOCUMENT.parents[1] / path).exists()] == []


def test_there_are_enough_scripts() -> None:
    assert sum(map(len, TABLES)) >= 150
