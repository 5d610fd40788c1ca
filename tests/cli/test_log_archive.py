"""Tests for `qcli log archive`."""

from pathlib import Path

import pytest

from cli.support import Cli, run_in_process
from log.support import HastyFiles, append_each, numbered, segment_files
from trio_nsq.log import DiskLog

OFFLINE = Cli("", "")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with two topics of several segments."""
    for topic in ("t", "u"):
        folder = tmp_path / "data" / "topics" / f"{topic}.topic"
        folder.mkdir(parents=True)
        log = DiskLog(folder, segment_bytes=500, files=HastyFiles())
        append_each(log, numbered(0, 60))
        log.close()
    return tmp_path / "data"


def stored(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.seg")}


def test_all_topics(data: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    args = ("log", "archive", str(data), str(tmp_path / "a"), "--format", "json")
    result = run_in_process(capfdbinary, OFFLINE, *args)
    assert (result.code, result.err) == (0, "")
    count = len(segment_files(data / "topics" / "t.topic")) - 1
    assert [(each["topic"], each["copied"], each["present"]) for each in result.records] == [
        ("t", count, 0),
        ("u", count, 0),
    ]
    found = stored(tmp_path / "a")
    assert len(found) == 2 * count
    for record in result.records:
        for path in segment_files(data / "topics" / f"{record['topic']}.topic")[:-1]:
            prefix = f"{record['topic']}/{record['incarnation']}/{path.stem}-"
            (content,) = [content for name, content in found.items() if name.startswith(prefix)]
            assert content == path.read_bytes()
    again = run_in_process(capfdbinary, OFFLINE, *args)
    assert [(each["copied"], each["present"]) for each in again.records] == [(0, count), (0, count)]
    assert stored(tmp_path / "a") == found


def test_one_topic_with_its_last_segment(
    data: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder = data / "topics" / "t.topic"
    result = run_in_process(
        capfdbinary, OFFLINE, "log", "archive", str(folder), str(tmp_path / "a"), "--tail"
    )
    assert result.code == 0
    assert result.out.splitlines()[0].split() == [
        b"TOPIC",
        b"INCARNATION",
        b"COPIED",
        b"SIZE",
        b"PRESENT",
        b"NEXT",
    ]
    assert result.out.splitlines()[1].split()[-1] == b"120"
    assert len(stored(tmp_path / "a")) == len(segment_files(folder))


def test_damage_is_reported(data: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    path = segment_files(data / "topics" / "u.topic")[1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    result = run_in_process(capfdbinary, OFFLINE, "log", "archive", str(data), str(tmp_path / "a"))
    assert (result.code, b"a record batch does not match its checksum" in result.out) == (5, True)
    assert content in stored(tmp_path / "a").values()


def test_refusals(data: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    (tmp_path / "file").write_text("")
    segment = segment_files(data / "topics" / "t.topic")[0]
    for path, archive, code, said in (
        (segment, tmp_path / "a", 2, "is a segment"),
        (data, tmp_path / "file", 1, "file"),
        (tmp_path, tmp_path / "a", 2, "is neither a broker's data folder"),
    ):
        result = run_in_process(capfdbinary, OFFLINE, "log", "archive", str(path), str(archive))
        assert (result.code, said in result.err) == (code, True), result.err
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("where", ["", "topics", "a/b"])
def test_an_archive_in_the_folder_it_copies_is_refused(
    data: Path, capfdbinary: pytest.CaptureFixture[bytes], where: str
) -> None:
    before = sorted(data.rglob("*"))
    result = run_in_process(capfdbinary, OFFLINE, "log", "archive", str(data), str(data / where))
    assert (result.code, "choose another folder" in result.err) == (2, True)
    assert sorted(data.rglob("*")) == before
