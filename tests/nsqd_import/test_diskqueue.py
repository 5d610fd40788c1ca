"""Reading nsqd's queue files. What nsqd makes of the same damage is tested with a real one, in tests/interop."""

from pathlib import Path

import pytest

from nsqd_import.nsqd_files import Queued, write_queue
from trio_nsq.log.inspection.findings import Finding, Kind
from trio_nsq.nsqd_import.diskqueue import Queue, QueueMessage, list_queues


def read(folder: Path, name: str = "topic:channel") -> tuple[list[QueueMessage], list[Finding]]:
    """Everything in a queue, and what was said of it."""
    queue = Queue(list_queues(folder)[name])
    messages = list(queue.read())
    assert queue.messages == len(messages)
    return messages, queue.findings


def numbers(messages: list[QueueMessage]) -> list[int]:
    """Which of the messages that `Queued` makes these are."""
    found = [int(bytes(message.body).removeprefix(b"message ")) for message in messages]
    for number, message in zip(found, messages, strict=True):
        expected = Queued(number)
        assert (message.id, message.timestamp_ns) == (expected.message_id.to_bytes(8, "big"), expected.time)
    return found


def brief(findings: list[Finding]) -> list[tuple[Kind, str, int | None]]:
    """Kinds, files, and how many messages they cost."""
    return [(finding.kind, finding.path.name, finding.messages) for finding in findings]


FILES = [[Queued(1), Queued(2), Queued(3)], [Queued(4), Queued(5)], [Queued(6), Queued(7)]]
DATA = "topic:channel.diskqueue.{:06d}.dat".format
META = "topic:channel.diskqueue.meta.dat"


def test_a_queue_in_several_files(tmp_path: Path) -> None:
    write_queue(tmp_path, "topic:channel", *FILES)
    messages, findings = read(tmp_path)
    assert (numbers(messages), findings) == ([1, 2, 3, 4, 5, 6, 7], [])
    for message in messages:
        content = (tmp_path / DATA(message.number)).read_bytes()
        assert content[message.offset :].startswith(bytes(message.body))


def test_a_queue_that_was_read_in_part(tmp_path: Path) -> None:
    write_queue(tmp_path, "topic:channel", *FILES, read=(1, 1))
    messages, findings = read(tmp_path)
    assert (numbers(messages), findings) == ([5, 6, 7], [])


@pytest.mark.parametrize("files", [[], [[Queued(1)]]])
def test_a_queue_that_is_empty(tmp_path: Path, files: list[list[Queued]]) -> None:
    write_queue(tmp_path, "topic:channel", *files, read=(0, len(files)))
    assert read(tmp_path) == ([], [])


def test_attempts_and_every_byte_of_a_body(tmp_path: Path) -> None:
    body = bytes(range(256)) * 300
    write_queue(tmp_path, "t", [Queued(1, 7, body), Queued(2, 65535, b"\0"), Queued(3, 0, b"")])
    messages, findings = read(tmp_path, "t")
    assert [(each.attempts, bytes(each.body)) for each in messages] == [(7, body), (65535, b"\0"), (0, b"")]
    assert findings == []


def test_a_queue_larger_than_what_is_read_at_a_time(tmp_path: Path) -> None:
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


# ---------------------------------------------------------------------- what is damaged


def overwrite(path: Path, at: int, data: bytes) -> None:
    """Put other bytes in place of those at `at`."""
    content = path.read_bytes()
    path.write_bytes(content[:at] + data + content[at + len(data) :])


def test_a_size_that_cannot_be_ends_its_file_only(tmp_path: Path) -> None:
    paths = write_queue(tmp_path, "topic:channel", *FILES)
    second = len(Queued(1).encode())
    for size in (b"\0\0\0\x19", b"\xff\xff\xff\xff", b"\x7f\0\0\0"):
        overwrite(paths[0], second, size)
        messages, findings = read(tmp_path)
        assert numbers(messages) == [1, 4, 5, 6, 7]
        assert brief(findings) == [(Kind.DAMAGE, DATA(0), None)]
        assert (findings[0].offset, findings[0].end) == (second, paths[0].stat().st_size)


def test_a_file_that_was_cut_at_any_byte(tmp_path: Path) -> None:
    content = b"".join(message.encode() for message in FILES[2])
    second = len(FILES[2][0].encode())
    for size in range(len(content)):
        paths = write_queue(tmp_path, "topic:channel", *FILES)
        paths[2].write_bytes(content[:size])
        messages, findings = read(tmp_path)
        assert numbers(messages) == [1, 2, 3, 4, 5, *([6] if size >= second else [])]
        assert brief(findings) == [(Kind.DAMAGE, DATA(2), None)], size


def test_a_damaged_id_costs_nothing_if_the_way_is_not_lost(tmp_path: Path) -> None:
    paths = write_queue(tmp_path, "topic:channel", *FILES)
    second = len(Queued(1).encode())
    overwrite(paths[0], second + 14, b"zz")
    messages, findings = read(tmp_path)
    assert [bytes(each.body) for each in messages] == [b"message %d" % number for number in range(1, 8)]
    assert brief(findings) == [(Kind.NOTE, DATA(0), 0)]
    # Its id is made of its time, as nsqd makes them.
    assert messages[1].id.hex()[:9] == f"{(Queued(2).time >> 20) - 1288834974288 << 22:016x}"[:9]


def test_what_is_no_message_is_not_taken_for_one(tmp_path: Path) -> None:
    paths = write_queue(tmp_path, "topic:channel", *FILES)
    paths[0].write_bytes(b"\0\0\0\x1b" + b"x" * 100)
    messages, findings = read(tmp_path)
    assert numbers(messages) == [4, 5, 6, 7]
    assert brief(findings) == [(Kind.DAMAGE, DATA(0), None)]


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    paths = write_queue(tmp_path, "topic:channel", *FILES)
    paths[1].unlink()
    messages, findings = read(tmp_path)
    assert numbers(messages) == [1, 2, 3, 6, 7]
    assert brief(findings) == [(Kind.DAMAGE, META, 2)]
    paths[2].unlink()
    assert brief(read(tmp_path)[1]) == [(Kind.DAMAGE, META, 4)]


def test_a_file_that_nsqd_had_read_and_removed_before_it_was_killed_is_no_loss(tmp_path: Path) -> None:
    paths = write_queue(tmp_path, "topic:channel", *FILES, depth=4)
    paths[0].unlink()
    messages, findings = read(tmp_path)
    assert (numbers(messages), brief(findings)) == ([4, 5, 6, 7], [(Kind.NOTE, META, 0)])


def test_a_meta_file_that_is_older_than_the_data(tmp_path: Path) -> None:
    write_queue(tmp_path, "topic:channel", *FILES, depth=3, write=(2, 0))
    messages, findings = read(tmp_path)
    assert (numbers(messages), brief(findings)) == ([1, 2, 3, 4, 5, 6, 7], [(Kind.NOTE, META, 0)])


def test_a_meta_file_that_counts_wrong(tmp_path: Path) -> None:
    write_queue(tmp_path, "topic:channel", *FILES, depth=9)
    assert brief(read(tmp_path)[1]) == [(Kind.DAMAGE, META, 2)]
    write_queue(tmp_path, "topic:channel", *FILES, depth=5)
    assert brief(read(tmp_path)[1]) == [(Kind.NOTE, META, 0)]


def test_files_that_nsqd_has_put_aside(tmp_path: Path) -> None:
    paths = write_queue(tmp_path, "topic:channel", *FILES)
    paths[0].rename(f"{paths[0]}.bad")
    (tmp_path / META).write_text(f"7\n1,0\n2,{paths[2].stat().st_size}\n")  # nsqd goes on counting these
    messages, findings = read(tmp_path)
    assert numbers(messages) == [4, 5, 6, 7]
    assert brief(findings) == [(Kind.NOTE, f"{DATA(0)}.bad", 0), (Kind.NOTE, META, 0)]


@pytest.mark.parametrize(
    "text", ["", "7", "a\nb\nc\n", "7\n0,0\n", "7\n3,0\n2,0\n", "7\n-1,0\n2,0\n", "7\n0,0\n2,0\nmore\n"]
)
def test_a_meta_file_that_is_damaged(tmp_path: Path, text: str) -> None:
    write_queue(tmp_path, "topic:channel", *FILES)
    (tmp_path / META).write_text(text)
    messages, findings = read(tmp_path)
    assert (messages, brief(findings)) == ([], [(Kind.DAMAGE, META, None)])


def test_files_without_a_meta_file(tmp_path: Path) -> None:
    write_queue(tmp_path, "topic:channel", *FILES)
    (tmp_path / META).unlink()
    messages, findings = read(tmp_path)
    assert (messages, brief(findings)) == ([], [(Kind.DAMAGE, DATA(0), None)])
