"""The page of differences and the scripts agree: every difference shown has its row, every row is shown or excused."""

import re
from collections import Counter
from pathlib import Path

import pytest

from interop.same import (
    authorizing,
    channels,
    consuming,
    discovering,
    identifying,
    limits,
    lines,
    publishing,
    requests,
    restarting,
    timing,
    upgrades,
)
from interop.same.stage import Script, compare, differs, same
from interop.same.table import DOCUMENT, NOT_BY_SCRIPT, rows

TABLES: list[dict[str, Script]] = [
    *(module.SCRIPTS for module in (lines, identifying, publishing, consuming, channels, timing, limits)),
    *(requests.SCRIPTS, requests.STATS_SCRIPTS),
    {name: parts.before for name, parts in restarting.SCRIPTS.items()},
    {name: parts.after for name, parts in restarting.SCRIPTS.items()},
    *(upgrades.SCRIPTS, upgrades.TLS_REQUIRED, upgrades.TLS_REQUIRED_OVER_TCP),
    *(authorizing.SCRIPTS, authorizing.OVER_TLS),
    *(discovering.SCRIPTS, discovering.BOUNDS),
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
    assert [path for path in named if not (DOCUMENT.parents[2] / path).exists()] == []


def test_there_are_enough_scripts() -> None:
    assert sum(map(len, TABLES)) >= 150


@pytest.mark.parametrize(
    ("script", "theirs", "ours"),
    [
        pytest.param(same(), ["OK"], ["error E_INVALID"], id="a difference without a row"),
        pytest.param(differs("key", here=["B"]), ["A"], ["C"], id="another difference than the row's"),
        pytest.param(differs("key", here=["A"]), ["A"], ["A"], id="a row that is no difference any more"),
        pytest.param(differs("key", here=["B"]), ["A"], ["A"], id="a row that is not kept"),
    ],
)
def test_what_fails(script: Script, theirs: list[str], ours: list[str]) -> None:
    with pytest.raises(pytest.fail.Exception):
        compare(script, theirs, ours)


def test_what_does_not_fail() -> None:
    compare(same(), ["OK"], ["OK"])
    compare(differs("key", here=["B"]), ["A"], ["B"])


@pytest.mark.parametrize("line", ["| subject | nsqd | here | why |", "| `a` | again | nsqd | here | why |"])
def test_every_row_has_a_key_of_its_own(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = tmp_path / "differences.md"
    heading = "| key | subject | nsqd | here | why |\n|---|---|---|---|---|\n"
    sections = f"{heading}| `a` | subject | nsqd | here | why |\n\n## Second section\n\n{heading}"
    sections += "| `b` | subject | nsqd | here | why |\n"
    document.write_text(sections)
    monkeypatch.setattr("interop.same.table.DOCUMENT", document)
    assert rows().keys() == {"a", "b"}
    document.write_text(f"{sections}{line}\n")
    with pytest.raises(ValueError, match="a key of its own"):
        rows()
