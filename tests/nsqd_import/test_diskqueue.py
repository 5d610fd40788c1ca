"""Tests for reading nsqd's queue files. tests/interop compares damage with a real nsqd."""

from pathlib import Path

import pytest

from nsqd_import.nsqd_files import Queued, write_queue
from trio_nsq.log.inspection.findings import Finding, Kind
from trio_nsq.nsqd_import.diskqueue import Queue, QueueMessage, list_queues


def read(folder: Path, name: str = "topic:channel") -> tuple[list[QueueMessage], list[Finding]]:
    """Return all messages of a queue, and the reports."""
    queue = Queue(list_queues(folder)[name])
    messages = list(queue.read())
    assert queue.messages == len(messages)
    return messages, queue.findings


def numbers(messages: list[QueueMessage]) -> list[int]:
    """Return the numbers of messages that `Queued` made."""
    found = [int(bytes(message.body).removeprefix(b"message ")) for message in messages]
    for number, message in zip(found, messages, strict=True):
        expected = Queued(number)
        assert (message.id, message.timestamp_ns) == (expected.message_id.to_bytes(8, "big"), expected.time)
    return found


def brief(findings: list[Finding]) -> list[tuple[Kind, str, int | None]]:
    """Return the kinds, the files, and the numbers of lost messages."""
    return [(finding.kind, finding.path.name, finding.messages) for finding in findings]


FILES = [[Queued(1), Queued(2), Queued(3)], [Queued(4), Queued(5)], [Queued(6), Queued(7)]]
DATA = "topic:channel.diskqueue.{:06d}.dat".format
META = "topic:channel.diskqueue.meta.dat"


def test_queue_in_several_files(tmp_path: Path) -> None:
    write_queue(tmp_path, "topic:channel", *FILES)
    messages, findings = read(tmp_path)
    assert (numbers(messages), findings) == ([1, 2, 3, 4, 5, 6, 7], [])
    for message in messages:
        content = (tmp_path / DATA(message.number)).read_bytes()
        assert content[message.offset :].startswith(bytes(message.body))


def test_partly_read_queue(tmp_path: Path) -> None:
    write_queue(tmp_path, "topic:channel", *FILES, read=(1, 1))
    messages, findings = read(tmp_path)
    assert (numbers(messages), findings) == ([5, 6, 7], [])


@pytest.mark.parametrize("files", [[], [[Queued(1)]]])
def test_empty_queue(tmp_path: Path, files: list[list[Queued]]) -> None:
    write_queue(tmp_path, "topic:channel", *files, read=(0, len(files)))
    assert read(tmp_path) == ([], [])


def test_attempts_and_any_bytes_in_bodies(tmp_path: Path) -> None:
    body = bytes(range(256)) * 300
    write_queue(tmp_path, "t", [Queued(1, 7, body), Queued(2, 65535, b"\0"), Queued(3, 0, b"")])
    messages, findings = read(tmp_path, "t")
    assert [(each.attempts, bytes(each.body)) for each in messages] == [(7, body), (65535, b"\0"), (0, b"")]
    assert findings == []


def test_queue_larger_than_one_read(tmp_path: Path) -> None:
    write_queue(tmp_path, "t", [Queued(number, 0, b"%d" % number * 300_000) for number in range(30)])
    messages, findings = read(tmp_path, "t")
    assert [bytes(each.body) for each in messages] == [b"%d" % number * 300_000 for number in range(30)]
    assert findings == []


def test_names(tmp_path: Path) -> None:
    for name in ("a", "a.b", "a:b", "a.diskqueue.b:c", "t;windows"):
        write_queue(tmp_path, name, [Queued(1)])
    (tmp_path / "nsqd.dat").write_text("")
    (tmp_path / "a.diskqueue.meta.dat.123.tmp").write_text("")
    (tmp_path / "a.diskqueue.000009.dat.bad").write_text("")
    queues = list_queues(tmp_path)
    assert set(queues) == {"a", "a.b", "a:b", "a.diskqueue.b:c", "t;windows"}
    assert (list(queues["a"].data), [path.name for path in queues["a"].bad]) == (
        [0],
        ["a.diskqueue.000009.dat.bad"],
    )


# ---------------------------------------------------------------------- damage


def overwrite(path: Path, at: int, data: bytes) -> None:
    """Overwrite the bytes at `at`."""
    content = path.read_bytes()
    path.write_bytes(content[:at] + data + content[at + len(data) :])


def test_impossible_size_ends_only_its_file(tmp_path: Path) -> None:
    paths = write_queue(tmp_path, "topic:channel", *FILES)
    second = len(Queued(1).encode())
    for size in (b"\0\0\0\x19", b"\xff\xff\xff\xff", b"\x7f\0\0\0"):
        overwrite(paths[0], second, size)
        messages, findings = read(tmp_path)
        assert numbers(messages) == [1, 4, 5, 6, 7]
        assert brief(findings) == [(Kind.DAMAGE, DATA(0), None)]
        assert (findings[0].offset, findings[0].end) == (second, paths[0].stat().st_size)


def test_file_truncated_at_any_byte(tmp_path: Path) -> None:
    content = b"".join(message.encode() for message in FILES[2])
    second = len(FILES[2][0].encode())
    for size in range(len(content)):
        paths = write_queue(tmp_path, "topic:channel", *FILES)
        paths[2].write_bytes(content[:size])
        messages, findings = read(tmp_path)
        assert numbers(messages) == [1, 2, 3, 4, 5, *([6] if size >= second else [])]
        assert brief(findings) == [(Kind.DAMAGE, DATA(2), None)], size


def test_damaged_id_costs_nothing_if_the_sizes_are_valid(tmp_path: Path) -> None:
    paths = write_queue(tmp_path, "topic:channel", *FILES)
    second = len(Queued(1).encode())
    overwrite(paths[0], second + 14, b"zz")
    messages, findings = read(tmp_path)
    assert [bytes(each.body) for each in messages] == [b"message %d" % number for number in range(1, 8)]
    assert brief(findings) == [(Kind.NOTE, DATA(0), 0)]
    # Its id is made of its time, as in nsqd.
    assert messages[1].id.hex()[:9] == f"{(Queued(2).time >> 20) - 1288834974288 << 22:016x}"[:9]


def test_invalid_message_is_skipped(tmp_path: Path) -> None:
    paths = write_queue(tmp_path, "topic:channel", *FILES)
    paths[0].write_bytes(b"\0\0\0\x1b" + b"x" * 100)
    messages, findings = read(tmp_path)
    assert numbers(messages) == [4, 5, 6, 7]
    assert brief(findings) == [(Kind.DAMAGE, DATA(0), None)]


def test_missing_file(tmp_path: Path) -> None:
    paths = write_queue(tmp_path, "topic:channel", *FILES)
    paths[1].unlink()
    messages, findings = read(tmp_path)
    assert numbers(messages) == [1, 2, 3, 6, 7]
    assert brief(findings) == [(Kind.DAMAGE, META, 2)]
    paths[2].unlink()
    assert brief(read(tmp_path)[1]) == [(Kind.DAMAGE, META, 4)]


def test_file_that_nsqd_removed_before_it_was_killed_is_no_loss(tmp_path: Path) -> None:
    paths = write_queue(tmp_path, "topic:channel", *FILES, depth=4)
    paths[0].unlink()
    messages, findings = read(tmp_path)
    assert (numbers(messages), brief(findings)) == ([4, 5, 6, 7], [(Kind.NOTE, META, 0)])


def test_meta_file_older_than_the_data(tmp_path: Path) -> None:
    write_queue(tmp_path, "topic:channel", *FILES, depth=3, write=(2, 0))
    messages, findings = read(tmp_path)
    assert (numbers(messages), brief(findings)) == ([1, 2, 3, 4, 5, 6, 7], [(Kind.NOTE, META, 0)])


def test_meta_file_with_a_wrong_count(tmp_path: Path) -> None:
    write_queue(tmp_path, "topic:channel", *FILES, depth=9)
    assert brief(read(tmp_path)[1]) == [(Kind.DAMAGE, META, 2)]
    write_queue(tmp_path, "topic:channel", *FILES, depth=5)
    assert brief(read(tmp_path)[1]) == [(Kind.NOTE, META, 0)]


def test_files_that_nsqd_has_renamed(tmp_path: Path) -> None:
    paths = write_queue(tmp_path, "topic:channel", *FILES)
    paths[0].rename(f"{paths[0]}.bad")
    (tmp_path / META).write_text(f"7\n1,0\n2,{paths[2].stat().st_size}\n")  # nsqd still counts these
    messages, findings = read(tmp_path)
    assert numbers(messages) == [4, 5, 6, 7]
    assert brief(findings) == [(Kind.NOTE, f"{DATA(0)}.bad", 0), (Kind.NOTE, META, 0)]


@pytest.mark.parametrize(
    "text", ["", "7", "a\nb\nc\n", "7\n0,0\n", "7\n3,0\n2,0\n", "7\n-1,0\n2,0\n", "7\n0,0\n2,0\nmore\n"]
)
def test_damaged_meta_file(tmp_path: Path, text: str) -> None:
    write_queue(tmp_path, "topic:channel", *FILES)
    (tmp_path / META).write_text(text)
    messages, findings = read(tmp_path)
    assert (messages, brief(findings)) == ([], [(Kind.DAMAGE, META, None)])


def test_files_without_a_meta_file(tmp_path: Path) -> None:
    write_queue(tmp_path, "topic:channel", *FILES)
    (tmp_path / META).unlink()
    messages, findings = read(tmp_path)
    assert (messages, brief(findings)) == ([], [(Kind.DAMAGE, DATA(0), None)])
