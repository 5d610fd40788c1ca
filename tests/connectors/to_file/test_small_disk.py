"""Tests of `qcli to-file` on a disk that is full: it waits with one warning, and nothing is lost or repeated."""

import gzip
from pathlib import Path

import pytest

from cli.support import Cli, lines
from cli.to_file import Writing, depth_of, to_file
from faults.small_disk import small_disk
from interop.peers import qcli_serve

TOPIC = "clicks"
COUNT = 6000
BODY_BYTES = 1000
BALLAST_BYTES = 4 * 1024 * 1024

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("consumes", ["log", "channel"])
def test_full_disk_is_waited_for(tmp_path: Path, consumes: str) -> None:
    bodies = [(b"%06d" % number).ljust(BODY_BYTES, b".") for number in range(COUNT)]
    args = [
        *("--sync-interval", "100ms"),
        *(["--at-least-once", "--max-in-flight", str(COUNT // 3)] if consumes == "channel" else []),
    ]
    with qcli_serve(tmp_path / "data") as broker, small_disk(tmp_path / "disk", "8m"):
        qcli = Cli(broker.tcp_address, broker.http_address)
        qcli.publish(TOPIC, bodies)
        ballast = tmp_path / "disk" / "ballast"
        ballast.write_bytes(bytes(BALLAST_BYTES))
        folder = tmp_path / "disk" / "out"
        with to_file(qcli, TOPIC, folder, *args) as writing:
            warning = _next_line(writing, "Warning: ")
            assert warning.startswith(f"Warning: topic {TOPIC}: cannot write its files: ")
            assert "No space left on device. Waiting until this works" in warning
            assert depth_of(broker, TOPIC) != (0, 0)
            ballast.unlink()
            assert _next_line(writing, "") == f"Note: topic {TOPIC}: its files can be written again\n"
            writing.until(lambda: depth_of(broker, TOPIC) == (0, 0))
            code, _ = writing.end()
        assert code == 143
        found = (folder / f"{TOPIC}.log").read_bytes()
        assert sorted(found.splitlines()) == bodies
        if consumes == "log":
            assert found == lines(bodies)


def test_end_while_the_disk_is_full_loses_nothing(tmp_path: Path) -> None:
    bodies = [b"%06d" % number for number in range(COUNT)]
    with qcli_serve(tmp_path / "data") as broker, small_disk(tmp_path / "disk", "2m"):
        qcli = Cli(broker.tcp_address, broker.http_address)
        folder = tmp_path / "disk" / "out"
        args = ("--compression", "gzip", "--sync-interval", "100ms")
        with to_file(qcli, TOPIC, folder, *args) as writing:
            qcli.publish(TOPIC, bodies[:100])
            writing.until(lambda: depth_of(broker, TOPIC) == (0, 0))
            ballast = tmp_path / "disk" / "ballast"
            _fill(ballast)
            qcli.publish(TOPIC, bodies[100:])
            _next_line(writing, "Warning: ")
            code, text = writing.end()
        assert code == 1
        assert f"Error: Topic {TOPIC}: cannot write its files: " in text
        ballast.unlink()
        with to_file(qcli, TOPIC, folder, *args) as writing:
            writing.until(lambda: depth_of(broker, TOPIC) == (0, 0))
            writing.end()
        files = [gzip.decompress(path.read_bytes()) for path in sorted(folder.glob(f"{TOPIC}*.gz"))]
        assert b"".join(files) == lines(bodies)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def _next_line(writing: Writing, start: str) -> str:
    """Return the next line of stderr that begins with this text."""
    while not (line := writing.running.hear_line()).startswith(start):
        pass
    return line
