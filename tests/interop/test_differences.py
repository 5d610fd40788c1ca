"""Compare the tables of differences.md with the scripts: each difference has a row, each row a script or a reason."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from interop.same import (
    administering,
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
from interop.same.stage import Expected, Script, compare, differs, same
from interop.same.table import DOCUMENT, NOT_BY_SCRIPT, rows

TABLES: Sequence[Mapping[str, Expected]] = [
    *(module.SCRIPTS for module in (lines, identifying, publishing, consuming, channels, timing, limits)),
    *(requests.SCRIPTS, requests.STATS_SCRIPTS),
    {name: parts.before for name, parts in restarting.SCRIPTS.items()},
    {name: parts.after for name, parts in restarting.SCRIPTS.items()},
    *(upgrades.SCRIPTS, upgrades.TLS_REQUIRED, upgrades.TLS_REQUIRED_OVER_TCP),
    *(authorizing.SCRIPTS, authorizing.OVER_TLS),
    *(discovering.SCRIPTS, discovering.BOUNDS),
    administering.SCRIPTS,
]
SHOWN = Counter(script.row for table in TABLES for script in table.values() if script.row)


def test_every_difference_in_a_script_has_a_row() -> None:
    assert SHOWN.keys() <= rows().keys()


def test_every_row_has_a_script_or_a_reason() -> None:
    """For a new row, add a script that `differs` by its key, or add the key to NOT_BY_SCRIPT with a test or reason."""
    assert rows().keys() - SHOWN.keys() - NOT_BY_SCRIPT.keys() == set()


def test_reasons_are_only_for_rows_without_script() -> None:
    assert NOT_BY_SCRIPT.keys() - rows().keys() == set()
    assert NOT_BY_SCRIPT.keys() & SHOWN.keys() == set()


def test_tests_named_in_reasons_exist() -> None:
    named = re.findall(r"tests/\S+", " ".join(NOT_BY_SCRIPT.values()))
    assert [path for path in named if not (DOCUMENT.parents[2] / path).exists()] == []


def test_number_of_scripts() -> None:
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
def test_compare_fails(script: Script, theirs: list[str], ours: list[str]) -> None:
    with pytest.raises(pytest.fail.Exception):
        compare(script, theirs, ours)


def test_compare_succeeds() -> None:
    compare(same(), ["OK"], ["OK"])
    compare(differs("key", here=["B"]), ["A"], ["B"])


@pytest.mark.parametrize("line", ["| subject | nsqd | here | why |", "| `a` | again | nsqd | here | why |"])
def test_rows_without_unique_key_are_rejected(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
