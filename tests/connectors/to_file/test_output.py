"""Tests for the output of one topic: formats, rotation, final names, files that other programs change."""

import json
import os
import zlib
from pathlib import Path

import pytest

from connectors.to_file.outputs import (
    BROKER,
    CHECKPOINTS,
    COMPRESSIONS,
    HOUR,
    NOON,
    ZSTD,
    FailingFiles,
    channel_batch,
    content,
    crash,
    files_in,
    lines_in,
    log_batch,
    numbered,
    open_output,
    settings,
)
from trio_nsq.connectors.source.batch import Position
from trio_nsq.connectors.to_file.checkpoint import CheckpointDamaged, OutputInUse
from trio_nsq.connectors.to_file.compression import PIECE_BYTES
from trio_nsq.connectors.to_file.formats import delimited, length_prefixed

# ------------------------------------------------------------------ formats


def test_bodies_with_delimiters(tmp_path: Path) -> None:
    output = open_output(settings(tmp_path, encode=delimited(b"\0\n"), extra_bytes=2))
    output.write([log_batch(0, [b"a", b"", b"b\nc"])], NOON)
    output.close_file(NOON)
    assert files_in(tmp_path) == {"clicks.12.log": b"a\0\n\0\nb\nc\0\n"}


def test_bodies_with_lengths(tmp_path: Path) -> None:
    output = open_output(settings(tmp_path, encode=length_prefixed, extra_bytes=4))
    output.write([log_batch(0, [b"a\nb", b"c"])], NOON)
    output.close_file(NOON)
    assert files_in(tmp_path) == {"clicks.12.log": b"\0\0\0\3a\nb\0\0\0\1c"}


@pytest.mark.parametrize("compression", ["gzip", ZSTD])
def test_compressed_file_has_its_name_when_it_is_complete(tmp_path: Path, compression: str) -> None:
    suffix = {"gzip": ".gz", "zstd": ".zst"}[compression]
    output = open_output(settings(tmp_path, compression=compression))
    output.write([numbered(0, 10)], NOON)
    output.sync(NOON)
    part, final = (tmp_path / f"clicks-000000.12.log{suffix}{end}" for end in (".part", ""))
    assert part.exists()
    assert not final.exists()
    output.write([numbered(10, 10)], NOON)
    output.close_file(NOON)
    assert not part.exists()
    assert content(final).split() == [b"%010d" % n for n in range(20)]


def test_pieces_of_a_large_batch_are_in_order(tmp_path: Path) -> None:
    count = 5 * PIECE_BYTES // 100
    output = open_output(settings(tmp_path, compression="gzip"))
    output.write([numbered(0, count, size=99)], NOON)
    output.close_file(NOON)
    assert lines_in(tmp_path) == [b"%099d" % n for n in range(count)]


def test_file_is_readable_as_the_umask_permits(tmp_path: Path) -> None:
    from trio_nsq.connectors.to_file.file_system import OutputFiles

    before = os.umask(0o027)
    try:
        output = open_output(settings(tmp_path / "new" / "folder"), files=OutputFiles())
        output.write([numbered(0, 1)], NOON)
        output.close_file(NOON)
    finally:
        os.umask(before)
    assert (tmp_path / "new" / "folder" / "clicks.12.log").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o750


# ------------------------------------------------------------------ what becomes durable


def test_batches_are_finished_by_a_sync(tmp_path: Path) -> None:
    output = open_output(settings(tmp_path))
    batches = [channel_batch([b"a", b"b"]), log_batch(7, [b"c"])]
    output.write(batches, NOON)
    assert output.take_finished() == []
    assert output.position(BROKER) is None
    output.sync(NOON)
    assert output.take_finished() == batches
    assert output.take_finished() == []
    assert output.position(BROKER) == Position(8, f"{7:016x}")
    assert (output.counts.messages, output.counts.body_bytes) == (3, 3)


def test_position_of_an_empty_batch_is_stored(tmp_path: Path) -> None:
    output = open_output(settings(tmp_path))
    output.write([log_batch(7, [])], NOON)
    output.sync(NOON)
    assert files_in(tmp_path) == {}
    crash(output)
    assert open_output(settings(tmp_path)).position(BROKER) == Position(7, f"{6:016x}")


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_unsynced_bytes_are_removed_after_a_kill(tmp_path: Path, compression: str) -> None:
    to = settings(tmp_path, compression=compression)
    output = open_output(to)
    output.write([numbered(0, 5)], NOON)
    output.sync(NOON)
    output.write([numbered(5, 5)], NOON)
    crash(output)
    for path in tmp_path.glob("clicks*"):
        path.write_bytes(path.read_bytes() + b"\x1f\x8b torn")
    output = open_output(to)
    position = output.position(BROKER)
    assert position == Position(5, f"{4:016x}")
    output.write([numbered(5, 3)], NOON)
    output.close_file(NOON)
    assert lines_in(tmp_path) == [b"%010d" % n for n in range(8)]
    assert len(files_in(tmp_path)) == 1


def test_several_brokers_write_to_one_file(tmp_path: Path) -> None:
    output = open_output(settings(tmp_path))
    output.write([log_batch(0, [b"a"], "one:4151"), log_batch(9, [b"b"], "two:4151")], NOON)
    output.sync(NOON)
    output.write([log_batch(1, [b"c"], "one:4151")], NOON)
    crash(output)
    output = open_output(settings(tmp_path))
    positions = [output.position(broker) for broker in ("one:4151", "two:4151")]
    assert positions == [Position(1, f"{0:016x}"), Position(10, f"{9:016x}")]
    output.close_file(NOON)
    assert lines_in(tmp_path) == [b"a", b"b"]


# ------------------------------------------------------------------ rotation


def test_file_ends_with_the_message_that_exceeds_its_size(tmp_path: Path) -> None:
    output = open_output(settings(tmp_path, rotate_size=25))
    output.write([numbered(0, 8, size=9)], NOON)
    output.close_file(NOON)
    sizes = {name: len(data) for name, data in files_in(tmp_path).items()}
    assert sizes == {
        "clicks-000000.12.log": 30,
        "clicks-000001.12.log": 30,
        "clicks-000002.12.log": 20,
    }
    assert lines_in(tmp_path) == [b"%09d" % n for n in range(8)]


def test_part_of_a_batch_is_stored_by_a_rotation(tmp_path: Path) -> None:
    to = settings(tmp_path, rotate_size=25)
    output = open_output(to)
    batch = numbered(100, 5, size=9)
    output.write([batch], NOON)
    assert output.position(BROKER) == Position(103, f"{102:016x}")
    assert output.take_finished() == []
    crash(output)
    output = open_output(to)
    output.write([numbered(103, 2, size=9)], NOON)
    output.close_file(NOON)
    assert lines_in(tmp_path) == [b"%09d" % n for n in range(100, 105)]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_another_hour_begins_another_file(tmp_path: Path, compression: str) -> None:
    output = open_output(settings(tmp_path, compression=compression))
    output.write([numbered(0, 2)], NOON)
    output.write([numbered(2, 2)], NOON + HOUR)
    output.close_file(NOON + HOUR)
    assert [len(data.splitlines()) for data in files_in(tmp_path).values()] == [2, 2]
    assert [".12." in name for name in files_in(tmp_path)] == [True, False]
    assert output.counts.files == 2


def test_interval_begins_another_file(tmp_path: Path) -> None:
    output = open_output(settings(tmp_path, rotate_interval_s=10))
    for seconds in (0, 9, 11, 12):
        output.write([numbered(seconds, 1)], NOON + seconds)
    output.close_file(NOON + 12)
    assert [data.split() for data in files_in(tmp_path).values()] == [
        [b"0000000000", b"0000000009"],
        [b"0000000011", b"0000000012"],
    ]


def test_empty_files_are_created_unless_skipped(tmp_path: Path) -> None:
    for skip, compression, found in [
        (True, "none", {}),
        (False, "none", {"clicks.12.log": b"", "clicks.13.log": b""}),
        (False, "gzip", {"clicks-000000.12.log.gz": b"", "clicks-000000.13.log.gz": b""}),
    ]:
        folder = tmp_path / f"{skip}{compression}"
        output = open_output(settings(folder, skip_empty_files=skip, compression=compression))
        output.tick(NOON)
        output.tick(NOON + HOUR)
        output.close_file(NOON + HOUR)
        assert files_in(folder) == found


def test_rotation_without_a_message(tmp_path: Path) -> None:
    output = open_output(settings(tmp_path, compression="gzip"))
    output.write([numbered(0, 1)], NOON)
    output.tick(NOON + HOUR)
    assert list(files_in(tmp_path)) == ["clicks-000000.12.log.gz"]


# ------------------------------------------------------------------ names that are taken


def test_existing_file_is_continued(tmp_path: Path) -> None:
    (tmp_path / "clicks.12.log").write_bytes(b"of nsq_to_file\n")
    output = open_output(settings(tmp_path))
    output.write([log_batch(0, [b"new"])], NOON)
    output.sync(NOON)
    output.write([log_batch(1, [b"unsynced"])], NOON)
    crash(output)
    open_output(settings(tmp_path)).close_file(NOON)
    assert lines_in(tmp_path) == [b"of nsq_to_file", b"new"]


def test_half_a_line_of_a_killed_program_is_ended(tmp_path: Path) -> None:
    (tmp_path / "clicks.12.log").write_bytes(b"one\nhal")
    output = open_output(settings(tmp_path))
    output.write([log_batch(0, [b"new"])], NOON)
    output.close_file(NOON)
    assert lines_in(tmp_path) == [b"one", b"hal", b"new"]


def test_existing_compressed_file_is_never_changed(tmp_path: Path) -> None:
    taken = tmp_path / "clicks-000000.12.log.gz"
    taken.write_bytes(b"another file")
    output = open_output(settings(tmp_path, compression="gzip"))
    output.write([numbered(0, 1)], NOON)
    output.close_file(NOON)
    assert taken.read_bytes() == b"another file"
    assert content(tmp_path / "clicks-000001.12.log.gz") == b"0000000000\n"


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_finished_file_moves_and_replaces_nothing(tmp_path: Path, compression: str) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    output = open_output(settings(out, work_dir=work, compression=compression), template="a/<TOPIC><REV>")
    output.write([numbered(0, 1)], NOON)
    output.sync(NOON)
    assert len(files_in(work)) == 1
    assert files_in(out) == {}
    suffix = next(iter(files_in(work))).removeprefix("a/clicks-000000")
    (out / "a" / f"clicks-000000{suffix}").write_bytes(b"from elsewhere")
    output.close_file(NOON)
    assert files_in(work) == {}
    assert (out / "a" / f"clicks-000000{suffix}").read_bytes() == b"from elsewhere"
    assert content(out / "a" / f"clicks-000001{suffix}") == b"0000000000\n"
    output.write([numbered(1, 1)], NOON)
    output.close_file(NOON)
    assert content(out / "a" / f"clicks-000002{suffix}") == b"0000000001\n"


def test_file_system_without_links(tmp_path: Path) -> None:
    files = FailingFiles("link")
    files.error = PermissionError(1, "Operation not permitted")
    work, out = tmp_path / "work", tmp_path / "out"
    output = open_output(settings(out, work_dir=work), files=files)
    output.write([numbered(0, 1)], NOON)
    (out / "clicks-000000.12.log").write_bytes(b"from elsewhere")
    output.close_file(NOON)
    assert files_in(work) == {}
    assert files_in(out) == {
        "clicks-000000.12.log": b"from elsewhere",
        "clicks-000001.12.log": b"0000000000\n",
    }


# ------------------------------------------------------------------ files that other programs change


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_renamed_file_is_left_and_nothing_is_written_to_it(tmp_path: Path, compression: str) -> None:
    output = open_output(settings(tmp_path, compression=compression))
    output.write([numbered(0, 2)], NOON)
    output.sync(NOON)
    output.write([numbered(2, 2)], NOON)
    (path,) = tmp_path.glob("clicks*")
    moved = tmp_path / f"rotated{path.suffix.replace('.part', path.with_suffix('').suffix)}"
    path.rename(moved)
    output.sync(NOON)
    size = moved.stat().st_size
    output.write([numbered(4, 2)], NOON)
    output.close_file(NOON)
    assert moved.stat().st_size == size
    assert content(moved).split() == [b"%010d" % n for n in range(4)]
    assert lines_in(tmp_path) == [b"%010d" % n for n in (4, 5, 0, 1, 2, 3)]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_messages_of_a_removed_file_that_were_not_synced_are_written_again(
    tmp_path: Path, compression: str
) -> None:
    output = open_output(settings(tmp_path, compression=compression))
    output.write([numbered(0, 2)], NOON)
    output.sync(NOON)
    output.write([numbered(2, 2)], NOON)
    (path,) = tmp_path.glob("clicks*")
    path.unlink()
    output.sync(NOON)
    assert output.position(BROKER) == Position(4, f"{3:016x}")
    output.close_file(NOON)
    assert lines_in(tmp_path) == [b"%010d" % n for n in (2, 3)]


def test_replaced_file_is_not_touched(tmp_path: Path) -> None:
    output = open_output(settings(tmp_path, compression="gzip"))
    output.write([numbered(0, 2)], NOON)
    output.sync(NOON)
    (path,) = tmp_path.glob("clicks*")
    path.rename(tmp_path / "rotated.gz")
    path.write_bytes(b"from elsewhere")
    crash(output)
    output = open_output(settings(tmp_path, compression="gzip"))
    output.write([numbered(2, 1)], NOON)
    output.close_file(NOON)
    assert path.read_bytes() == b"from elsewhere"
    path.unlink()
    assert lines_in(tmp_path) == [b"%010d" % n for n in (2, 0, 1)]


def test_unsynced_bytes_are_removed_from_a_file_that_was_renamed_while_nothing_ran(tmp_path: Path) -> None:
    output = open_output(settings(tmp_path))
    output.write([numbered(0, 2)], NOON)
    output.sync(NOON)
    output.write([numbered(2, 2)], NOON)
    crash(output)
    (tmp_path / "clicks.12.log").rename(tmp_path / "clicks.12.log.1")
    output = open_output(settings(tmp_path))
    output.write([numbered(2, 1)], NOON)
    output.close_file(NOON)
    assert lines_in(tmp_path) == [b"%010d" % n for n in (2, 0, 1)]


def test_cut_file_gets_no_hole(tmp_path: Path) -> None:
    output = open_output(settings(tmp_path))
    output.write([numbered(0, 2)], NOON)
    output.sync(NOON)
    os.truncate(tmp_path / "clicks.12.log", 0)  # logrotate's copytruncate
    with pytest.raises(OSError, match="shorter"):
        output.write([numbered(2, 1)], NOON)
    output.write([], NOON)
    output.close_file(NOON)
    assert files_in(tmp_path) == {"clicks.12.log": b"0000000002\n"}


# ------------------------------------------------------------------ several processes


def test_topic_is_written_by_one_process(tmp_path: Path) -> None:
    output = open_output(settings(tmp_path))
    with pytest.raises(OutputInUse, match=f'topic "clicks".* is being written by process {os.getpid()}'):
        open_output(settings(tmp_path))
    open_output(settings(tmp_path), topic="orders").release()
    output.release()
    open_output(settings(tmp_path))


def test_two_channels_do_not_write_to_one_file(tmp_path: Path) -> None:
    one, two = (open_output(settings(tmp_path), channel=channel) for channel in ("one", "two"))
    one.write([log_batch(0, [b"1"])], NOON)
    with pytest.raises(OutputInUse, match=r"clicks\.12\.log is being written by process .* put <REV> into"):
        two.write([log_batch(0, [b"2"])], NOON)


def test_two_channels_write_to_different_revisions(tmp_path: Path) -> None:
    outputs = [
        open_output(settings(tmp_path, rotate_size=100), channel=channel) for channel in ("one", "two")
    ]
    for number, output in enumerate(outputs):
        output.write([numbered(number, 1)], NOON)
    for output in outputs:
        output.close_file(NOON)
    assert files_in(tmp_path) == {
        "clicks-000000.12.log": b"0000000000\n",
        "clicks-000001.12.log": b"0000000001\n",
    }


def test_bytes_of_another_program_are_kept(tmp_path: Path) -> None:
    # As if nsq_to_file continued after a kill: it appends to the same file.
    output = open_output(settings(tmp_path))
    output.write([numbered(0, 1)], NOON)
    output.sync(NOON)
    output.write([numbered(1, 1)], NOON)
    crash(output)
    path = tmp_path / "clicks.12.log"
    with path.open("ab") as file:
        file.write(b"of another program\n")
    later = path.stat().st_mtime + 60
    os.utime(path, (later, later))
    output = open_output(settings(tmp_path))
    assert content(path) == b"0000000000\n"
    (cut,) = (tmp_path / CHECKPOINTS).glob("*.cut-1")
    assert cut.read_bytes() == b"0000000001\nof another program\n"
    output.write([numbered(1, 1)], NOON)
    crash(output)
    open_output(settings(tmp_path)).close_file(NOON)
    assert content(path) == b"0000000000\n"
    assert list((tmp_path / CHECKPOINTS).glob("*.cut-*")) == [cut]  # the bytes of a kill are not kept


@pytest.mark.parametrize("compression", ["gzip", ZSTD])
def test_empty_file_of_another_compression_is_removed(tmp_path: Path, compression: str) -> None:
    output = open_output(settings(tmp_path, compression=compression, skip_empty_files=False))
    output.tick(NOON)
    crash(output)
    (left,) = tmp_path.glob("*.part")
    output = open_output(settings(tmp_path))
    assert not left.exists()
    output.write([numbered(0, 1)], NOON)
    output.close_file(NOON)
    assert files_in(tmp_path) == {"clicks.12.log": b"0000000000\n"}


def test_empty_file_of_a_run_without_compression_stays_empty(tmp_path: Path) -> None:
    output = open_output(settings(tmp_path, skip_empty_files=False))
    output.tick(NOON)
    crash(output)
    output = open_output(settings(tmp_path, compression="gzip", skip_empty_files=False))
    output.close_file(NOON)
    assert files_in(tmp_path) == {"clicks.12.log": b""}


def test_tiny_messages_count_with_their_memory(tmp_path: Path) -> None:
    output = open_output(settings(tmp_path))
    output.write([log_batch(0, [b"x"] * 1000)], NOON)
    assert output.unsynced_bytes > 50 * 1000
    output.sync(NOON)
    assert output.unsynced_bytes == 0


def _line(**changes: object) -> bytes:
    """Return a checkpoint that is complete, but has values of other types."""
    record = {"version": 1, "positions": {}, "file": None} | changes
    data = json.dumps(record).encode()
    return b"%08x %s\n" % (zlib.crc32(data), data)


_FILE = dict[str, object](
    path="/a", final="/a", key="a", revision=0, inode=1, length=0, tail_crc=0, raw_bytes=0, opened_at=1
)


@pytest.mark.parametrize(
    "damage",
    [
        *[b"", b"{}", b'{"version": 2}', b"[]", b"\xff"],
        _line(version=2),
        _line(positions=[1]),
        _line(positions={BROKER: {"sequence": "1", "last_id": None}}),
        _line(positions={BROKER: {"sequence": -1, "last_id": None}}),
        _line(positions={BROKER: {"sequence": 1, "last_id": 7}}),
        _line(positions={BROKER: None}),
        _line(file=_FILE | {"length": "0"}),
        _line(file=_FILE | {"path": 7}),
        _line(file=_FILE | {"path": "\0"}),
        _line(file=_FILE | {"more": 7}),
        _line(file="a"),
    ],
)
def test_damaged_checkpoint_is_an_error(tmp_path: Path, damage: bytes) -> None:
    output = open_output(settings(tmp_path))
    output.write([numbered(0, 1)], NOON)
    output.close_file(NOON)
    output.release()
    (checkpoint,) = (tmp_path / CHECKPOINTS).glob("*.checkpoint")
    checkpoint.write_bytes(damage)
    with pytest.raises(CheckpointDamaged, match=f"{checkpoint} cannot be used.*remove it"):
        open_output(settings(tmp_path))
    checkpoint.unlink()
    assert open_output(settings(tmp_path)).position(BROKER) is None
