"""Tests for `qcli log dump`: selection, formats and damage."""

import json
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import click
import pytest

from cli.support import Cli, Run, lines
from interop.peers import qcli_serve
from log.support import FIRST, HastyFiles, append_each, batch, carry_forward, record_offsets
from qcli.framework.positions import Position, moment, position
from trio_nsq.log import DiskLog, RecordBatch
from trio_nsq.log.record_metadata import metadata_for_batch
from trio_nsq.protocol import pack_messages

START_S = 1_700_000_000
HOUR_S = 3600


def made_at(sequence: int, seconds: int, *bodies: bytes, due_s: int = 0) -> RecordBatch:
    """Return a batch that was published this many seconds after the start."""
    timestamp_ns = (START_S + seconds) * 10**9
    due_ns = (START_S + due_s) * 10**9 if due_s else 0
    return RecordBatch(sequence, 0xABC0 + sequence, timestamp_ns, due_ns, pack_messages(bodies))


BATCHES = [
    made_at(0, 0, b"a", b"b", b"c"),
    made_at(3, HOUR_S, b"d", b"\xff\0"),
    made_at(5, 2 * HOUR_S, b"late", due_s=3 * HOUR_S),
    made_at(6, 3 * HOUR_S, "größer".encode(), b"two\nlines"),
]
OFFSETS = record_offsets(BATCHES)
BODIES = [body for each in BATCHES for body in each.messages.bodies()]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with the topics `clicks` and `other`."""
    for topic, batches in (("clicks", BATCHES), ("other", [batch(0, b"elsewhere")])):
        folder = tmp_path / "data" / "topics" / f"{topic}.topic"
        folder.mkdir(parents=True)
        log = DiskLog(folder, files=HastyFiles())
        append_each(log, batches)
        log.close()
    return tmp_path / "data"


@pytest.fixture
def clicks(data: Path) -> str:
    """The folder of the topic `clicks`."""
    return str(data / "topics" / "clicks.topic")


def test_numbered_batches(log_here: Run, tmp_path: Path) -> None:
    folder = tmp_path / "t.topic"
    folder.mkdir()
    log = DiskLog(folder, files=HastyFiles())
    noted = RecordBatch(
        0, 1, START_S * 10**9, 0, pack_messages([b"a", b"b"]), metadata_for_batch("load:1", 7)
    )
    append_each(log, [noted, batch(2, b"c")])
    log.close()
    found = [json.loads(line) for line in log_here("dump", str(folder), "--format", "json").out.splitlines()]
    assert [(each["body"], each.get("producer"), each.get("number")) for each in found] == [
        ("a", "load:1", 7),
        ("b", "load:1", 7),
        ("c", None, None),
    ]
    assert log_here("dump", str(folder)).out == lines([b"a", b"b", b"c"])
    assert log_here("verify", str(folder)).code == 0


def test_bodies(log_here: Run, data: Path, clicks: str) -> None:
    result = log_here("dump", clicks)
    assert (result.code, result.out, result.err) == (0, lines(BODIES), "")
    assert log_here("dump", f"{clicks}/{FIRST}").out == lines(BODIES)
    assert log_here("dump", str(data)).out == lines([*BODIES, b"elsewhere"])
    assert log_here("dump", "-0", clicks).out == b"".join(body + b"\0" for body in BODIES)
    assert log_here("dump", "-d", "--\\n", clicks, "-n", "2").out == b"a--\nb--\n"
    topics = log_here("dump", "--print-topic", str(data)).out.splitlines()
    assert (topics[0], topics[-1]) == (b"clicks | a", b"other | elsewhere")


def test_json_has_the_fields_of_tail_and_the_place_in_the_log(log_here: Run, clicks: str) -> None:
    records = log_here("dump", clicks, "--format", "json").records
    assert records[0] == {
        "topic": "clicks",
        "id": "000000000000abc0",
        "timestamp_ns": START_S * 10**9,
        "timestamp": "2023-11-14T22:13:20.000000000Z",
        "attempts": 0,
        "sequence": 0,
        "due_ns": None,
        "due": None,
        "body": "a",
    }
    assert [(record["sequence"], int(record["id"], 16) - 0xABC0) for record in records] == [
        (number, number) for number in range(8)
    ]
    assert records[4]["body_base64"] == "/wA="
    assert "body" not in records[4]
    assert records[5]["due_ns"] == (START_S + 3 * HOUR_S) * 10**9
    assert [record["body"] for record in records[6:]] == ["größer", "two\nlines"]


def test_ids_equal_those_of_consumers(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        cli = Cli(broker.tcp_address, broker.http_address)
        broker.create("topic", "channel")
        assert cli("pub", "topic", stdin=b"one\ntwo\n\xff\n").code == 0
        seen = cli("tail", "topic/channel", "-n", "3", "--format", "json").records
        dumped = cli("log", "dump", str(tmp_path / "data"), "--format", "json").records
    for record in seen:
        record["attempts"] = 0  # the log does not record attempts
    for number, record in enumerate(dumped):
        assert record.pop("sequence") == number
        assert (record.pop("due_ns"), record.pop("due")) == (None, None)
        assert record.pop("producer").startswith(
            "qcli-pub:"
        )  # consumers do not see the producer and its number
        assert record.pop("number") == 0
    assert dumped == seen


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--from", "4"], range(4, 8)),
        (["--to", "4"], range(4)),
        (["--from", "2", "--to", "7"], range(2, 7)),
        (["--from", "2", "-n", "3"], range(2, 5)),
        (["--from", "99"], range(0)),
        (["--from", "5", "--to", "5"], range(0)),
        (["--from", "2023-11-14T23:13:20Z"], range(3, 8)),
        (["--to", "2023-11-14T23:13:20+00:00"], range(3)),
        (["--from", "2023-11-14 23:00Z", "--to", "2023-11-15T01:13:20.5Z", "-n", "2"], range(3, 5)),
        (["--from", "4", "--to", "2023-11-15T01:13:20Z"], range(4, 6)),
        (["--from", "5m"], range(0)),
        (["--from", "-5m"], range(0)),
        (["--from", "earliest", "--to", "latest"], range(8)),
        (["--to", "5m"], range(8)),
    ],
)
def test_selection(log_here: Run, clicks: str, flags: list[str], expected: range) -> None:
    result = log_here("dump", clicks, *flags)
    assert (result.code, result.out) == (0, lines([BODIES[number] for number in expected]))


def test_headers(nowhere: Cli, clicks: str) -> None:
    result = nowhere("log", "dump", clicks, "--headers", "--format", "json")
    assert result.records[2] == {
        "topic": "clicks",
        "file": f"{clicks}/{FIRST}",
        "offset": OFFSETS[2],
        "sequence": 5,
        "count": 1,
        "id": "000000000000abc5",
        "timestamp_ns": (START_S + 2 * HOUR_S) * 10**9,
        "timestamp": "2023-11-15T00:13:20.000000000Z",
        "due_ns": (START_S + 3 * HOUR_S) * 10**9,
        "due": "2023-11-15T01:13:20.000000000Z",
        "bytes": OFFSETS[3] - OFFSETS[2],
    }
    assert [record["offset"] for record in result.records] == OFFSETS[:-1]
    text = nowhere("log", "dump", clicks, "--headers", env={"TZ": "UTC"}).out.decode().splitlines()
    assert text[0] == f"{clicks}/{FIRST}"
    assert text[1].split() == ["OFFSET", "SEQUENCE", "COUNT", "BYTES", "TIME"]
    assert text[2].split() == [
        f"{OFFSETS[0]}",
        "0",
        "3",
        f"{OFFSETS[1] - OFFSETS[0]}",
        "2023-11-14T22:13:20.000000+00:00",
    ]
    assert text[4].endswith("due 2023-11-15T01:13:20.000000+00:00")
    assert len(nowhere("log", "dump", clicks, "--headers", "--from", "3", "-n", "2").out.splitlines()) == 4


def test_carried_forward_messages_come_first(log_here: Run, tmp_path: Path) -> None:
    """A message that is also in a segment is printed once. The dump of one segment has only its own messages."""
    folder = tmp_path / "clicks.topic"
    log = DiskLog(folder, segment_bytes=100, files=HastyFiles())
    append_each(log, BATCHES)
    assert carry_forward(log, [1, 4, 6], 10**6)
    log.discard_before(5)
    log.close()
    result = log_here("dump", str(folder))
    assert (result.code, result.out, result.err) == (0, lines([b"b", b"\xff\0", *BODIES[5:]]), "")
    records = log_here("dump", str(folder), "--format", "json").records
    assert [record["sequence"] for record in records] == [1, 4, 5, 6, 7]
    assert records[0]["id"] == "000000000000abc1"
    assert log_here("dump", str(folder), "--from", "2", "-n", "1").out == b"\xff\0\n"
    assert log_here("dump", str(folder), "--to", "2023-11-14T22:14Z").out == b"b\n"
    headers = log_here("dump", str(folder), "--headers", "--format", "json").records
    assert [(record["sequence"], Path(record["file"]).name) for record in headers[:2]] == [
        (1, "stragglers"),
        (4, "stragglers"),
    ]
    (segment, *_) = sorted(folder.glob("*.log"))
    assert log_here("dump", str(segment)).out == lines(BODIES[5:6])
    path = folder / "stragglers"
    content = bytearray(path.read_bytes())
    content[headers[1]["offset"] - 1] ^= 1
    path.write_bytes(content)
    result = log_here("dump", str(folder))
    assert (result.code, result.out) == (5, lines([b"\xff\0", *BODIES[5:]]))
    assert "record of message 1, which was carried forward, is damaged; 1 message lost" in result.err
    path.write_bytes(content[:30])
    result = log_here("dump", str(folder))
    assert (result.code, result.out) == (5, lines(BODIES[5:]))
    assert "unknown number of messages lost" in result.err


def test_damage_is_skipped_and_reported(log_here: Run, clicks: str) -> None:
    path = Path(clicks) / FIRST
    content = bytearray(path.read_bytes())
    content[OFFSETS[2] - 1] ^= 1
    path.write_bytes(content + b"NSQB")
    result = log_here("dump", clicks)
    assert (result.code, result.out) == (5, lines(BODIES[:3] + BODIES[5:]))
    damage, torn = result.err.splitlines()
    assert damage == (
        f"Damage: {path}, byte {OFFSETS[1]} to {OFFSETS[2]}: a record batch does not match its checksum; "
        "2 messages lost, from sequence 3 on"
    )
    assert torn.startswith(f"Torn: {path}, byte {OFFSETS[-1]} to {OFFSETS[-1] + 4}: an unfinished")
    assert log_here("dump", clicks, "--to", "3").code == 0
    # The record's header is valid.
    assert len(log_here("dump", clicks, "--headers", "--format", "json").records) == 4


def test_dump_changes_nothing(log_here: Run, clicks: str) -> None:
    path = Path(clicks) / FIRST
    path.write_bytes(path.read_bytes() + b"torn")
    before = (path.read_bytes(), path.stat().st_mtime_ns)
    assert log_here("dump", clicks).code == 0
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert sorted(each.name for each in Path(clicks).iterdir()) == [FIRST, "incarnation"]


def test_closed_pipe_is_a_silent_success(nowhere: Cli, tmp_path: Path) -> None:
    log = DiskLog(tmp_path / "t.topic", files=HastyFiles())
    append_each(log, [batch(number, b"x" * 100_000) for number in range(100)])
    log.close()
    with nowhere.running("log", "dump", str(tmp_path / "t.topic")) as dump:
        dump.read(10)
        assert dump.process.stdout is not None
        dump.process.stdout.close()
        assert dump.process.wait(30) == 0


@pytest.mark.parametrize(
    "flags",
    [
        ["--from", "yesterday"],
        ["--to", "-5"],
        ["-n", "0"],
        ["--null", "--delimiter", ","],
        ["--format", "json", "--null"],
        ["--headers", "--print-topic"],
        ["--from", "10", "--to", "3"],
        ["--since", "5m", "--until", "1h"],
    ],
)
def test_usage_errors(log_here: Run, clicks: str, flags: list[str]) -> None:
    result = log_here("dump", clicks, *flags)
    assert (result.code, result.out) == (2, b"")


@pytest.mark.parametrize("words", [["dump"], ["verify"], ["archive", "./archive"]])
def test_a_topic_behind_its_data_folder(log_here: Run, data: Path, clicks: str, words: list[str]) -> None:
    command, *archive = words
    for args, said in (
        ([str(data), *archive, "clicks"], f"For the topic clicks alone, PATH is its folder: {clicks}"),
        ([str(data), "clicks", *archive, "x"], f"For the topic clicks alone, PATH is its folder: {clicks}"),
        ([str(data), *archive, "views"], "For one topic, PATH is its folder, DATA/topics/TOPIC.topic."),
    ):
        result = log_here(command, *args)
        assert (result.code, result.out) == (2, b"")
        assert result.err.splitlines()[-1].endswith(f"). {said}")
    assert log_here(command, str(data), *archive, "clicks", "--help").code == 0


def test_a_full_disk(nowhere: Cli, clicks: str) -> None:
    with (
        open("/dev/full", "wb") as full,
        nowhere.running("log", "dump", clicks, stdout=full.fileno()) as dump,
    ):
        result = dump.end()
    assert (result.code, result.err) == (
        1,
        "Error: Cannot write to standard output: No space left on device.\n",
    )


# ---------------------------------------------------------------------- positions


def test_positions() -> None:
    assert position("12") == Position(12, False)
    assert position("0") == Position(0, False)
    assert position("2023-11-14T22:13:20Z") == Position(START_S * 10**9, True)
    assert position("2023-11-14T22:13:20.000001Z") == Position(START_S * 10**9 + 1000, True)
    assert position("2023-11-15T00:13:20+02:00") == Position(START_S * 10**9, True)
    ago = position("1h")
    assert ago.is_time
    assert abs(datetime.now().timestamp() - HOUR_S - ago.value / 10**9) < 60
    assert position("-1h").value - ago.value < 60 * 10**9
    assert abs(position("1d1h").value + 24 * HOUR_S * 10**9 - ago.value) < 60 * 10**9
    assert position("@1700000000.5") == Position(START_S * 10**9 + 500_000_000, True)
    assert position("@2023-11-14T22:13:20Z") == position("@1700000000")
    assert (position("earliest"), position("latest")) == (Position(0, False), Position(2**64, False))
    for text in ("", "@", "-", "x", "12x", "2023-13-01", "1.5", "٣"):
        with pytest.raises(click.BadParameter):
            position(text)


def test_time_as_a_position() -> None:
    for timestamp_ns in (0, START_S * 10**9, START_S * 10**9 + 123_456_000):
        assert position(moment(timestamp_ns)) == Position(timestamp_ns, True)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}[+-]\d\d:\d\d", moment(1))
    assert moment(2**64 - 1)
    whole = datetime.fromtimestamp(START_S, timezone(timedelta(hours=2)))
    assert datetime.fromisoformat(moment(START_S * 10**9)) == whole
