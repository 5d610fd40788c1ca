"""Tests for dead letters in a running broker: each is moved to its topic once."""

import errno
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import trio

from broker.api import DONE, Api, running_api
from broker.letters import ORIGIN, another, client_of, configure, fail, letters, take
from broker.state import Fixture, damage, next_record
from broker.support import PATIENCE_S, FailingFiles, HeldFiles, identify, mpub, settle, until
from trio_nsq.broker.state.dead_letter_ledger import DeadLetterLedger
from trio_nsq.broker.state.version import Version
from trio_nsq.broker.storage.data_folder import decode_state
from trio_nsq.log import Files
from trio_nsq.log.record_metadata import metadata_for_dead_letters
from trio_nsq.protocol import pack_messages

HOUR_MS = 3_600_000


@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_exhausted_message_is_moved_unchanged(tmp_path: Path, sync: str) -> None:
    async with running_api(tmp_path / "d", sync=sync) as api, client_of(api) as reader:
        await reader.subscribe("dead", "any", 10)
        assert (await configure(api, "t", "c", max_attempts=2, dead_letter_topic="dead"))[0] == 200
        bodies = [b"\0\xff not text", b"{}"]
        await api.tcp.publish("t", *bodies)
        await api.tcp.subscribe("t", "c", 1)
        failed = await fail(api.tcp, 4)
        first = {message.id: message for message in failed}
        dead = await take(reader, 2)
        assert sorted(message.body for message in dead) == sorted(bodies)
        assert {message.attempts for message in dead} == {1}
        found = await letters(api)
        origins = [letter["origin"] for letter in found]
        assert [(o["topic"], o["channel"], o["attempts"], o["reason"]) for o in origins] == [
            ("t", "c", 2, "requeued")
        ] * 2
        assert {(o["id"].encode(), o["timestamp_ns"]) for o in origins} == {
            (message.id, message.timestamp_ns) for message in first.values()
        }
        assert {letter["id"].encode() for letter in found} == {message.id for message in dead}
        stats = await api.channel("t", "c")
        assert [
            stats[key] for key in ("depth", "in_flight_count", "dead_letter_count", "given_up_count")
        ] == [0, 0, 2, 0]
        assert (stats["max_attempts"], stats["dead_letter_topic"]) == (2, "dead")
        assert 'nsq_channel_dead_letters_total{channel="c",topic="t"} 2.0' in (await api.get("/metrics")).text
        await configure(api, "t", "c", max_attempts=0)
        # They stay when max_attempts is removed.
        assert (await api.channel("t", "c"))["dead_letter_count"] == 2


async def test_stats_omit_unused_settings(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await configure(api, "t", "c", dead_letter_topic="dead")
        keys = (await api.channel("t", "c")).keys()
        assert not {"max_attempts", "dead_letter_topic", "dead_letter_count", "given_up_count"} & keys


async def test_timed_out_messages_and_messages_of_lost_connections(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api, client_of(api) as reader:
        await reader.subscribe("dead", "any", 10)
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        await api.tcp.publish("t", b"late", b"lost")
        async with client_of(api) as slow:
            await slow.send(identify(msg_timeout=1000))
            await slow.ok()
            await slow.subscribe("t", "c", 1)
            await slow.message()
            assert (await take(reader, 1))[0].body == b"late"
            assert (await slow.message()).body == b"lost"
        assert (await take(reader, 1))[0].body == b"lost"
        assert [letter["origin"]["reason"] for letter in await letters(api)] == [
            "timed_out",
            "connection_lost",
        ]


async def test_message_without_a_dead_letter_topic_is_dropped_and_counted(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await configure(api, "t", "c", max_attempts=1)
        await api.tcp.publish("t", b"a", b"b")
        await api.tcp.subscribe("t", "c", 2)
        await fail(api.tcp, 2)
        await api.tcp.nothing_more()
        stats = await api.channel("t", "c")
        assert (stats["given_up_count"], stats["dead_letter_count"], stats["depth"]) == (2, 0, 0)
        assert 'nsq_channel_given_up_total{channel="c",topic="t"} 2.0' in (await api.get("/metrics")).text


async def test_nsq_client_can_ask_for_the_origin_of_a_letter(tmp_path: Path) -> None:
    """It gets the unchanged body, and an id for the query, which also works while the letter is in flight."""
    async with running_api(tmp_path / "d") as api, client_of(api) as reader:
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        await configure(api, "dead", "dead-letters")
        await reader.subscribe("dead", "dead-letters", 1)
        await api.tcp.publish("t", b"a", b"b")
        await api.tcp.subscribe("t", "c", 1)
        first, _ = await fail(api.tcp, 2)
        message = await reader.message()
        assert (message.body, message.attempts) == (first.body, 1)
        (letter,) = await letters(api, id=message.id.decode())
        assert letter["origin"] == {
            "topic": "t",
            "channel": "c",
            "id": first.id.decode(),
            "sequence": 0,
            "attempts": 1,
            "timestamp_ns": first.timestamp_ns,
            "reason": "requeued",
        }


async def test_paused_dead_letter_topic_accepts_letters_and_keeps_them(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        await api.post("/topic/create", topic="dead")
        await api.post("/topic/pause", topic="dead")
        await api.tcp.publish("t", b"a")
        await api.tcp.subscribe("t", "c", 1)
        await fail(api.tcp, 1)
        await wait_for_depth(api, "dead", 1)
        assert await letters(api) == []
        await api.post("/topic/unpause", topic="dead")
        assert [letter["body"] for letter in await letters(api)] == ["a"]


async def wait_for_depth(api: Api, topic: str, depth: int) -> None:
    with trio.fail_after(PATIENCE_S):
        while await api.depth(topic) != depth:
            await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("origin", ["t#ephemeral", "t"])
async def test_ephemeral_topics_and_channels(tmp_path: Path, origin: str) -> None:
    async with running_api(tmp_path / "d") as api, client_of(api) as reader:
        await reader.subscribe("dead#ephemeral", "any", 10)
        await api.tcp.subscribe(origin, "c#ephemeral", 1)
        settings = {"max_attempts": 1, "dead_letter_topic": "dead#ephemeral"}
        assert (await configure(api, origin, "c#ephemeral", **settings))[0] == 200
        await api.tcp.publish(origin, b"a")
        await fail(api.tcp, 1)
        assert (await take(reader, 1))[0].body == b"a"
        (letter,) = await letters(api, "dead#ephemeral")
        assert (letter["origin"]["topic"], letter["origin"]["channel"]) == (origin, "c#ephemeral")


# ---------------------------------------------------------------------- invalid settings


@pytest.mark.parametrize("kind", ["", "#ephemeral"])
async def test_loops_are_refused(tmp_path: Path, kind: str) -> None:
    a, b, c, d = (name + kind for name in "abcd")
    async with running_api(tmp_path / "d") as api:
        assert (await configure(api, a, "x", dead_letter_topic=b))[0] == 200
        assert (await configure(api, b, "x", dead_letter_topic=c))[0] == 200
        assert (await configure(api, b, "y", dead_letter_topic=c))[0] == 200
        for channel in ("x", "y"):
            reason = f"dead_letter_topic {a} makes a cycle: its own dead letters end up in {c} again"
            refused = 400, {"message": f"INVALID_SETTING: {reason}"}
            assert await configure(api, c, channel, dead_letter_topic=a) == refused
        status, answer = await configure(api, a, "x", dead_letter_topic=a)
        assert status == 400
        assert answer["message"].startswith("INVALID_SETTING: dead_letter_topic is the topic itself")
        assert (await configure(api, c, "x", dead_letter_topic=d))[0] == 200


async def test_chain_of_dead_letter_topics_is_allowed(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api, client_of(api) as last:
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        await configure(api, "dead", "dead-letters", max_attempts=1, dead_letter_topic="buried")
        await last.subscribe("buried", "any", 1)
        await api.tcp.publish("t", b"a")
        await api.tcp.subscribe("t", "c", 1)
        await fail(api.tcp, 1)
        async with client_of(api) as second:
            await second.subscribe("dead", "dead-letters", 1)
            (again,) = await fail(second, 1)
            assert (await take(last, 1))[0].body == b"a"
        (letter,) = await letters(api, "buried")
        origin = letter["origin"]
        assert (origin["topic"], origin["channel"], origin["id"]) == (
            "dead",
            "dead-letters",
            again.id.decode(),
        )


# ---------------------------------------------------------------------- failures


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log lines about dead letters that could not be moved."""
    messages = (record.getMessage() for record in caplog.records)
    return [message for message in messages if "dead letters cannot go to topic dead" in message]


async def test_full_disk_keeps_the_message_and_the_move_is_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = FailingFiles()
    async with running_api(tmp_path / "d", files=files) as api, client_of(api) as reader:
        await reader.subscribe("dead", "any", 10)
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        await api.tcp.publish("t", b"a", b"b")
        await api.tcp.subscribe("t", "c", 2)
        first, second = await api.tcp.message(), await api.tcp.message()
        files.full_after = 0
        await api.tcp.send(b"REQ %s 0\n" % first.id)
        # The state cannot be saved either, so only /ping may report that.
        await until(lambda: len(refusals(caplog)) == 1)
        assert (await api.get("/ping")).status_code == 500
        stats = await api.channel("t", "c")
        assert (stats["depth"], stats["dead_letter_count"]) == (1, 0)
        await api.tcp.send(b"REQ %s 0\n" % second.id)
        files.full_after = None
        assert sorted(message.body for message in await take(reader, 2)) == [b"a", b"b"]
        stats = await api.channel("t", "c")
        assert (stats["depth"], stats["dead_letter_count"]) == (0, 2)
        assert len(await letters(api)) == 2
        (said,) = refusals(caplog)
        assert said.endswith("No space left on device")


class NoDeadLetters(Files):
    """The files of topic `dead` cannot be written."""

    fails = False

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        if self.fails and Path(f"/proc/self/fd/{fd}").readlink().parent.name == "dead.topic":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, offset, parts)


async def test_removed_max_attempts_delivers_messages_that_could_not_be_moved(tmp_path: Path) -> None:
    files = NoDeadLetters()
    async with running_api(tmp_path / "d", files=files) as api:
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        await api.tcp.publish("t", b"a")
        await api.tcp.subscribe("t", "c", 1)
        files.fails = True
        await fail(api.tcp, 1)
        await configure(api, "t", "c", max_attempts=0)
        message = await api.tcp.message()
        assert (message.body, message.attempts) == (b"a", 2)
        files.fails = False
        await api.tcp.send(b"FIN %s\n" % message.id)
    async with running_api(tmp_path / "d") as api:
        assert (await api.channel("t", "c"))["depth"] == 0
        assert (await api.get("/dead_letters/messages", topic="dead")).status_code in (200, 404)


async def test_full_dead_letter_topic_keeps_messages_in_their_channel(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api, client_of(api) as reader:
        await api.post("/pub", body=b"first", topic="dead")
        await api.send("PUT", "/topic/settings?topic=dead", body=b'{"max_messages":1}')
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        await api.tcp.publish("t", b"a")
        await api.tcp.subscribe("t", "c", 1)
        await fail(api.tcp, 1)
        await api.tcp.nothing_more()
        assert (await api.channel("t", "c"))["depth"] == 1
        assert [
            await _would_drop(api, changes)
            for changes in (
                b'{"dead_letter_topic":null}',
                b'{"dead_letter_topic":null,"max_attempts":2}',
                b"{}",
            )
        ] == [1, 0, 0]
        await reader.subscribe("dead", "dead-letters", 1)
        assert [message.body for message in await take(reader, 2)] == [b"first", b"a"]


async def _would_drop(api: Api, changes: bytes) -> int:
    answer = await api.send("PUT", "/channel/settings?topic=t&channel=c&dry_run=true", body=changes)
    dropped: int = answer.json()["dropped"]
    return dropped


async def test_deleted_dead_letter_topic_is_recreated(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        await api.tcp.subscribe("t", "c", 1)
        for body in (b"a", b"b"):
            await api.post("/pub", body=body, topic="t")
            await fail(api.tcp, 1)
            async with client_of(api) as reader:
                await reader.subscribe("dead", "dead-letters", 1)
                assert (await reader.message()).body == body
            await api.post("/topic/delete", topic="dead")


class BadSector(Files):
    """A real file system where a block with certain bytes cannot be read."""

    def __init__(self) -> None:
        self.bad = b""

    def read(self, fd: int, size: int, offset: int) -> bytes:
        data = super().read(fd, size, offset)
        if self.bad and self.bad in data:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return data


async def test_unreadable_message_does_not_delay_others(tmp_path: Path) -> None:
    files = BadSector()
    options = {"files": files, "mem_queue_size": 0, "cache_bytes": 0}
    async with running_api(tmp_path / "d", **options) as api, client_of(api) as reader:
        await reader.subscribe("dead", "any", 9)
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        bodies = [letter * 100_000 for letter in (b"a", b"b", b"c")]
        for body in bodies:
            await api.tcp.publish("t", body)
        await api.tcp.subscribe("t", "c", 3)
        ids = [(await api.tcp.message()).id for _ in bodies]
        files.bad = b"a" * 10
        await api.tcp.send(b"".join(b"REQ %s 0\n" % message_id for message_id in ids))
        assert [message.body[:1] for message in await take(reader, 2)] == [b"b", b"c"]
        stats = await api.channel("t", "c")
        assert (stats["depth"], stats["dead_letter_count"]) == (1, 2)
        files.bad = b""
        assert (await take(reader, 1))[0].body == bodies[0]
        assert (await api.channel("t", "c"))["depth"] == 0


async def test_damaged_message_is_dropped(tmp_path: Path) -> None:
    data_path = tmp_path / "d"
    async with running_api(data_path, mem_queue_size=0, cache_bytes=0) as api:
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        bodies = [letter * 100_000 for letter in (b"a", b"b", b"c")]
        for body in bodies:
            await api.tcp.publish("t", body)
        await api.tcp.subscribe("t", "c", 3)
        ids = [(await api.tcp.message()).id for _ in bodies]
        damage(data_path / "topics" / "t.topic", bodies[0])
        await api.tcp.send(b"".join(b"REQ %s 0\n" % message_id for message_id in ids))
        with trio.fail_after(PATIENCE_S):
            while (await api.channel("t", "c"))["depth"]:
                pass
        assert [letter["body"][:1] for letter in await letters(api)] == ["b", "c"]


# ---------------------------------------------------------------------- crashes


async def check_that_it_came_once(after: Api) -> None:
    """Check that the only message is a dead letter, and nowhere else."""
    assert [letter["body"] for letter in await letters(after, reason="requeued")] == ["a"]
    stats = await after.channel("t", "c")
    assert [stats[key] for key in ("depth", "in_flight_count", "deferred_count")] == [0, 0, 0]
    async with client_of(after) as client:
        await client.subscribe("t", "c", 10)
        await client.nothing_more()
    assert len(await letters(after, reason="requeued")) == 1


@pytest.mark.parametrize("known_as", ["never seen", "in flight", "deferred", "requeued", "given up"])
async def test_crash_after_the_move_does_not_duplicate_the_message(tmp_path: Path, known_as: str) -> None:
    """The saved state has the message as some time before the move, or not at all."""
    data_path, hour = tmp_path / "d", {"checkpoint_interval_ms": HOUR_MS}
    async with running_api(data_path, **hour) as api, client_of(api) as reader:
        settings = {"max_attempts": 2, "dead_letter_topic": "dead"}
        await configure(api, "t", "c", **settings)
        if known_as == "given up":
            await api.post("/pub", body=b"in the way", topic="dead")
            await api.send("PUT", "/topic/settings?topic=dead", body=b'{"max_messages":1}')
        await api.tcp.publish("t", b"a")
        await api.tcp.subscribe("t", "c", 1)
        message = await api.tcp.message()
        if known_as == "in flight":
            await configure(api, "t", "c", **settings)  # saves the topic's state
        if known_as == "requeued":
            await api.tcp.send(b"RDY 0\n")
        await api.tcp.send(b"REQ %s %d\n" % (message.id, 300 if known_as == "deferred" else 0))
        if known_as in ("deferred", "requeued"):
            await api.tcp.nothing_more()
            await configure(api, "t", "c", **settings)
            await api.tcp.send(b"RDY 1\n")
        if known_as != "given up":
            await reader.subscribe("dead", "copy", 1)
        await fail(api.tcp, 1)
        if known_as == "given up":
            await api.tcp.nothing_more()
            await configure(api, "t", "c", **settings)
            await reader.subscribe("dead", "dead-letters", 1)
            await take(reader, 1)
            await reader.send(b"CLS\n")
        else:
            await reader.message()
        with trio.fail_after(PATIENCE_S):
            while not await letters(api, reason="requeued"):
                await trio.lowlevel.checkpoint()
        state = decode_state((data_path / "topics" / "t.topic" / "state.json").read_bytes())
        assert state["settled"] == state["end"]
        async with another(api, data_path) as after:
            await check_that_it_came_once(after)
        # The same after a second crash, directly after the first start.
        shutil.rmtree(tmp_path / "d-copy")
        async with another(api, data_path, **hour) as after:
            async with another(after, tmp_path / "d-copy") as second:
                await check_that_it_came_once(second)


async def test_clean_restarts_of_a_consumer_use_up_no_attempts(tmp_path: Path) -> None:
    """It returns what it has prefetched, and its connection is lost with the rest."""
    async with running_api(tmp_path / "d") as api:
        await configure(api, "t", "c", max_attempts=2, dead_letter_topic="dead")
        await api.tcp.publish("t", *(b"%d" % n for n in range(20)))
        for _ in range(6):
            async with client_of(api) as client:
                await client.subscribe("t", "c", 20)
                messages = [await client.message() for _ in range(20)]
                await client.send(b"CLS\n")
                assert await client.frame() == (0, b"CLOSE_WAIT")
                await client.send(b"".join(b"REQ %s 0\n" % each.id for each in messages))
            while (await api.channel("t", "c"))["client_count"]:
                await trio.lowlevel.checkpoint()
        assert (await api.channel("t", "c"))["dead_letter_count"] == 0
        async with client_of(api) as client:
            await client.subscribe("t", "c", 20)
            assert sorted([(await client.message()).attempts for _ in range(20)]) == [7] * 20


async def test_messages_in_flight_at_a_crash_of_the_broker_have_not_failed(tmp_path: Path) -> None:
    data_path = tmp_path / "d"
    async with running_api(data_path, checkpoint_interval_ms=HOUR_MS) as api:
        settings = {"max_attempts": 1, "dead_letter_topic": "dead"}
        await configure(api, "t", "c", **settings)
        await api.tcp.publish("t", b"a", b"b")
        await api.tcp.subscribe("t", "c", 2)
        await api.tcp.message()
        await api.tcp.message()
        await configure(api, "t", "c", **settings)
        async with another(api, data_path) as after, client_of(after) as reader:
            await reader.subscribe("t", "c", 2)
            await fail(reader, 2)
            async with client_of(after) as dead_letters:
                await dead_letters.subscribe("dead", "dead-letters", 2)
                assert sorted(message.body for message in await take(dead_letters, 2)) == [b"a", b"b"]
            assert (await after.channel("t", "c"))["depth"] == 0


async def test_stop_moves_nothing_and_loses_nothing(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        await api.tcp.publish("t", b"a")
        await api.tcp.subscribe("t", "c", 1)
        await api.tcp.message()
    async with running_api(tmp_path / "d") as api:
        await api.tcp.subscribe("dead", "dead-letters", 1)
        assert (await api.tcp.message()).body == b"a"
        (stats,) = (await api.stats(topic="t"))["topics"]
        assert stats["channels"][0]["depth"] == 0


async def test_recreated_topic_keeps_messages_with_the_sequences_of_old_letters(
    tmp_path: Path,
) -> None:
    data_path = tmp_path / "d"
    async with running_api(data_path, checkpoint_interval_ms=HOUR_MS) as api:
        settings = {"max_attempts": 1, "dead_letter_topic": "dead"}
        await configure(api, "t", "c", **settings)
        await api.tcp.publish("t", b"old")
        async with client_of(api) as client:
            await client.subscribe("t", "c", 1)
            await fail(client, 1)
            async with client_of(api) as reader:
                await reader.subscribe("dead", "dead-letters", 1)
                await reader.message()
        before = (data_path / "topics" / "dead.topic" / "state.json").read_bytes()
        await api.post("/topic/delete", topic="t")
        await configure(api, "t", "c", **settings)
        await api.tcp.publish("t", b"new")
        # The dead-letter topic may not have been saved since it got its letter.
        assert decode_state(before)["settled"] == 0
        async with another(api, data_path) as after, client_of(after) as client:
            await client.subscribe("t", "c", 1)
            assert (await client.message()).body == b"new"
            assert [letter["body"] for letter in await letters(after)] == ["old"]


async def test_confirmed_letters_are_not_checked_again(tmp_path: Path) -> None:
    """After the states are saved, the dead-letter topic knows which of its letters have left their channels."""
    data_path = tmp_path / "d"
    async with running_api(data_path, checkpoint_interval_ms=20) as api, client_of(api) as reader:
        await reader.subscribe("dead", "any", 10)
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        await api.tcp.subscribe("t", "c", 1)
        await api.post("/pub", body=b"a", topic="t")
        await fail(api.tcp, 1)
        await take(reader, 1)
        state = data_path / "topics" / "dead.topic" / "state.json"
        await until(lambda: bool(decode_state(state.read_bytes())["settled"] == 1))


async def settled(data_path: Path) -> int:
    """Return the sequence up to which the saved dead-letter topic has confirmed its letters."""
    state = decode_state((data_path / "topics" / "dead.topic" / "state.json").read_bytes())
    sequence: int = state["settled"]
    return sequence


async def test_letters_of_a_deleted_topic_keep_no_files(tmp_path: Path) -> None:
    """Its state, which might have them, is deleted, too."""
    data_path = tmp_path / "d"
    async with running_api(data_path, checkpoint_interval_ms=HOUR_MS) as api, client_of(api) as reader:
        await reader.subscribe("dead", "any", 9)
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        await api.post("/pub", body=b"a", topic="t")
        async with client_of(api) as client:
            await client.subscribe("t", "c", 1)
            await fail(client, 1)
            await take(reader, 1)
        await api.post("/topic/pause", topic="dead")  # saves it
        assert await settled(data_path) == 0
        await api.post("/topic/delete", topic="t")
        await api.post("/topic/unpause", topic="dead")
        assert await settled(data_path) == 1


class UnsyncedDeadLetters(Files):
    """The messages of topic `dead` cannot be synced."""

    fails = False

    def sync(self, fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if self.fails and (path.parent.name, path.suffix) == ("dead.topic", ".log"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(fd)


async def test_message_stays_until_its_letter_is_synced(tmp_path: Path) -> None:
    """With --sync=interval, too: a power cut could lose the letter."""
    files = UnsyncedDeadLetters()
    async with running_api(tmp_path / "d", files=files, sync="interval") as api:
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        await api.post("/pub", body=b"makes the file", topic="dead")
        files.fails = True
        await api.post("/pub", body=b"a", topic="t")
        await api.tcp.subscribe("t", "c", 1)
        await fail(api.tcp, 1)
        with trio.fail_after(PATIENCE_S):
            while (await api.get("/ping")).status_code == 200:
                pass
        await settle()
        stats = await api.channel("t", "c")
        assert (stats["depth"], stats["dead_letter_count"]) == (1, 0)
        files.fails = False
        with trio.fail_after(PATIENCE_S):
            while (await api.channel("t", "c"))["dead_letter_count"] == 0:
                pass
        assert [letter["body"] for letter in await letters(api, reason="requeued")] == ["a"]


def test_each_change_of_the_ledgers_changes_a_version() -> None:
    origin, dead = Version(), Version()
    ledger, stored_in = DeadLetterLedger(origin), DeadLetterLedger(dead)
    stored_in.record_here(b"letters", 7)
    assert (origin.number, dead.number) == (0, 1)
    ledger.record_moved(stored_in, b"letters")
    assert (origin.number, dead.number) == (1, 1)
    ledger.confirm_moved(ledger.moved_count)
    assert (origin.number, dead.number) == (1, 2)
    assert not stored_in.unconfirmed


async def test_letters_of_a_topic_that_a_restart_does_not_find_keep_no_files(tmp_path: Path) -> None:
    data_path, copy = tmp_path / "d", tmp_path / "copy"
    async with running_api(data_path, checkpoint_interval_ms=HOUR_MS) as api, client_of(api) as reader:
        await reader.subscribe("dead", "any", 9)
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        await api.post("/pub", body=b"a", topic="t")
        await api.tcp.subscribe("t", "c", 1)
        await fail(api.tcp, 1)
        await take(reader, 1)
        await api.post("/topic/pause", topic="dead")  # saves it
        shutil.copytree(data_path, copy)
    assert await settled(copy) == 0
    shutil.rmtree(copy / "topics" / "t.topic")
    async with running_api(copy):
        pass
    assert await settled(copy) == 1


def test_repeated_letters_are_found_at_their_last_position() -> None:
    """After a seek back, a channel may exhaust the same messages again."""
    fixture = Fixture(name="dead")
    for sequence in (5, 6, 5):
        metadata = metadata_for_dead_letters([{**ORIGIN, "sequence": sequence}])
        record = next_record(fixture.topic, pack_messages([b"a"]), fixture.ids.take(1), metadata=metadata)
        fixture.log.append([record], sync=False)
        fixture.topic.accept([record])
    assert list(fixture.topic.dead_letters.unconfirmed.values()) == [1, 2]
    assert fixture.topic.snapshot()["settled"] == 1


async def test_restart_does_not_remove_messages_redelivered_by_a_seek(tmp_path: Path) -> None:
    data_path = tmp_path / "d"
    async with running_api(data_path, checkpoint_interval_ms=HOUR_MS) as api, client_of(api) as reader:
        await reader.subscribe("dead", "any", 9)
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        await api.post("/pub", body=b"a", topic="t")
        async with client_of(api) as client:
            await client.subscribe("t", "c", 1)
            await fail(client, 1)
            await take(reader, 1)
        await wait_until_unused(api)
        moved = await api.send("POST", "/channel/seek?topic=t&channel=c&to=earliest")
        assert moved.json()["delivered_again"] == 1
        async with another(api, data_path) as after, client_of(after) as client:
            await client.subscribe("t", "c", 1)
            assert (await client.message()).body == b"a"


class SlowDeadLetters(HeldFiles):
    """Only saving topic `dead` waits; records which states are saved meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.is_slow = False
        self.saved_meanwhile: list[str] = []

    def replace(self, path: Path, content: bytes) -> None:
        if path.parent.name == "dead.topic":
            super().replace(path, content)
            return
        if self.is_slow:
            self.saved_meanwhile.append(path.parent.name)
        Files.replace(self, path, content)


async def test_seek_back_during_a_save_of_the_dead_letter_topic(tmp_path: Path) -> None:
    """A restart must not remove the messages of the seek."""
    files = SlowDeadLetters()
    async with running_api(tmp_path / "d", files=files, checkpoint_interval_ms=HOUR_MS) as api:
        async with client_of(api) as client:
            await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
            await api.post("/pub", body=b"a", topic="t")
            await api.tcp.subscribe("dead", "any", 9)
            await client.subscribe("t", "c", 1)
            await fail(client, 1)
            await take(api.tcp, 1)
        await wait_until_unused(api)
        await api.post("/topic/create", topic="other")
        await api.post("/topic/pause", topic="t")  # saves it: the letter is only in `dead`
        files.is_slow = True
        files.hold("replace")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(api.post, "/topic/pause", topic="dead"))
            await files.reached()
            nursery.start_soon(api.send, "POST", "/channel/seek?topic=t&channel=c&to=earliest")
            for verb in ("pause", "unpause") * 3:
                assert await api.post(f"/topic/{verb}", topic="other") == DONE
            files.is_slow = False
            files.release()
    assert set(files.saved_meanwhile) == {"other.topic"}


async def wait_until_unused(api: Api) -> None:
    with trio.fail_after(PATIENCE_S):
        while (await api.channel("t", "c"))["client_count"]:
            await trio.lowlevel.checkpoint()


async def test_many_letters_at_once(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api, client_of(api) as reader:
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        bodies = [b"%d " % n + b"x" * 5000 for n in range(1000)]
        for start in range(0, 1000, 100):
            await api.tcp.send(mpub("t", *bodies[start : start + 100]))
            await api.tcp.ok()
        await reader.subscribe("dead", "any", 2500)
        await api.tcp.subscribe("t", "c", 2500)
        await fail(api.tcp, 1000)
        assert sorted(message.body for message in await take(reader, 1000)) == sorted(bodies)
        assert (await api.channel("t", "c"))["dead_letter_count"] == 1000
