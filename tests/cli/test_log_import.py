"""Tests for the report and exit codes of `qcli log import`. tests/nsqd_import and tests/interop test the
imported data.
"""

import fcntl
import json
import os
from pathlib import Path

import pytest

from cli.support import Cli, Run, lines_until_ready, serving
from nsqd_import.nsqd_files import Queued, write_metadata, write_queue

DEFERRED_NOTE = (
    "Note: nsqd does not store the times of deferred messages: the broker delivers them at once.\n"
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The data folder of an nsqd."""
    source = tmp_path / "nsqd"
    write_metadata(source, {"orders": ["only"], "clicks": ["a", "b"]}, paused=["orders", "clicks/b"])
    write_queue(source, "clicks", [Queued(7), Queued(8)])
    write_queue(source, "clicks:a", [Queued(3), Queued(4), Queued(1, attempts=2)])
    write_queue(source, "clicks:b", [Queued(number) for number in range(1, 7)])
    write_queue(source, "orders:only", [Queued(1, body=b"x" * 2048)])
    return source


def words(text: bytes) -> list[list[str]]:
    """Return the words of each line."""
    return [line.split() for line in text.decode().splitlines()]


def test_report(nowhere: Cli, tmp_path: Path, source: Path) -> None:
    ours = str(tmp_path / "ours")
    for flags, outcome in ((["--dry-run"], "planned"), ([], "imported")):
        result = nowhere("log", "import", str(source), "--data-path", ours, *flags)
        assert (result.code, result.err) == (0, DEFERRED_NOTE)
        assert words(result.out) == [
            ["TOPIC", "CHANNEL", "PAUSED", "OUTCOME", "MESSAGES", "ATTEMPTED", "SIZE"],
            ["clicks", outcome, "8", "72", "B"],
            ["clicks", "(in", "none", "yet)", "2"],
            ["clicks", "a", "3", "1"],
            ["clicks", "b", "paused", "6", "0"],
            ["orders", "paused", outcome, "1", "2.0", "KiB"],
            ["orders", "only", "1", "0"],
        ]
    again = nowhere("log", "import", str(source), "--data-path", ours)
    assert (again.code, again.err) == (0, "")
    assert words(again.out)[1:] == [
        ["clicks", "imported", "earlier"],
        ["orders", "paused", "imported", "earlier"],
    ]


def test_a_broker_starts_without_a_warning(nowhere: Cli, tmp_path: Path, source: Path) -> None:
    data = tmp_path / "data"
    assert nowhere("log", "import", str(source), "--data-path", str(data)).code == 0
    next_id = json.loads((data / "broker.json").read_bytes())["next_id"]
    with serving(tmp_path) as broker:
        log = "".join(lines_until_ready(broker))
    assert "found 2 topics" in log
    assert "WARNING" not in log
    assert json.loads((data / "broker.json").read_bytes())["next_id"] > next_id


def test_json(nowhere: Cli, tmp_path: Path, source: Path) -> None:
    write_queue(source, "nobody", [Queued(1)])
    result = nowhere("log", "import", str(source), "--data-path", str(tmp_path / "ours"), "--format", "json")
    clicks, _, rest = result.records
    assert clicks == {
        "topic": "clicks",
        "outcome": "imported",
        "paused": False,
        "messages": 8,
        "body_bytes": 72,
        "waiting": 2,
        "channels": [
            {"channel": "a", "paused": False, "messages": 3, "attempted": 1},
            {"channel": "b", "paused": True, "messages": 6, "attempted": 0},
        ],
        "findings": [],
    }
    (finding,) = rest.pop("findings")
    assert rest == {"topic": None}
    assert (finding["kind"], Path(finding["file"]).name) == ("note", "nobody.diskqueue.000000.dat")


def test_damaged_files_are_named(nowhere: Cli, tmp_path: Path, source: Path) -> None:
    path = source / "clicks:a.diskqueue.000000.dat"
    os.truncate(path, path.stat().st_size - 1)
    result = nowhere("log", "import", str(source), "--data-path", str(tmp_path / "ours"))
    assert (result.code, result.err) == (5, DEFERRED_NOTE)
    assert f"damage  {path}, byte " in result.out.decode()
    assert "not imported (nsqd would not read it either)" in result.out.decode()


def test_refusals(nowhere: Cli, tmp_path: Path, source: Path) -> None:
    ours = tmp_path / "ours"
    (ours / "topics" / "orders.topic").mkdir(parents=True)
    refused = nowhere("log", "import", str(source), "--data-path", str(ours))
    assert (refused.code, refused.out) == (1, b"")
    assert "has a topic orders already: nothing was imported. --if-exists skip" in refused.err
    assert nowhere("log", "import", str(source), "--data-path", str(ours), "--if-exists", "skip").code == 0
    assert nowhere("log", "import", str(source), "--data-path", str(ours), "--if-exists", "replace").code == 0
    for arguments, code, says in (
        ([str(tmp_path), "--data-path", str(tmp_path / "x")], 1, "is not the data folder of an nsqd"),
        ([str(source), "--data-path", str(source / "x")], 1, "inside nsqd's data folder"),
        ([str(source), "--data-path", str(tmp_path / "no" / "x")], 1, "does not exist"),
        ([str(source)], 2, "Missing option '--data-path'"),
        ([str(tmp_path / "missing"), "--data-path", str(ours)], 2, "does not exist"),
    ):
        result = nowhere("log", "import", *arguments)
        assert (result.code, result.out) == (code, b""), arguments
        assert says in result.err


def test_failure_after_some_topics(nowhere: Cli, tmp_path: Path, source: Path) -> None:
    ours = tmp_path / "ours"
    # The path of the second topic is occupied by something that cannot be removed or replaced by a folder.
    (ours / "topics").mkdir(parents=True)
    (ours / "topics" / "orders.topic-importing").write_text("in the way")
    result = nowhere("log", "import", str(source), "--data-path", str(ours), "--format", "json")
    assert result.code == 4
    assert [record["topic"] for record in result.records] == ["clicks"]
    assert result.err.endswith(
        "1 of 2 topics were not imported. Fix the cause, then run the same command again.\n"
    )
    (ours / "topics" / "orders.topic-importing").unlink()
    again = nowhere("log", "import", str(source), "--data-path", str(ours), "--format", "json")
    assert (again.code, [record["outcome"] for record in again.records]) == (
        0,
        ["imported earlier", "imported"],
    )


def test_own_data_folder_is_refused(nowhere: Cli, run_here: Run, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    (ours / "topics").mkdir(parents=True)
    args = ("log", "import", str(ours), "--data-path", str(tmp_path / "other"))
    expected = (
        f"Error: {ours} is a data folder of 'qcli serve'{{}}, and not of an nsqd: there is nothing to import."
    )
    result = run_here(nowhere, *args)
    assert result.code == 1
    assert result.err.startswith(expected.format(""))
    fd = os.open(ours, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # as a broker does
        result = run_here(nowhere, *args)
    finally:
        os.close(fd)
    assert result.code == 1
    assert result.err.startswith(expected.format(", in use by a running broker"))
