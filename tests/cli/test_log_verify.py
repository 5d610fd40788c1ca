"""Tests for `qcli log verify`: output and exit codes."""

import os
from contextlib import chdir
from pathlib import Path
from socket import AF_UNIX, socket

import pytest

from cli.support import Cli, Run
from interop.peers import qcli_serve
from log.support import (
    FIRST,
    HastyFiles,
    append_each,
    batch,
    numbered,
    record_offsets,
    segment_files,
    sync_now,
)
from qcli.commands.log.verify import HEADINGS
from trio_nsq.log import DiskLog
from trio_nsq.log.write_ahead.file import WriteAheadFile

BATCHES = [batch(0, b"a"), batch(1, b"bc", b"def"), batch(3, b"g" * 20)]
OFFSETS = record_offsets(BATCHES)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with two topics, which no broker has opened."""
    for topic in ("clicks", "orders"):
        folder = tmp_path / "data" / "topics" / f"{topic}.topic"
        folder.mkdir(parents=True)
        log = DiskLog(folder, files=HastyFiles())
        append_each(log, BATCHES)
        log.close()
        state = '{{"format":1,"name":"{}","paused":false,"distribution_point":0,"end":4,"ephemeral_needed":4,'
        (folder / "state.json").write_text(state.format(topic) + '"waiting_deferred":[],"channels":[]}')
    return tmp_path / "data"


def segment(data: Path, topic: str = "clicks") -> Path:
    """Return the path of a topic's segment."""
    return data / "topics" / f"{topic}.topic" / FIRST


def damage(path: Path, at: int = OFFSETS[2] - 1) -> None:
    """Flip a bit, by default in the payload of the second record."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_no_damage(log_here: Run, data: Path) -> None:
    result = log_here("verify", str(data))
    assert (result.code, result.err) == (0, "")
    heading, clicks, orders = result.out.decode().splitlines()
    assert heading.split() == list(HEADINGS)
    assert clicks.split() == ["clicks", "ok", "1", f"{OFFSETS[-1]}", "B", "3", "4", "0", "4", "0"]
    assert orders.split()[:2] == ["orders", "ok"]


def test_damage(log_here: Run, data: Path) -> None:
    damage(segment(data))
    result = log_here("verify", str(data))
    assert (result.code, result.err) == (5, "")
    _, clicks, orders, _, finding = result.out.decode().splitlines()
    assert clicks.split()[:2] == ["clicks", "damaged"]
    assert clicks.split()[-1] == "2"
    assert orders.split()[:2] == ["orders", "ok"]
    assert finding == (
        f"damage  {segment(data)}, byte {OFFSETS[1]} to {OFFSETS[2]}: a record batch does not match its checksum; "
        "2 messages lost, from sequence 1 on"
    )


def test_torn_tail_is_not_damage(log_here: Run, data: Path) -> None:
    with segment(data).open("ab") as file:
        file.write(b"NSQB and no more")
    result = log_here("verify", str(data))
    assert result.code == 0
    *_, finding = result.out.decode().splitlines()
    assert finding.startswith(
        f"torn    {segment(data)}, byte {OFFSETS[3]} to {OFFSETS[3] + 16}: an unfinished"
    )


def test_json(log_here: Run, data: Path) -> None:
    damage(segment(data))
    damage(segment(data, "orders"), 3)
    result = log_here("verify", str(data), "--format", "json")
    assert (result.code, result.err) == (5, "")
    clicks, orders = result.records
    assert clicks == {
        "topic": "clicks",
        "path": str(segment(data).parent),
        "state": "damaged",
        "segments": 1,
        "size_bytes": OFFSETS[-1],
        "records": 2,
        "messages": 2,
        "first_sequence": 0,
        "next_sequence": 4,
        "lost_messages": 2,
        "findings": [
            {
                "kind": "damage",
                "file": str(segment(data)),
                "offset": OFFSETS[1],
                "end": OFFSETS[2],
                "what": "a record batch does not match its checksum",
                "sequence": 1,
                "messages": 2,
            }
        ],
    }
    assert (orders["messages"], orders["lost_messages"], orders["state"]) == (4, 0, "damaged")


def test_unknown_number_of_lost_messages(log_here: Run, data: Path) -> None:
    path = segment(data)
    path.write_bytes(bytes(path.stat().st_size))
    (segment(data).parent / "state.json").unlink()
    result = log_here("verify", str(data))
    assert result.code == 5
    assert result.out.decode().splitlines()[1].split()[-1] == "0+"
    assert "unknown number of messages lost" in result.out.decode()


def test_a_topic_and_a_segment(log_here: Run, data: Path) -> None:
    damage(segment(data))
    for path, code in (
        (segment(data).parent, 5),
        (segment(data), 5),
        (segment(data, "orders").parent, 0),
        (segment(data, "orders"), 0),
    ):
        result = log_here("verify", str(path), "--format", "json")
        (record,) = result.records
        assert (result.code, record["topic"], record["path"]) == (
            code,
            path.parts[len(data.parts) + 1][:6],
            str(path),
        )
    copy = data.parent / FIRST
    copy.write_bytes(segment(data).read_bytes())
    (record,) = log_here("verify", str(copy), "--format", "json").records
    assert (record["topic"], record["state"]) == (None, "damaged")


def test_damage_of_the_folder_itself(log_here: Run, data: Path) -> None:
    (data / "broker.json").write_text("{")
    result = log_here("verify", str(data))
    assert result.code == 5
    assert f"damage  {data / 'broker.json'}: damaged, or from another version" in result.out.decode()
    assert log_here("verify", str(data), "--format", "json").records[-1]["topic"] is None


def take_place(path: Path, kind: str) -> None:
    """Replace a file by something that is not a regular file."""
    path.unlink(missing_ok=True)
    if kind == "a folder":
        path.mkdir()
    elif kind == "a named pipe":
        os.mkfifo(path)
    else:
        with socket(AF_UNIX) as listener, chdir(path.parent):  # the path of a socket has a length limit
            listener.bind(path.name)


@pytest.mark.parametrize("kind", ["a folder", "a named pipe", "a socket"])
def test_special_files_are_named_and_the_rest_is_verified(log_here: Run, data: Path, kind: str) -> None:
    folder = segment(data).parent
    names = ("state.json", "state.json.previous", "stragglers", "incarnation", FIRST)
    paths = [data / "broker.json", *(folder / name for name in names)]
    for path in paths:
        take_place(path, kind)
    damage(segment(data, "orders"))
    result = log_here("verify", str(data), "--format", "json")
    assert (result.code, result.err) == (5, "")
    found = {each["file"]: each for record in result.records for each in record["findings"]}
    assert found.keys() == {*map(str, paths), str(segment(data, "orders"))}
    for path in paths:
        assert found[str(path)]["kind"] == "damage"
        assert f"it is {kind}, not a file" in found[str(path)]["what"]


def test_unknown_folders_are_named(log_here: Run, data: Path) -> None:
    folder = segment(data).parent
    folder.rename(data / "elsewhere")
    take_place(folder, "a named pipe")
    result = log_here("verify", str(data))
    assert (result.code, result.err) == (5, "")
    assert f"damage  {folder}: it is not a folder; a broker does not serve the topic\n" in result.out.decode()
    assert result.out.decode().splitlines()[2].split()[:2] == ["orders", "ok"]
    dumped = log_here("dump", str(data))
    assert (dumped.out, "it is not a folder" in dumped.err) == (b"a\nbc\ndef\n" + b"g" * 20 + b"\n", True)


def test_dump_of_a_log_with_a_folder_instead_of_a_segment(log_here: Run, data: Path) -> None:
    take_place(segment(data), "a folder")
    result = log_here("dump", str(data))
    assert (result.code, result.out) == (5, b"a\nbc\ndef\n" + b"g" * 20 + b"\n")
    assert f"{segment(data)}: it is a folder, not a file" in result.err


def test_too_large_state_file_is_not_read(log_here: Run, data: Path) -> None:
    folder = segment(data).parent
    for name in ("state.json", "state.json.previous", "../../broker.json"):
        with (folder / name).open("wb") as file:
            file.truncate(2**33)  # a sparse file
    result = log_here("verify", str(data))
    assert (result.code, result.err) == (5, "")
    text = result.out.decode()
    for name, most in (("state.json", "1,073,741,824"), ("state.json.previous", "1,073,741,824")):
        what = f"damaged (it has 8,589,934,592 bytes; the maximum is {most})"
        assert f"damage  {folder / name}: {what}" in text
    assert f"damage  {data / 'broker.json'}: damaged" in text
    assert "the maximum is 65,536" in text


def test_an_empty_data_folder(log_here: Run, tmp_path: Path) -> None:
    (tmp_path / "topics").mkdir()
    result = log_here("verify", str(tmp_path))
    assert (result.code, result.out, result.err) == (0, b"", f"There are no topics in {tmp_path}.\n")


@pytest.mark.parametrize("command", ["verify", "dump"])
def test_folder_of_several_processes(log_here: Run, tmp_path: Path, command: str) -> None:
    (tmp_path / "process-0" / "topics").mkdir(parents=True)
    (tmp_path / "process-1").mkdir()
    result = log_here(command, str(tmp_path))
    assert result.code == 2
    one = tmp_path / "process-0"
    assert result.err.endswith(f" several processes: name the folder of one of them, such as {one}.\n")
    assert log_here(command, str(one)).code == 0


@pytest.mark.parametrize("command", ["verify", "dump"])
def test_not_a_data_folder(log_here: Run, tmp_path: Path, command: str) -> None:
    (tmp_path / "server.log").write_text("text")
    (tmp_path / "server.txt").write_text("text")
    for path in (tmp_path, tmp_path / "server.txt", tmp_path / "server.log"):
        result = log_here(command, str(path))
        assert (result.code, result.out) == (2, b"")
        assert result.err.startswith(f"Error: {path} is neither a broker's data folder nor")
    (tmp_path / "nsqd.dat").write_text("{}")
    result = log_here(command, str(tmp_path))
    assert result.code == 2
    assert result.err == f"Error: {tmp_path} is the data folder of an nsqd: see 'qcli log import --help'.\n"
    assert log_here(command, str(tmp_path / "missing")).code == 2


def test_names_that_are_not_utf_8(log_here: Run, data: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(data) + b"\xff"))
    data.rename(odd)
    damage(segment(odd))
    for form in ("text", "json"):
        result = log_here("verify", str(odd), "--format", form)
        assert (result.code, result.err) == (5, "")
        assert "data\ufffd" in result.out.decode()


def test_colors_and_progress_are_for_terminals(nowhere: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "big.topic"
    log = DiskLog(folder, files=HastyFiles())
    append_each(log, [batch(sequence, b"x" * 1024 * 1024) for sequence in range(70)])
    log.close()
    damage(segment_files(folder)[0], 100)
    with nowhere.on_terminal("log", "verify", str(folder)) as terminal:
        assert terminal.end() == 5
    assert b"\x1b[31mdamage\x1b[0m" in terminal.shown
    assert b"Verifying" in terminal.shown
    with nowhere.on_terminal("log", "verify", str(folder), NO_COLOR="1") as terminal:
        assert terminal.end() == 5
    assert b"\x1b[31m" not in terminal.shown
    result = nowhere("log", "verify", str(folder))
    assert (result.code, result.err, b"\x1b" in result.out) == (5, "", False)


def test_verify_beside_a_running_broker(nowhere: Cli, tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        broker.create("clicks", "archive")
        cli = Cli(broker.tcp_address, broker.http_address)
        published = b"".join(b"%d\n" % number for number in range(1000))
        assert cli("pub", "clicks", "--batch-size", "7", stdin=published).code == 0
        result = nowhere("log", "verify", str(tmp_path / "data"), "--format", "json")
        assert (result.code, [record["messages"] for record in result.records]) == (0, [1000])
        assert nowhere("log", "dump", str(tmp_path / "data")).out == published
    result = nowhere("log", "verify", str(tmp_path / "data"), "--format", "json")
    assert (result.code, [record["findings"] for record in result.records]) == (0, [[]])


def test_many_small_segments(log_here: Run, tmp_path: Path) -> None:
    log = DiskLog(tmp_path / "t.topic", segment_bytes=300, files=HastyFiles())
    append_each(log, numbered(0, 900))
    log.close()
    count = len(segment_files(tmp_path / "t.topic"))
    (record,) = log_here("verify", str(tmp_path / "t.topic"), "--format", "json").records
    assert (record["segments"], record["messages"], record["lost_messages"]) == (count, 1800, 0)


@pytest.fixture
def ahead(data: Path) -> Path:
    """A message of `clicks` that a power cut left only in the write-ahead log; returns the write-ahead file."""
    log = DiskLog(data / "topics" / "clicks.topic", files=HastyFiles())
    file = WriteAheadFile.create(HastyFiles(), data, 1)
    for sequence in (4, 5):
        log.write([batch(sequence, b"later")])
        part = log.pending_wal()
        assert part is not None
        file.append([(b"clicks", part)])
        sync_now(file)
    file.close()
    os.truncate(segment(data), OFFSETS[-1] + 10)
    return file.path


@pytest.mark.parametrize("of", ["data", "data/topics/clicks.topic", f"data/topics/clicks.topic/{FIRST}"])
def test_messages_in_the_write_ahead_log_are_stored(log_here: Run, data: Path, ahead: Path, of: str) -> None:
    with chdir(data.parent):
        result = log_here("verify", of)
    assert (result.code, result.err) == (0, "")
    assert result.out.decode().splitlines()[1].split()[-3:] == ["0", "6", "0"]
    assert segment(data).stat().st_size == OFFSETS[-1] + 10
    assert ahead.exists()


def test_damage_of_the_write_ahead_log(log_here: Run, data: Path, ahead: Path) -> None:
    damage(ahead, 100)
    result = log_here("verify", str(data))
    assert result.code == 5
    assert f"{ahead}" in result.out.decode()
    assert "are damaged" in result.out.decode()
