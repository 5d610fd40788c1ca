"""What is said of a topic's saved state beside its log, and of a data folder that a broker is using."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from broker.state import Fixture, disk_log, packed
from broker.support import PATIENCE_S, running_broker
from log.support import segment_files
from trio_nsq.broker.deferred import DeferredMessages
from trio_nsq.broker.verify import topic_folders, verify_broker_file, verify_topic
from trio_nsq.client import Consumer, Producer
from trio_nsq.log import Files
from trio_nsq.log.scan import Kind
from trio_nsq.log.verify import LogReport

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
        lambda state: state["channels"][0]["unfinished"].append([12, 3]),
        lambda state: state["channels"][0]["unfinished"].append([39, 0]),
        lambda state: state["channels"][0]["deferred"].extend(packed([(2**63, 12, 0)])),
        lambda state: state["channels"][1].update(holes=[[5, 9], [8, 10]]),
        lambda state: state["channels"][1].update(holes=[[5, 99]]),
        lambda state: state["channels"][1].update(holes=[[9, 5]]),
        lambda state: state["channels"][1].update(cursor="1", holes=[]),
    ],
)
def test_a_state_that_contradicts_itself(folder: Path, edit: Callable[[State], object]) -> None:
    change(folder, edit)
    report = verify_topic(folder)
    assert report.damaged
    assert {finding.path.name for finding in report.findings} == {"state.json"}


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


class Meanwhile(Files):
    """Before the first read of a segment something happens to the topic."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self._happens: Callable[[], None] | None = happens

    def read(self, fd: int, size: int, offset: int) -> bytes:
        if self._happens is not None:
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
                if count > 20_000:
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
