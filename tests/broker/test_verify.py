"""Tests for verifying a topic's saved state with its log, and a data folder that a broker is using."""

import json
import os
from collections.abc import Callable
from errno import EACCES, EIO
from pathlib import Path
from typing import Any

import pytest
import trio

from broker.state import Fixture, disk_log, packed, records
from broker.support import PATIENCE_S, running_broker
from log.support import carry_forward, segment_files
from trio_nsq.broker.state.checkpoint import Addition
from trio_nsq.broker.state.deferred import DeferredMessages
from trio_nsq.broker.storage.data_folder import encode_checked
from trio_nsq.broker.storage.verify import topic_folders, verify_broker_file, verify_topic
from trio_nsq.client import Consumer, Producer
from trio_nsq.log import Files, LogReadError
from trio_nsq.log.inspection.findings import Kind
from trio_nsq.log.inspection.verify import LogReport

State = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A topic with 40 messages: channel `a` has finished 10, and has 5 requeued and 2 deferred ones."""
    folder = tmp_path / "topics" / "clicks.topic"
    folder.mkdir(parents=True)
    fixture = Fixture(disk_log(folder, segment_bytes=300), name="clicks")
    subscriber = fixture.subscriber("a", ready=17)
    fixture.channel("b")
    fixture.publish_many(40, each=4)
    messages = subscriber.receive()
    subscriber.finish(messages[:10])
    for message in messages[10:15]:
        subscriber.requeue(message)
    for message in messages[15:]:
        subscriber.requeue(message, delay_ms=60_000)
    fixture.publish(b"later", defer_ms=60_000)
    subscriber.leave()
    (folder / "state.json").write_text(json.dumps(fixture.topic.snapshot()))
    fixture.log.close()
    assert len(segment_files(folder)) > 3
    return folder


def change(folder: Path, edit: Callable[[State], object]) -> None:
    """Change the saved state."""
    path = folder / "state.json"
    state = json.loads(path.read_bytes())
    edit(state)
    path.write_text(json.dumps(state))


def only(report: LogReport) -> tuple[Kind, str, int | None, int | None]:
    """Return the only finding: kind, file, first message and number of messages."""
    (finding,) = report.findings
    return finding.kind, finding.path.name, finding.sequence, finding.messages


def test_topic_of_a_stopped_broker(folder: Path) -> None:
    report = verify_topic(folder)
    assert (report.findings, report.messages, report.damaged) == ([], 41, False)


def test_topic_folder_alone_and_with_another_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert verify_topic(Path()).findings == []
    copy = folder.rename(folder.with_name("copy of clicks"))
    assert verify_topic(copy).findings == []
    elsewhere = copy.rename(folder.with_name("orders.topic"))
    assert only(verify_topic(elsewhere)) == (Kind.DAMAGE, "state.json", None, 0)


def test_log_that_continues_after_the_saved_state(folder: Path) -> None:
    def before_the_last_messages(state: State) -> None:
        state.update(end=36, distribution_point=36)
        for channel in state["channels"]:
            channel["holes"] = []
            rows = DeferredMessages.restore(channel["deferred"])
            channel["deferred"] = packed(row for row in rows if row[1] < 36)

    change(folder, before_the_last_messages)
    assert verify_topic(folder).findings == []


def test_topic_without_a_state(folder: Path) -> None:
    (folder / "state.json").unlink()
    report = verify_topic(folder)
    assert (only(report), report.damaged) == ((Kind.NOTE, "state.json", None, 0), False)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "null", '{"format": 1}', '{"format": 99, "name": "clicks"}']
)
def test_unreadable_state(folder: Path, text: str) -> None:
    (folder / "state.json").write_text(text)
    assert only(verify_topic(folder)) == (Kind.DAMAGE, "state.json", None, 0)


def test_channels_behind_the_state(folder: Path) -> None:
    path = folder / "state.json"
    state, line = encode_checked(path.read_bytes()), encode_checked(Addition(["new"], 2).encode())
    path.write_bytes(state + b"\n" + line)
    assert verify_topic(folder).findings == []
    path.write_bytes(state + b"\n" + line[:-1])
    assert only(verify_topic(folder)) == (Kind.NOTE, "state.json", None, 0)
    path.write_bytes(state + b"\n" + encode_checked(Addition(["new"], 10**6).encode()))
    assert only(verify_topic(folder))[0] is Kind.DAMAGE  # the log ends before


def test_state_with_a_usable_copy(folder: Path) -> None:
    path, previous = folder / "state.json", folder / "state.json.previous"
    previous.write_bytes(path.read_bytes())
    assert verify_topic(folder).findings == []
    path.write_text("{")
    (finding,) = verify_topic(folder).findings
    assert (finding.kind, finding.path) == (Kind.DAMAGE, path)
    assert finding.what.endswith("; a broker uses the previous state, state.json.previous")
    path.unlink()
    (finding,) = verify_topic(folder).findings
    assert (finding.kind, finding.path) == (Kind.NOTE, path)
    path.write_bytes(previous.read_bytes())
    previous.write_text("{")
    (finding,) = verify_topic(folder).findings
    assert (finding.kind, finding.path) == (Kind.DAMAGE, previous)
    assert finding.what.endswith("; it is needed only if state.json is damaged too")


def test_truncated_log(folder: Path) -> None:
    last = segment_files(folder)[-1]
    cut_at = int(last.stem)
    last.unlink()
    # The lost messages were deferred or not yet delivered.
    assert only(verify_topic(folder)) == (Kind.DAMAGE, "state.json", cut_at, 41 - cut_at)


def test_log_without_finished_messages(folder: Path) -> None:
    def all_finished(state: State) -> None:
        for channel in state["channels"]:
            channel.update(cursor=41, holes=[], unfinished=[], deferred=[])

    change(folder, all_finished)
    segment_files(folder)[-1].unlink()
    report = verify_topic(folder)
    assert (only(report)[0], report.lost_messages) == (Kind.NOTE, 0)


def test_log_without_needed_messages(folder: Path) -> None:
    first, second = segment_files(folder)[:2]
    first.unlink()
    # Channel b has not begun.
    assert only(verify_topic(folder)) == (Kind.DAMAGE, "state.json", 0, int(second.stem))


@pytest.mark.parametrize(
    "edit",
    [
        lambda state: state.update(distribution_point=42),
        lambda state: state["channels"][0].update(cursor=42),
        lambda state: state["channels"][1].update(cursor=42, holes=[], deferred=[]),
        lambda state: state["channels"][0]["unfinished"].append([12, 3]),
        lambda state: state["channels"][0]["unfinished"].append([39, 0]),
        lambda state: state["channels"][0]["deferred"].extend(packed([(2**63, 12, 0)])),
        lambda state: state["channels"][1].update(holes=[[5, 9], [8, 10]]),
        lambda state: state["channels"][1].update(holes=[[5, 99]]),
        lambda state: state["channels"][1].update(holes=[[9, 5]]),
        lambda state: state["channels"][1].update(holes=[[5, 5]], deferred=[]),
        lambda state: state["channels"][1].update(holes=[["5", "9"]], deferred=[]),
        lambda state: state["channels"][1].update(cursor="1", holes=[]),
    ],
)
def test_inconsistent_state(folder: Path, edit: Callable[[State], object]) -> None:
    change(folder, edit)
    report = verify_topic(folder)
    assert report.damaged
    assert {finding.path.name for finding in report.findings} == {"state.json"}


# ---------------------------------------------------------------------- messages that were carried forward


@pytest.fixture
def carried(folder: Path) -> Path:
    """The same topic, but both channels have finished everything before message 30, except those of `a`."""
    change(folder, lambda state: [channel.update(cursor=30) for channel in state["channels"]])
    log = disk_log(folder, segment_bytes=300)
    assert carry_forward(log, range(10, 17), 10**6)
    log.discard_before(30)
    assert 17 < log.first_sequence <= 30
    log.close()
    return folder


def test_topic_with_carried_forward_messages(carried: Path) -> None:
    assert verify_topic(carried).findings == []


def test_only_needed_lost_messages_count(carried: Path) -> None:
    (carried / "stragglers").unlink()
    assert only(verify_topic(carried)) == (Kind.DAMAGE, "state.json", 10, 7)
    change(carried, lambda state: state["channels"][1].update(cursor=15))
    begin = int(segment_files(carried)[0].stem)
    assert only(verify_topic(carried)) == (Kind.DAMAGE, "state.json", 10, begin - 10)


def test_each_damaged_message_is_reported_once(carried: Path) -> None:
    path = carried / "stragglers"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert only(verify_topic(carried)) == (Kind.DAMAGE, "stragglers", 16, 1)
    path.write_bytes(content[:50])
    assert [(each.path.name, each.messages) for each in verify_topic(carried).findings] == [
        ("stragglers", None),
        ("state.json", 7),
    ]


class ReadOnly(Files):
    """Files that cannot be written."""

    def open(self, path: Path) -> int:
        raise AssertionError(f"{path} is opened for writing")


class BadDisk(ReadOnly):
    """Carried-forward messages cannot be read."""

    def __init__(self, error: int) -> None:
        self._error = error
        self._bad = -1

    def open_read_only(self, path: Path) -> int:
        fd = super().open_read_only(path)
        if path.name == "stragglers":
            self._bad = fd
        return fd

    def close(self, fd: int) -> None:
        super().close(fd)
        if fd == self._bad:
            self._bad = -1

    def read(self, fd: int, size: int, offset: int) -> bytes:
        if fd == self._bad:
            raise OSError(self._error, os.strerror(self._error))
        return super().read(fd, size, offset)


def test_bad_sector_is_damage_and_other_errors_are_not(carried: Path) -> None:
    found = verify_topic(carried, files=BadDisk(EIO)).findings
    assert [(each.path.name, each.messages) for each in found] == [("stragglers", None), ("state.json", 7)]
    with pytest.raises(LogReadError, match="Permission denied"):
        verify_topic(carried, files=BadDisk(EACCES))


def test_nothing_is_opened_for_writing(carried: Path) -> None:
    assert verify_topic(carried, files=ReadOnly()).findings == []


def test_messages_carried_forward_again_during_the_check_are_not_missing(carried: Path) -> None:
    """More messages are carried forward, and finished ones forgotten, while the log is read."""

    def go_on() -> None:
        def finish(state: State) -> None:
            unfinished = state["channels"][0]["unfinished"]
            state["channels"][0].update(cursor=39, unfinished=unfinished[3:])
            state["channels"][1].update(cursor=39, unfinished=[[30, 1]])

        change(carried, finish)
        log = disk_log(carried, segment_bytes=300)
        assert carry_forward(log, [*range(13, 17), 30], 10**6)
        log.discard_before(39)
        log.close()

    report = verify_topic(carried, files=Meanwhile(go_on))
    assert not report.damaged, report.findings
    assert verify_topic(carried).findings == []


def test_broker_json(tmp_path: Path) -> None:
    assert verify_broker_file(tmp_path) == []
    for text, damaged in (
        ('{"format": 1, "next_id": 7}', False),
        ('{"format": 2}', True),
        ("no", True),
        ("[]", True),
    ):
        (tmp_path / "broker.json").write_text(text)
        assert bool(verify_broker_file(tmp_path)) is damaged, text
    (finding,) = verify_broker_file(tmp_path)
    assert finding.what.endswith("a broker does not start")
    (tmp_path / "broker.json.copy").write_text('{"format": 1, "next_id": 7}')
    (finding,) = verify_broker_file(tmp_path)
    assert finding.what.endswith("a broker uses the other copy")


class Meanwhile(Files):
    """Calls a function before the first read of a segment."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self._happens: Callable[[], None] | None = happens
        self._segment = -1

    def open_read_only(self, path: Path) -> int:
        fd = super().open_read_only(path)
        if path.suffix == ".log":
            self._segment = fd
        return fd

    def read(self, fd: int, size: int, offset: int) -> bytes:
        if self._happens is not None and fd == self._segment:
            self._happens()
            self._happens = None
        return super().read(fd, size, offset)


def test_state_saved_during_the_check_may_refer_to_later_messages(folder: Path) -> None:
    def save() -> None:
        change(folder, lambda state: state.update(end=100, distribution_point=100))

    assert verify_topic(folder, files=Meanwhile(save)).findings == []


def test_files_deleted_during_the_check_are_not_needed_by_a_later_state(folder: Path) -> None:
    def finish(state: State) -> None:
        for channel in state["channels"]:
            channel.update(cursor=41, holes=[], unfinished=[], deferred=[])

    def save_and_delete() -> None:
        change(folder, finish)
        for path in segment_files(folder)[:-1]:
            path.unlink()

    report = verify_topic(folder, files=Meanwhile(save_and_delete))
    assert not report.damaged
    assert {finding.kind for finding in report.findings} == {Kind.NOTE}


def test_all_listed_files_of_a_log_are_deleted_during_the_check(folder: Path) -> None:
    """The log continues in others."""

    def finish(state: State) -> None:
        for channel in state["channels"]:
            channel.update(cursor=49, holes=[], unfinished=[], deferred=[])
        state.update(end=49, distribution_point=49)

    def go_on() -> None:
        log = disk_log(folder, segment_bytes=300)
        for sequence in range(41, 49):
            log.append([records([b"x" * 200], base=sequence, first_id=1)], sync=True)
        change(folder, finish)
        log.discard_before(48)
        log.close()

    report = verify_topic(folder, files=Meanwhile(go_on))
    assert not report.damaged, report.findings
    assert report.next_sequence == 49


def test_files_created_while_the_folder_is_listed(folder: Path) -> None:
    def nothing_known(state: State) -> None:
        state.update(end=0, distribution_point=0, settled=0, ephemeral_needed=0)
        for channel in state["channels"]:
            channel.update(cursor=0, holes=[], unfinished=[], deferred=[])

    class Listing(Files):
        listed = 0

        def names(self, path: Path) -> list[str]:
            names = super().names(path)
            before, seen, unseen, newest = sorted(name for name in names if name.endswith(".log"))[-4:]
            self.listed += 1
            hidden = (before, unseen, newest) if self.listed == 1 else (unseen,)
            assert seen not in hidden
            return [name for name in names if name not in hidden]

    change(folder, nothing_known)
    report = verify_topic(folder, files=Listing())
    assert not report.damaged, report.findings


async def test_check_beside_a_busy_broker_finds_nothing(tmp_path: Path) -> None:
    """Segments grow and are deleted, and states are saved every few milliseconds."""
    data = tmp_path / "data"
    options: dict[str, Any] = {"checkpoint_interval_ms": 2, "max_bytes_per_file": 20_000}
    verified = 0

    async def publish(address: str) -> None:
        async with Producer(address) as producer:
            while True:
                await producer.publish_many("clicks", [b"x" * 100] * 50)

    async def consume(address: str, enough: trio.Event) -> None:
        async with Consumer("clicks", "archive", nsqd_tcp_addresses=[address], max_in_flight=500) as consumer:
            count = 0
            async for batch in consumer.batches():
                batch.finish()
                count += len(batch)
                if count > 10_000:
                    enough.set()

    with trio.fail_after(PATIENCE_S):
        async with running_broker(data, **options) as bound, trio.open_nursery() as nursery:
            enough = trio.Event()
            nursery.start_soon(publish, bound.tcp_address)
            nursery.start_soon(consume, bound.tcp_address, enough)
            while not enough.is_set() or not verified:
                await trio.sleep(0)
                for folder in topic_folders(data):
                    report = await trio.to_thread.run_sync(verify_topic, folder)
                    assert not report.damaged, report.findings
                    verified += report.first_sequence > 0
            nursery.cancel_scope.cancel()
    (folder,) = topic_folders(data)
    assert verify_topic(folder).findings == []
