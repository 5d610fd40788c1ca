"""What is said of a topic's saved state beside its log, and of a data folder that a broker is using."""

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
from log.support import segment_files
from trio_nsq.broker.state.deferred import DeferredMessages
from trio_nsq.broker.storage.verify import topic_folders, verify_broker_file, verify_topic
from trio_nsq.client import Consumer, Producer
from trio_nsq.log import Files, LogReadError
from trio_nsq.log.inspection.findings import Kind
from trio_nsq.log.inspection.verify import LogReport

State = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A topic with 40 messages: channel `a` has finished 10, has 5 to be delivered again and 2 deferred."""
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
    """The one finding there is: kind, file, first message and how many."""
    (finding,) = report.findings
    return finding.kind, finding.path.name, finding.sequence, finding.messages


def test_a_topic_as_a_broker_leaves_it(folder: Path) -> None:
    report = verify_topic(folder)
    assert (report.findings, report.messages, report.damaged) == ([], 41, False)


def test_the_same_seen_from_inside_and_under_another_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert verify_topic(Path()).findings == []
    copy = folder.rename(folder.with_name("copy of clicks"))
    assert verify_topic(copy).findings == []
    elsewhere = copy.rename(folder.with_name("orders.topic"))
    assert only(verify_topic(elsewhere)) == (Kind.DAMAGE, "state.json", None, 0)


def test_a_log_that_goes_on_after_the_state_was_saved(folder: Path) -> None:
    def before_the_last_messages(state: State) -> None:
        state.update(end=36, distribution_point=36)
        for channel in state["channels"]:
            channel["holes"] = []
            rows = DeferredMessages.restore(channel["deferred"])
            channel["deferred"] = packed(row for row in rows if row[1] < 36)

    change(folder, before_the_last_messages)
    assert verify_topic(folder).findings == []


def test_a_topic_without_a_state(folder: Path) -> None:
    (folder / "state.json").unlink()
    report = verify_topic(folder)
    assert (only(report), report.damaged) == ((Kind.NOTE, "state.json", None, 0), False)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "null", '{"format": 1}', '{"format": 99, "name": "clicks"}']
)
def test_a_state_that_cannot_be_read(folder: Path, text: str) -> None:
    (folder / "state.json").write_text(text)
    assert only(verify_topic(folder)) == (Kind.DAMAGE, "state.json", None, 0)


def test_a_state_that_can_be_replaced_by_the_one_before(folder: Path) -> None:
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


def test_a_log_that_was_cut(folder: Path) -> None:
    last = segment_files(folder)[-1]
    cut_at = int(last.stem)
    last.unlink()
    # What is lost was deferred or not yet delivered.
    assert only(verify_topic(folder)) == (Kind.DAMAGE, "state.json", cut_at, 41 - cut_at)


def test_a_log_of_which_only_finished_messages_are_gone(folder: Path) -> None:
    def all_finished(state: State) -> None:
        for channel in state["channels"]:
            channel.update(cursor=41, holes=[], unfinished=[], deferred=[])

    change(folder, all_finished)
    segment_files(folder)[-1].unlink()
    report = verify_topic(folder)
    assert (only(report)[0], report.lost_messages) == (Kind.NOTE, 0)


def test_a_log_whose_needed_beginning_is_gone(folder: Path) -> None:
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
def test_a_state_that_contradicts_itself(folder: Path, edit: Callable[[State], object]) -> None:
    change(folder, edit)
    report = verify_topic(folder)
    assert report.damaged
    assert {finding.path.name for finding in report.findings} == {"state.json"}


# ---------------------------------------------------------------------- messages that were carried forward


@pytest.fixture
def carried(folder: Path) -> Path:
    """The same topic, but both channels are done with all before message 30, except for those of `a`."""
    change(folder, lambda state: [channel.update(cursor=30) for channel in state["channels"]])
    log = disk_log(folder, segment_bytes=300)
    assert log.carry_forward(range(10, 17), 10**6)
    log.discard_before(30)
    assert 17 < log.first_sequence <= 30
    log.close()
    return folder


def test_a_topic_with_messages_that_were_carried_forward(carried: Path) -> None:
    assert verify_topic(carried).findings == []


def test_of_those_that_are_lost_only_the_needed_ones_count(carried: Path) -> None:
    (carried / "stragglers").unlink()
    assert only(verify_topic(carried)) == (Kind.DAMAGE, "state.json", 10, 7)
    change(carried, lambda state: state["channels"][1].update(cursor=15))
    begin = int(segment_files(carried)[0].stem)
    assert only(verify_topic(carried)) == (Kind.DAMAGE, "state.json", 10, begin - 10)


def test_each_of_those_that_are_damaged_is_told_once(carried: Path) -> None:
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
    """Files that may not be written to."""

    def open(self, path: Path) -> int:
        raise AssertionError(f"{path} is opened for writing")


class BadDisk(ReadOnly):
    """The disk cannot read what was carried forward."""

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


def test_a_bad_place_on_the_disk_is_damage_and_any_other_error_is_none(carried: Path) -> None:
    found = verify_topic(carried, files=BadDisk(EIO)).findings
    assert [(each.path.name, each.messages) for each in found] == [("stragglers", None), ("state.json", 7)]
    with pytest.raises(LogReadError, match="Permission denied"):
        verify_topic(carried, files=BadDisk(EACCES))


def test_nothing_is_opened_for_writing(carried: Path) -> None:
    assert verify_topic(carried, files=ReadOnly()).findings == []


def test_what_is_carried_forward_again_meanwhile_is_not_missed(carried: Path) -> None:
    """More is carried forward, and what was finished meanwhile is forgotten, while the log is read."""

    def go_on() -> None:
        def finish(state: State) -> None:
            unfinished = state["channels"][0]["unfinished"]
            state["channels"][0].update(cursor=39, unfinished=unfinished[3:])
            state["channels"][1].update(cursor=39, unfinished=[[30, 1]])

        change(carried, finish)
        log = disk_log(carried, segment_bytes=300)
        assert log.carry_forward([*range(13, 17), 30], 10**6)
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
    """Before the first read of a segment something happens to the topic."""

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


def test_a_state_that_is_saved_meanwhile_may_know_more_than_was_read(folder: Path) -> None:
    def save() -> None:
        change(folder, lambda state: state.update(end=100, distribution_point=100))

    assert verify_topic(folder, files=Meanwhile(save)).findings == []


def test_what_is_deleted_meanwhile_no_later_state_needs(folder: Path) -> None:
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


def test_a_log_of_which_all_files_that_were_seen_are_deleted_meanwhile(folder: Path) -> None:
    """It goes on in others."""

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


def test_files_that_are_made_while_the_folder_is_listed(folder: Path) -> None:
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


async def test_beside_a_busy_broker_nothing_is_found(tmp_path: Path) -> None:
    """Segments grow, are deleted, and states are saved every few milliseconds."""
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
