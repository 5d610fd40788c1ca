"""The write path: its turns, large messages, users of a log, and its close."""

import gc
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import trio

from broker.support import PATIENCE_S, FailingFiles, TopicsFiles, settle, until
from broker.write_path import Counted, Running, running_write_path
from trio_nsq.broker.errors import PublishRefused
from trio_nsq.broker.ingest.publication import Publication
from trio_nsq.broker.options import Sync
from trio_nsq.broker.state.topic import Topic
from trio_nsq.protocol import pack_messages


async def test_user_of_a_log_gets_it_in_spite_of_waiting_publishers(tmp_path: Path) -> None:
    async with running_write_path(tmp_path, wal_file_s=0.1) as running:
        busy = [running.add(f"t{n}", goes_on=True) for n in range(5)]
        for one in busy:
            one.publish()
            one.publish()
        with trio.fail_after(PATIENCE_S):
            for one in busy:
                assert await running.write_path.rotate(one.topic)
            with trio.move_on_after(0):
                await running.write_path.rotate(busy[0].topic)
        stored = [one.stored for one in busy]
        await until(lambda: all(one.stored > before for one, before in zip(busy, stored, strict=True)))


async def test_threads_exit_when_their_nursery_is_cancelled(tmp_path: Path) -> None:
    files = TopicsFiles()
    async with running_write_path(tmp_path, files=files) as running:
        idle, committing = running.add("t1"), running.add("t2")
        for one in (idle, committing):
            one.publish()
        await until(lambda: bool(idle.stored and committing.stored))
        files.gates["t2"] = threading.Event()
        committing.publish()
        await settle()
        running.nursery.cancel_scope.cancel()
        await trio.lowlevel.cancel_shielded_checkpoint()
        files.gates["t2"].set()
    assert committing.topic.log.next_sequence == 2


@pytest.mark.parametrize("coalesce_s", [-1.0, 1000.0])
async def test_commit_waits_for_a_pause_for_a_limited_time(tmp_path: Path, coalesce_s: float) -> None:
    async with running_write_path(tmp_path, coalesce_s=coalesce_s, turn_s=-1) as running:
        one = running.add("t")
        async with running.rounds() as count:
            running.server.poller.call_soon(one.publish)
            later = count() + 1000
            if coalesce_s < 0:
                await until(lambda: bool(one.stored))
            else:
                await until(lambda: count() > later)
                assert (one.stored, running.threads) == (0, 0)


async def test_publish_is_stored_if_the_nursery_is_cancelled(tmp_path: Path) -> None:
    async with running_write_path(tmp_path) as running:
        one = running.add("t")
        running.nursery.cancel_scope.cancel()
        one.publish()
        with trio.CancelScope(shield=True), trio.fail_after(PATIENCE_S):
            await running.write_path.close()
    assert one.stored == 1


class RecordedWrites(FailingFiles):
    """Records each write of messages among other events."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        super().write(fd, offset, parts)
        self.events.append("written")


def _submit_three(running: Running, files: RecordedWrites, topic: Topic, size: int) -> None:
    """Submit three publications with a body of `size` bytes each, and record their results with the writes."""

    def complete(number: int, error: PublishRefused | None) -> None:
        files.events.append(f"{number} {'OK' if error is None else 'refused'}")

    files.events.clear()
    for number in range(3):
        messages = pack_messages([bytes([number]) * size])
        running.write_path.submit(topic, [Publication([messages])], partial(complete, number))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1024, ["written", "0 OK", "1 OK", "2 OK"]),
        (2**20, ["written", "0 OK", "written", "1 OK", "written", "2 OK"]),
    ],
    ids=["small", "large"],
)
async def test_large_publication_is_acknowledged_before_the_next_is_written(
    tmp_path: Path, size: int, expected: list[str]
) -> None:
    files = RecordedWrites()
    async with running_write_path(tmp_path, "interval", files, turn_s=PATIENCE_S) as running:
        topic = running.add("t").topic
        _submit_three(running, files, topic, size)
        await running.write_path.until_idle(topic)
        assert files.events == expected
        stored = [body for record in topic.log.read(0, 4 * 2**20) for body in record.messages.bodies()]
        assert stored == [bytes([number]) * size for number in range(3)]


async def test_large_publications_of_a_round_share_a_sync(tmp_path: Path) -> None:
    files = Counted()
    async with running_write_path(tmp_path, "always", files, turn_s=PATIENCE_S) as running:
        one = running.add("t")
        files.syncs = 0
        for _ in range(3):
            one.publish(2**20)
        await running.write_path.until_idle(one.topic)
        assert (one.stored, files.syncs) == (3, 1)


@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_large_publications_wait_for_a_new_file(tmp_path: Path, sync: Sync) -> None:
    """All of them are refused if it cannot be created; otherwise they keep their order, also over several files."""
    files = RecordedWrites()
    async with running_write_path(tmp_path, sync, files) as running:
        topic = running.server.broker.topic("t")
        files.sync_fails = True
        _submit_three(running, files, topic, 2**20)
        await running.write_path.until_idle(topic)
        assert [each for each in files.events if each != "written"] == ["0 refused", "1 refused", "2 refused"]
        files.sync_fails = False
        _submit_three(running, files, topic, 2**20)
        await running.write_path.until_idle(topic)
        assert [each for each in files.events if each != "written"] == ["0 OK", "1 OK", "2 OK"]
        assert topic.log.next_sequence == 3
        topic.log.close()


@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_deleted_topic_is_released(tmp_path: Path, sync: Sync) -> None:
    """Also by waiting threads."""

    def topics() -> int:
        gc.collect()
        return sum(isinstance(each, Topic) for each in gc.get_objects())

    before = topics()
    async with running_write_path(tmp_path, sync) as running:
        one = running.add("t")
        one.publish()
        await until(lambda: bool(running.busy[0].stored) and not running.write_path.is_busy)
        running.busy.clear()
        assert topics() > before
        await running.server.topics.delete_topic(one.topic)
        del one
        await until(lambda: topics() == before)


async def test_messages_collected_while_a_log_is_in_use_are_written_after_it(tmp_path: Path) -> None:
    files = TopicsFiles()
    async with running_write_path(tmp_path, files=files) as running:
        one = running.add("t")
        files.gates["t"] = threading.Event()
        one.publish()
        await until(lambda: files.syncing == ["t"])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.write_path.rotate, one.topic)
            await settle()
            one.publish()
            await settle()
            files.gates["t"].set()
        await until(lambda: one.stored == 2)
        assert [file.base_sequence for file in one.topic.log.files] == [0, 1]


@pytest.mark.parametrize("is_turn", [False, True])
async def test_cancelled_user_of_a_log_does_not_block_others(tmp_path: Path, is_turn: bool) -> None:
    """Cancelled before its turn, or at its turn."""
    files = TopicsFiles()
    async with running_write_path(tmp_path, files=files) as running:
        one = running.add("t")
        one.publish()
        await until(lambda: bool(one.stored))
        files.gates["t"] = threading.Event()
        scope = trio.CancelScope()

        async def first() -> None:
            assert await running.write_path.rotate(one.topic)
            scope.cancel()  # the next one may continue, but has not run yet

        async def second() -> None:
            with scope:
                await running.write_path.rotate(one.topic)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            await until(lambda: files.syncing == ["t"])
            nursery.start_soon(second)
            await settle()
            if not is_turn:
                scope.cancel()
                await settle()
            files.gates["t"].set()
        assert scope.cancelled_caught
        one.publish()
        await until(lambda: one.stored == 2)


async def test_written_messages_are_synced_at_the_close(tmp_path: Path) -> None:
    files = Counted()
    async with running_write_path(tmp_path, "interval", files) as running:
        one = running.add("t")
        one.publish()  # creates the segment
        await until(lambda: not running.write_path.is_busy)
        one.publish()
        files.syncs = 0
        await running.write_path.close()
        assert (one.stored, files.syncs) == (2, 1)


async def test_collected_messages_are_stored_at_the_close(tmp_path: Path) -> None:
    async with running_write_path(tmp_path, coalesce_s=1000, turn_s=-1) as running:
        one = running.add("t")
        async with running.rounds():
            running.server.poller.call_soon(one.publish)
            await until(lambda: running.write_path.is_busy)
            assert not running.threads
            with trio.fail_after(PATIENCE_S):
                await running.write_path.close()
        assert one.stored == 1


async def test_remaining_messages_of_a_turn_are_written_in_the_next(tmp_path: Path) -> None:
    async with running_write_path(tmp_path, "interval", turn_s=-1) as running:
        busy = running.add("busy#ephemeral", goes_on=True)
        busy.publish()  # and again, when that is written
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        assert 5 < busy.stored <= 20
        busy.goes_on = False
        await settle()


async def test_checkpoint_leaves_an_unused_new_topic_to_its_request(tmp_path: Path) -> None:
    """A saved one would not be forgotten if the request is refused."""
    files = FailingFiles()
    async with running_write_path(tmp_path, files=files) as running, trio.open_nursery() as nursery:
        server, topics = running.server, tmp_path / "d" / "topics"
        nursery.start_soon(server.checkpointer.save_on_schedule, 0.0)
        topic = await server.topics.until_publishable("t")
        for name in ("a", "b", "c"):  # each is saved by a checkpoint, one after the other
            server.broker.topic(name).add_channel("c")
            await until((topics / f"{name}.topic" / "state.json").exists)
        assert not (topics / "t.topic" / "state.json").exists()
        files.sync_fails = True
        with pytest.raises(PublishRefused):
            await server.write_path.publish(topic, [Publication([pack_messages([b"x"])])])
        await until(lambda: "t" not in server.broker.topics)
        assert not (topics / "t.topic").exists()
        nursery.cancel_scope.cancel()
