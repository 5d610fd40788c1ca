"""Tests for `qcli to-file`."""

import gzip
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.support import DEADLINE_S, Cli, Run, lines, only_ours
from cli.to_file import Writing, depth_of, to_file
from interop.peers import Broker, nsqd
from qcli.commands.to_file.command import command

pytestmark = only_ours


def numbers(count: int, start: int = 0) -> list[bytes]:
    return [b"%06d" % number for number in range(start, start + count)]


def test_status_line_counts_what_is_synced(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(10))
    with qcli.on_terminal("to-file", topic, "--output-dir", str(tmp_path), "--sync-interval=1h") as terminal:
        terminal.expect(b" messages synced, 0 B, ")
        assert terminal.interrupt() == 130


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with nsqd(tmp_path_factory.mktemp("theirs") / "data") as broker:
        yield broker


# ------------------------------------------------------------------ from a log


def test_log_is_written_once_over_restarts(qcli: Cli, broker: Broker, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(1000))
    with to_file(qcli, topic, tmp_path) as writing:
        writing.until_lines(1000)
        code, text = writing.end(signal.SIGTERM)
    assert code == 143
    assert text.endswith("Wrote 1,000 messages (5.9 KiB) to 1 file.\n")
    assert depth_of(broker, topic) == (0, 0)
    qcli.publish(topic, numbers(500, 1000))
    assert depth_of(broker, topic) == (500, 0)
    with to_file(qcli, topic, tmp_path, "--quiet") as writing:
        writing.until_lines(1500)
        code, text = writing.end(signal.SIGINT)
    assert (code, text) == (130, "")
    assert (tmp_path / f"{topic}.log").read_bytes() == lines(numbers(1500))


def test_channel_moves_when_messages_are_synced(
    qcli: Cli, broker: Broker, topic: str, tmp_path: Path
) -> None:
    qcli.publish(topic, numbers(10))
    with to_file(qcli, topic, tmp_path, "--sync-interval", "100ms", "--channel", "mine") as writing:
        writing.until(lambda: depth_of(broker, topic, "mine") == (0, 0))
        assert (tmp_path / f"{topic}.log").read_bytes() == lines(numbers(10))


def test_files_of_a_deleted_topic_are_closed(qcli: Cli, broker: Broker, topic: str, tmp_path: Path) -> None:
    with to_file(
        qcli, f"--topic-pattern=^{topic}$", tmp_path, "--sync-interval", "50ms", "--topic-refresh", "50ms"
    ) as writing:
        for part in range(2):
            qcli.publish(topic, numbers(10, 10 * part))
            writing.until(lambda: depth_of(broker, topic) == (0, 0))
            assert _open_files(writing, tmp_path)
            broker.http("POST", "/topic/delete", topic=topic)
            writing.until(lambda: not _open_files(writing, tmp_path))
        code, text = writing.end()
    assert code == 143
    assert "Wrote 20 messages (120 B) to " in text
    assert (tmp_path / f"{topic}.log").read_bytes() == lines(numbers(20))


def _open_files(writing: Writing, folder: Path) -> list[Path]:
    """Return the files and locks in a folder that the process has open."""
    links = Path("/proc", str(writing.running.process.pid), "fd").iterdir()
    targets = [link.readlink() for link in links if link.is_symlink()]
    return [path for path in targets if path.is_relative_to(folder)]


def test_json_has_the_fields_of_tail(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, [b"text", b"\xff\0", b"two\nlines"])
    assert qcli("pub", topic, "--defer", "1h", stdin=b"later").code == 0
    with to_file(qcli, topic, tmp_path, "--format", "json") as writing:
        writing.until_lines(4)
        writing.end()
    expected = qcli("tail", topic, "--from", "earliest", "--to", "latest", "--format", "json")
    assert (tmp_path / f"{topic}.log").read_bytes() == expected.out


def test_defaults() -> None:
    found = {param.name: param.default for param in command.params}
    assert {name: found[name] for name in ("output_dir", "max_in_flight", "channel", "sync_interval_ms")} == {
        "output_dir": ".",
        "max_in_flight": 2500,
        "channel": "nsq_to_file",
        "sync_interval_ms": "30s",
    }


def test_length_framing_is_published_again_unchanged(
    qcli: Cli, broker: Broker, topic: str, tmp_path: Path
) -> None:
    bodies = [b"\n", b"two\nlines\n", b"\0\0\0\1", b"x" * 300_000]
    qcli.publish(topic, bodies)
    path = tmp_path / f"{topic}-000000.log.gz"
    args = ("--framing", "length", "--compression", "gzip", "--sync-interval", "50ms")
    with to_file(qcli, topic, tmp_path, *args) as writing:
        writing.until(lambda: depth_of(broker, topic) == (0, 0))
        writing.end()
    data = gzip.decompress(path.read_bytes())
    assert data == b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    assert qcli("pub", f"{topic}-again", "--framing", "length", stdin=data).code == 0
    copied = qcli("tail", f"{topic}-again", "--from", "earliest", "--to", "latest", "-d", r"\xff\xff")
    assert copied.out == b"".join(body + b"\xff\xff" for body in bodies)


def test_topics_of_a_pattern_are_found_at_once(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(f"{topic}_a", [b"1"])
    qcli.publish(f"{topic}_b", [b"2"])
    args = ("--topic-pattern", f"^{topic}_", "--output-dir", str(tmp_path), "--filename-format", "<TOPIC>")
    with qcli.running("to-file", *args):
        from cli.to_file import Writing

        with qcli.running("to-file", *args[:1], "^never$", *args[2:]) as other:
            Writing(other, tmp_path).until_lines(2)
    assert sorted(path.name for path in tmp_path.glob(f"{topic}*")) == [f"{topic}_a", f"{topic}_b"]


# ------------------------------------------------------------------ from an nsqd


@pytest.mark.interop
def test_channel_of_an_nsqd_is_finished_after_a_sync(theirs: Broker, topic: str, tmp_path: Path) -> None:
    qcli = Cli(theirs.tcp_address, theirs.http_address)
    theirs.create(topic, "nsq_to_file")
    qcli.publish(topic, numbers(10))
    with to_file(qcli, topic, tmp_path, "--sync-interval", "1h") as writing:
        writing.until_lines(10)
        assert depth_of(theirs, topic) == (0, 10)
        code, text = writing.end()
    assert code == 143
    assert "its channel is consumed, at least once" in text
    assert depth_of(theirs, topic) == (0, 0)
    assert (tmp_path / f"{topic}.log").read_bytes() == lines(numbers(10))


@pytest.mark.interop
def test_starved_consumer_syncs_at_once(theirs: Broker, topic: str, tmp_path: Path) -> None:
    """The sync interval does not limit the rate."""
    qcli = Cli(theirs.tcp_address, theirs.http_address)
    qcli.publish(topic, numbers(1000))
    with to_file(qcli, topic, tmp_path, "--sync-interval", "1h", "--max-in-flight", "100") as writing:
        writing.until_lines(1000)
        writing.end()
    assert sorted((tmp_path / f"{topic}.log").read_bytes().split()) == numbers(1000)


def test_at_least_once_consumes_a_channel(qcli: Cli, broker: Broker, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(10))
    with to_file(qcli, topic, tmp_path, "--at-least-once", "--sync-interval", "1h") as writing:
        writing.until_lines(10)
        assert depth_of(broker, topic)[1] == 10
        writing.end()
    assert depth_of(broker, topic) == (0, 0)


# ------------------------------------------------------------------ as nsq_to_file


def test_command_line_of_nsq_to_file(qcli: Cli, broker: Broker, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(3))
    work, out = tmp_path / "work", tmp_path / "out"
    args = (
        *("-topic=" + topic, "-output-dir", str(out), f"-work-dir={work}", "-gzip", "-gzip-level=9"),
        *(
            "-host-identifier=<SHORT_HOST>-x",
            "-datetime-format=%Y",
            "-skip-empty-files",
            "-rotate-size=1000000",
        ),
        *(
            "-rotate-interval=1h",
            "-sync-interval=1s",
            "-max-in-flight=10",
            "-consumer-opt=heartbeat_interval,10s",
        ),
        *(
            f"-nsqd-tcp-address={broker.tcp_address}",
            "-topic-refresh=10s",
            "-log-level=debug",
            "-log-prefix=x",
        ),
        *("-http-client-connect-timeout=1s", "-http-client-request-timeout=1s", "-channel=c"),
    )
    with qcli.running("to-file", *args) as running:
        from cli.to_file import Writing

        writing = Writing(running, work)
        writing.until(lambda: [path for path in work.glob("*") if path.stat().st_size])
        code, _ = writing.end(signal.SIGTERM)
    assert code == 143
    (path,) = out.glob(f"{topic}*")
    assert re.fullmatch(rf"{topic}\.[^.]+-x-000000\.\d{{4}}\.log\.gz", path.name)
    assert gzip.decompress(path.read_bytes()) == lines(numbers(3))
    assert list(work.glob("*")) == []


def test_hangup_finishes_the_open_file(qcli: Cli, topic: str, tmp_path: Path) -> None:
    out, work = tmp_path / "out", tmp_path / "out" / "work"
    with to_file(qcli, topic, out, "--work-dir", str(work)) as writing:
        for part in range(3):
            qcli.publish(topic, numbers(10, 10 * part))
            path = work / f"{topic}-{part:06d}.log"
            writing.until_lines(10, str(path.relative_to(out)))
            writing.send(signal.SIGHUP)
            writing.until_lines(10, f"{topic}-{part:06d}.log")
        code, _ = writing.end()
    assert code == 143
    found = {path.name: path.read_bytes() for path in out.glob(f"{topic}*")}
    assert found == {f"{topic}-{part:06d}.log": lines(numbers(10, 10 * part)) for part in range(3)}


def test_file_that_logrotate_renamed_is_left_at_hangup(qcli: Cli, topic: str, tmp_path: Path) -> None:
    path, renamed = tmp_path / f"{topic}.log", tmp_path / f"{topic}.log.1"
    with to_file(qcli, topic, tmp_path) as writing:
        qcli.publish(topic, numbers(10))
        writing.until_lines(10)
        path.rename(renamed)
        writing.send(signal.SIGHUP)
        # Messages that it receives before it has handled the signal are in the renamed file.
        deadline, count = time.monotonic() + DEADLINE_S, 10
        while not path.exists():
            assert time.monotonic() < deadline
            qcli.publish(topic, numbers(1, count))
            count += 1
            writing.until_lines(count)
        writing.end()
    assert renamed.read_bytes() + path.read_bytes() == lines(numbers(count))


# ------------------------------------------------------------------ errors


def test_second_process_is_refused(qcli: Cli, run_here: Run, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(1))
    with to_file(qcli, topic, tmp_path) as writing:
        writing.until_lines(1)
        result = run_here(qcli, "to-file", topic, "--output-dir", str(tmp_path))
        pid = writing.running.process.pid
        assert (result.code, result.out) == (1, b"")
        assert result.err == (
            f'Error: Topic "{topic}", channel "nsq_to_file": {tmp_path} is being written by process {pid}: '
            "choose another --output-dir, or another --channel and --filename-format.\n"
        )


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "Missing argument 'TOPIC...'"),
        (["t", "--gzip", "--compression", "zstd"], "--gzip and --compression zstd exclude each other."),
        (["t", "--compression-level", "3"], "--compression-level is for --compression gzip or zstd."),
        (["t", "--compression", "gzip", "--compression-level", "10"], "Levels of gzip are 1 to 9, not 10."),
        (["t", "--framing", "length", "-0"], "--framing length has no delimiter"),
        (["t", "--format", "json", "-0"], "--format json writes one object per line"),
        (["t", "--format", "json", "--framing", "length"], "--format json writes one object per line"),
        (["t", "--rotate-size", "unlimited"], "is not a size"),
        (["t", "--sync-interval", "0"], "It must be longer than 0."),
    ],
)
def test_usage_errors(nowhere: Cli, args: list[str], text: str) -> None:
    result = nowhere("to-file", *args)
    assert (result.code, result.out) == (2, b"")
    assert text in " ".join(result.err.split())


def test_format_without_revision(nowhere: Cli, tmp_path: Path) -> None:
    args = ("--output-dir", str(tmp_path), "--gzip", "--filename-format", "<TOPIC>.log")
    result = nowhere("to-file", "t", *args)
    assert result.code == 2
    assert result.err.startswith("Error: --filename-format '<TOPIC>.log' has no <REV>, which compression,")


def test_folder_that_cannot_be_written(nowhere: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    result = nowhere("to-file", "t", "--output-dir", str(tmp_path / "file" / "x"))
    assert (result.code, result.out) == (1, b"")
    assert result.err.startswith(f"Error: Cannot write to {tmp_path}/file")


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no second file system")
def test_work_dir_on_another_file_system(nowhere: Cli, tmp_path: Path) -> None:
    work = Path(f"/dev/shm/qcli-test-{os.getpid()}")
    try:
        result = nowhere("to-file", "t", "--output-dir", str(tmp_path), "--work-dir", str(work))
    finally:
        work.rmdir()
    assert result.code == 1
    assert "are on different file systems" in result.err


def test_no_broker(nowhere: Cli, tmp_path: Path) -> None:
    result = nowhere("to-file", "t", "--output-dir", str(tmp_path))
    assert result.code == 3
    assert "127.0.0.1:1" in result.err


def test_damaged_checkpoint(qcli: Cli, run_here: Run, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(1))
    checkpoint = tmp_path / ".qcli-to-file" / f"{topic}@nsq_to_file.checkpoint"
    checkpoint.parent.mkdir()
    checkpoint.write_text("{")
    result = run_here(qcli, "to-file", topic, "--output-dir", str(tmp_path))
    assert result.code == 5
    assert f"The checkpoint {checkpoint} cannot be used" in result.err


def test_json_records_survive_bytes(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, [bytes(range(256))])
    with to_file(qcli, topic, tmp_path, "--format", "json", "--compression", "none") as writing:
        writing.until_lines(1)
        writing.end()
    record = json.loads((tmp_path / f"{topic}.log").read_bytes())
    assert set(record) >= {"topic", "id", "timestamp", "sequence", "body_base64"}
