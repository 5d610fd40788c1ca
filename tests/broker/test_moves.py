"""Tests for the move of a topic to another broker: what is moved, what is kept, and what a move refuses."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from broker.api import Api, running_api
from broker.letters import another, client_of, configure, fail, letters, take
from broker.moving import TO, Mover, waiting
from broker.support import PATIENCE_S, HeldFiles, UnsavedStates
from trio_nsq.broker.moved_groups import MovedGroup
from trio_nsq.broker.state import producers
from trio_nsq.protocol import Limits, MessageSet, pack_messages

HOUR_MS = 3_600_000
DONE = (200, "")


async def create(api: Api, topic: str, *channels: str) -> None:
    assert await api.post("/topic/create", topic=topic) == DONE
    for channel in channels:
        assert await api.post("/channel/create", topic=topic, channel=channel) == DONE


async def publish(api: Api, topic: str, *bodies: str, **query: Any) -> None:
    for body in bodies:
        assert (await api.post("/pub", body.encode(), topic=topic, **query))[0] == 200


async def bodies(api: Api, topic: str, channel: str) -> list[str]:
    return [each["body"] for each in await waiting(api, topic, channel)]


def refusal(answer: httpx.Response) -> tuple[int, str]:
    """Return the status and the code of a refused request."""
    return answer.status_code, answer.json()["message"].partition(":")[0]


async def in_flight_is(api: Api, channel: str, count: int) -> None:
    """Wait until a channel has this many messages in flight."""
    with trio.fail_after(PATIENCE_S):
        while (await api.channel("t", channel))["in_flight_count"] != count:
            await trio.lowlevel.checkpoint()


async def dead_letters_are(api: Api, count: int) -> None:
    """Wait until this many messages of t/c were moved to the dead-letter topic."""
    with trio.fail_after(PATIENCE_S):
        while (await api.channel("t", "c")).get("dead_letter_count") != count:
            await trio.lowlevel.checkpoint()


# ---------------------------------------------------------------------- what is moved


@pytest.mark.parametrize("max_bytes", [None, 1])
async def test_each_channel_gets_its_own_leftovers_once(tmp_path: Path, max_bytes: int | None) -> None:
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        await create(source, "t", "all", "rest", "empty")
        await create(target, "t", "other")
        await publish(target, "t", "there")
        await publish(source, "t", *map(str, range(10)))
        async with client_of(source) as one, client_of(source) as two:
            await one.subscribe("t", "rest", 5)
            assert {each.body for each in await take(one, 5)} == {b"%d" % n for n in range(5)}
            await two.subscribe("t", "empty", 10)
            await take(two, 10)
            await in_flight_is(source, "rest", 5)  # five more
            mover = Mover(source, target)
            await mover.drain()
            await mover.begin()
            assert refusal(await mover.next("rest")) == (409, "IN_FLIGHT")
        await in_flight_is(source, "rest", 0)
        counts = await mover.all(max_bytes)
        assert counts == {"all": 10, "rest": 5, "empty": 0, None: 0}
        assert await bodies(target, "t", "all") == [str(n) for n in range(10)]
        assert await bodies(target, "t", "rest") == [str(n) for n in range(5, 10)]
        assert await bodies(target, "t", "empty") == []
        assert await bodies(target, "t", "other") == ["there"]
        for channel in ("all", "rest", "empty"):
            assert await bodies(source, "t", channel) == []


async def test_requeued_messages_are_moved_in_order_with_those_never_delivered(tmp_path: Path) -> None:
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        await create(source, "t", "c")
        await publish(source, "t", *map(str, range(6)))
        async with client_of(source) as client:
            await client.subscribe("t", "c", 3)
            await fail(client, 4)
        await in_flight_is(source, "c", 0)
        mover = Mover(source, target)
        await mover.drain()
        await mover.all()
        assert await bodies(target, "t", "c") == [str(n) for n in range(6)]
        assert {each["attempts"] for each in await waiting(target, "t", "c")} == {0}


async def test_deferred_messages_keep_their_due_time(tmp_path: Path) -> None:
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        await create(source, "t", "c", "d")
        for hours in (3, 1, 2):
            await publish(source, "t", f"{hours}", defer=hours * HOUR_MS)
            await publish(source, "t", f"now {hours}")
        async with client_of(source) as client:
            await client.subscribe("t", "c", 1)
            message = await client.message()
            await client.send(b"REQ %s %d\n" % (message.id, HOUR_MS // 2))
        await in_flight_is(source, "c", 0)
        before = {each["body"]: each["due_ns"] for each in await waiting(source, "t", "c")}
        assert sum(due is not None for due in before.values()) == 4
        mover = Mover(source, target)
        await mover.drain()
        await mover.all()
        after = {each["body"]: each["due_ns"] for each in await waiting(target, "t", "c")}
        # The machine's clock may be corrected by milliseconds meanwhile, and brokers keep due times by it.
        assert after == {
            body: None if due is None else pytest.approx(due, abs=10**9) for body, due in before.items()
        }
        assert len(await waiting(target, "t", "d")) == 6
        assert (await source.channel("t", "c"))["deferred_count"] == 0


async def test_messages_that_no_channel_has_are_moved_to_the_topic(tmp_path: Path) -> None:
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        await publish(source, "t", "1", "2")
        await publish(source, "t", "later", defer=HOUR_MS)
        await publish(source, "t", "3")
        mover = Mover(source, target)
        await mover.drain()
        assert await mover.all() == {None: 4}
        assert await target.depth("t") == 3
        assert (await source.stats(topic="t"))["topics"][0]["depth"] == 0
        await create(source, "t", "c")
        assert await bodies(source, "t", "c") == []
        await create(target, "t", "c", "d")
        assert sorted(await bodies(target, "t", "c")) == ["1", "2", "3", "later"]
        assert await bodies(target, "t", "d") == []


async def test_messages_that_wait_in_a_paused_topic_are_moved_to_all_channels(tmp_path: Path) -> None:
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        await create(source, "t", "c", "d")
        await publish(source, "t", "1")
        await source.post("/topic/pause", topic="t")
        await publish(source, "t", "2", "3")
        await source.post("/channel/pub", b"only c", topic="t", channel="c")
        mover = Mover(source, target)
        await mover.drain()
        assert await mover.all() == {"c": 1, "d": 1, None: 3}
        assert sorted(await bodies(target, "t", "c")) == ["1", "2", "3", "only c"]
        assert sorted(await bodies(target, "t", "d")) == ["1", "2", "3"]
        await source.post("/topic/unpause", topic="t")
        assert await bodies(source, "t", "c") == await bodies(source, "t", "d") == []


async def test_the_target_keeps_apart_what_each_channel_gets(tmp_path: Path) -> None:
    """Also if its topic is paused, after a kill, and after a seek to the beginning."""
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        await create(source, "t", "c", "d")
        await publish(source, "t", "1", "2", "3")
        async with client_of(source) as client:
            await client.subscribe("t", "d", 1)
            await take(client, 2)
            await in_flight_is(source, "d", 1)
        await in_flight_is(source, "d", 0)
        await create(target, "t", "c", "d", "e")
        await publish(target, "t", "before")
        await target.post("/topic/pause", topic="t")
        await publish(target, "t", "after")
        mover = Mover(source, target)
        await mover.drain()
        await mover.all(max_bytes=1)
        async with another(target, tmp_path / "b") as again:
            for api in (target, again):
                await api.post("/topic/unpause", topic="t")
                expected = {
                    "c": ["before", "after", "1", "2", "3"],
                    "d": ["before", "after", "3"],
                    "e": ["before", "after"],
                }
                for channel, texts in expected.items():
                    assert sorted(await bodies(api, "t", channel)) == sorted(texts)
                for channel, texts in expected.items():
                    to_start = {"topic": "t", "channel": channel, "to": "earliest"}
                    assert (await api.client.post("/channel/seek", params=to_start)).status_code == 200
                    async with client_of(api) as client:
                        await client.subscribe("t", channel, 10)
                        found = [each.body.decode() for each in await take(client, len(texts))]
                        assert sorted(found) == sorted(texts)
                        await client.nothing_more()


async def test_dead_letters_keep_their_origins(tmp_path: Path) -> None:
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        await configure(source, "t", "c", max_attempts=1, dead_letter_topic="dead")
        await publish(source, "t", "1", "2", "3")
        async with client_of(source) as client:
            await client.subscribe("t", "c", 1)
            await fail(client, 3)
            await dead_letters_are(source, 3)
        before = await letters(source)
        mover = Mover(source, target, "dead")
        await mover.drain()
        await mover.all(max_bytes=1)
        after = await letters(target)
        assert [(each["body"], each["origin"]) for each in after] == [
            (each["body"], each["origin"]) for each in before
        ]
        assert await letters(source) == []
        # They can be requeued there.
        await create(target, "t", "c")
        answer = await target.client.post("/dead_letters/requeue", params={"topic": "dead"})
        assert answer.json()["requeued"] == 3
        assert sorted(await bodies(target, "t", "c")) == ["1", "2", "3"]


async def test_letters_of_another_broker_finish_nothing_here(tmp_path: Path) -> None:
    """Both brokers of this test have the same node id, so that their message ids are the same."""
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        for api in (source, target):
            await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
            await publish(api, "t", "1", "2")
        async with client_of(source) as client:
            await client.subscribe("t", "c", 1)
            await fail(client, 2)
            await dead_letters_are(source, 2)
        mover = Mover(source, target, "dead")
        await mover.drain()
        await mover.all()
        async with another(target, tmp_path / "b") as again:
            assert await bodies(again, "t", "c") == ["1", "2"]
            assert len(await letters(again)) == 2


async def test_ephemeral_channels_and_topics_stay(tmp_path: Path) -> None:
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        await create(source, "t", "c", "e#ephemeral")
        await publish(source, "t", "1", "2")
        mover = Mover(source, target)
        await mover.drain()
        await mover.begin()
        assert set(mover.producers) == {None, "c"}
        assert refusal(await mover.next("e#ephemeral")) == (409, "EPHEMERAL")
        async with client_of(source) as client:
            await client.subscribe("t", "e#ephemeral", 2)
            assert {each.body for each in await take(client, 2)} == {b"1", b"2"}
        await mover.all()
        await create(source, "m#ephemeral")
        answer = await source.client.post("/topic/move/begin", params={"topic": "m#ephemeral", "to": "x"})
        assert refusal(answer) == (409, "EPHEMERAL")


async def test_expired_messages_are_left_out(tmp_path: Path) -> None:
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        await create(source, "t", "c")
        await publish(source, "t", "old")
        await trio.sleep(0.05)
        await source.send("PUT", "/topic/settings?topic=t", body=b'{"ttl_ms": 20}')
        mover = Mover(source, target)
        await mover.drain()
        await mover.begin()
        batch = await mover.next("c")
        assert batch.headers["NSQ-Move-Messages"] == "0"
        await mover.all()
        assert await bodies(target, "t", "c") == []


# ---------------------------------------------------------------------- consumers and publishers meanwhile


async def test_consumers_get_nothing_during_a_move_and_the_rest_after_a_cancel(tmp_path: Path) -> None:
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        await create(source, "t", "c")
        mover = Mover(source, target)
        await publish(source, "t", *map(str, range(4)))
        await publish(source, "t", "soon", defer=1)
        await mover.drain()
        await mover.begin()
        assert (await source.channel("t", "c"))["paused"] is True
        async with client_of(source) as client:
            await client.subscribe("t", "c", 10)
            batch = await mover.next("c", max_bytes=1)
            assert batch.headers["NSQ-Move-Messages"] == "1"
            await mover.store("c", batch.content)
            moved = int(batch.headers["NSQ-Move-Through"])
            assert (await mover.next("c", moved)).headers["NSQ-Move-Left"] == "4"
            assert (await mover.end())[0] == 409
            await client.send(b"NOP\n")
            assert (await mover.end(cancel=True)) == DONE
            assert {each.body for each in await take(client, 4)} == {b"1", b"2", b"3", b"soon"}
        assert await bodies(target, "t", "c") == ["0"]


async def test_messages_published_after_the_drain_mode_ended_are_not_in_the_move(tmp_path: Path) -> None:
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        await create(source, "t", "c")
        await publish(source, "t", "1")
        mover = Mover(source, target)
        await mover.drain()
        await mover.begin()
        await source.send("PUT", "/config/draining", body=b"false")
        await publish(source, "t", "new")
        assert await bodies(source, "t", "c") == ["1"]
        await mover.all()
        assert await bodies(target, "t", "c") == ["1"]
        assert await bodies(source, "t", "c") == ["new"]


async def test_changes_that_would_lose_or_double_messages_are_refused(tmp_path: Path) -> None:
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        await create(source, "t", "c", "dead-letters")
        await publish(source, "t", "1")
        mover = Mover(source, target)
        await mover.drain()
        await mover.begin()
        changes: list[tuple[str, dict[str, Any]]] = [
            ("/channel/seek", {"channel": "c", "to": "earliest"}),
            ("/channel/unpause", {"channel": "c"}),
            ("/topic/unpause", {}),
            ("/channel/deferred/cancel", {"channel": "c", "id": "0" * 16}),
            ("/dead_letters/drop", {}),
        ]
        for path, query in changes:
            assert refusal(await source.client.post(path, params={"topic": "t", **query})) == (
                409,
                "MOVING",
            ), path
        await source.send("PUT", "/config/draining", body=b"false")
        answer = await source.client.post("/dead_letters/requeue", params={"topic": "t"})
        assert refusal(answer) == (409, "MOVING")
        # What only drops messages is allowed.
        assert await source.post("/channel/empty", topic="t", channel="c") == DONE
        assert await mover.stream("c") == 0


# ---------------------------------------------------------------------- exactly once


async def test_lost_answers_at_every_step_lose_and_double_nothing(tmp_path: Path) -> None:
    """Each batch is stored, then everything is asked again, as by a program that was killed."""
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        await create(source, "t", "c")
        await publish(source, "t", *map(str, range(6)))
        mover = Mover(source, target)
        await mover.drain()
        for _ in range(6):
            await mover.begin()
            moved = await mover.number("c")
            batch = await mover.next("c", moved, 1)
            assert (await mover.store("c", batch.content)).json()["stored"] == 1
            assert (await mover.store("c", batch.content)).json()["stored"] == 0
        await mover.all()
        assert await bodies(target, "t", "c") == [str(n) for n in range(6)]


async def test_a_restart_names_the_move(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        await create(source, "t", "c")
        await publish(source, "t", "1")
        assert "moving_to" not in (await source.stats())["topics"][0]
        mover = Mover(source, target)
        await mover.drain()
        await mover.begin()
        assert (await source.stats())["topics"][0]["moving_to"] == TO
    async with running_api(tmp_path / "a") as again:
        warning = f"TOPIC(t): is being moved to {TO}: its channels deliver nothing until"
        assert any(warning in message for message in caplog.messages)
        assert (await again.stats())["topics"][0]["moving_to"] == TO


@pytest.mark.parametrize("killed", ["source", "target"])
async def test_a_killed_broker_continues(tmp_path: Path, killed: str) -> None:
    async with running_api(tmp_path / "a", checkpoint_interval_ms=HOUR_MS) as source:
        async with running_api(tmp_path / "b", sync="interval", checkpoint_interval_ms=HOUR_MS) as target:
            await create(source, "t", "c", "d")
            await publish(source, "t", *map(str, range(5)))
            await publish(source, "t", "later", defer=HOUR_MS)
            mover = Mover(source, target)
            await mover.drain()
            await mover.begin()
            first = await mover.next("c", max_bytes=1)
            await mover.store("c", first.content)
            second = await mover.next("c", int(first.headers["NSQ-Move-Through"]), 1)
            await mover.store("c", second.content)
            async with another(
                source if killed == "source" else target, tmp_path / ("a" if killed == "source" else "b")
            ) as api:
                if killed == "source":
                    mover.source = api
                    assert (await api.channel("t", "c"))["paused"] is True
                    await mover.drain()
                else:
                    mover.target = api
                counts = await mover.all()
                assert counts == {"c": 4, "d": 6, None: 0}
                for channel in "cd":
                    assert sorted(await bodies(mover.target, "t", channel)) == [*map(str, range(5)), "later"]
                    assert await bodies(mover.source, "t", channel) == []


async def test_the_exhausted_attempts_of_a_moved_message_do_not_make_it_a_dead_letter(tmp_path: Path) -> None:
    async with running_api(tmp_path / "a", checkpoint_interval_ms=HOUR_MS) as source:
        async with running_api(tmp_path / "b") as target:
            await create(source, "t", "c")
            await publish(source, "t", "1")
            async with client_of(source) as client:
                await client.subscribe("t", "c", 1)
                await fail(client, 1)
            await in_flight_is(source, "c", 0)
            mover = Mover(source, target)
            await mover.drain()
            await mover.begin()
            batch = await mover.next("c")
            await mover.store("c", batch.content)
            await configure(source, "t", "c", max_attempts=1, dead_letter_topic="dead")
            async with another(source, tmp_path / "a") as again:
                mover.source = again
                await mover.drain()
                await mover.all()
                assert "dead" not in [each["topic_name"] for each in (await again.stats())["topics"]]
        assert await bodies_of_copy(tmp_path / "b") == ["1"]


async def bodies_of_copy(path: Path) -> list[str]:
    async with running_api(path) as api:
        return await bodies(api, "t", "c")


async def test_a_batch_that_is_stored_in_part_is_refused(tmp_path: Path) -> None:
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        await create(source, "t", "c")
        await publish(source, "t", "1", "2", "3")
        mover = Mover(source, target)
        await mover.drain()
        await mover.begin()
        one, all_of_it = await mover.next("c", max_bytes=1), await mover.next("c")
        await mover.store("c", one.content)
        assert refusal(await mover.store("c", all_of_it.content)) == (409, "OVERLAP")
        await mover.all()
        assert await bodies(target, "t", "c") == ["1", "2", "3"]


async def test_a_batch_that_arrives_after_the_end_of_a_move_is_refused(tmp_path: Path) -> None:
    """Also after a kill of the target."""
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        await create(source, "t", "c", "d")
        await publish(source, "t", "1", "2")
        mover = Mover(source, target)
        await mover.drain()
        await mover.begin()
        one = await mover.next("c", max_bytes=1)
        await mover.store("c", one.content)
        delayed = [(name, (await mover.next(name)).content) for name in ("c", "d")]
        for _ in range(2):
            closed = await mover.store("c", b"", close=True)
            assert closed.json() == {"topic": "t", "stored": 0, "number": 0}
            closed = await mover.store("d", b"", close=True)
            assert closed.json() == {"topic": "t", "stored": 0, "number": None}
        await mover.next("c", 0)
        assert await mover.end(cancel=True) == DONE
        async with another(target, tmp_path / "b") as again:
            for mover.target in (target, again):
                for name, body in delayed:
                    assert refusal(await mover.store(name, body)) == (409, "CLOSED")
                assert await bodies(mover.target, "t", "c") == ["1"]
                assert await bodies(mover.target, "t", "d") == []
        assert await bodies(source, "t", "c") == ["2"]
        assert await bodies(source, "t", "d") == ["1", "2"]


async def test_a_stream_that_cannot_be_closed_durably_stays_open(tmp_path: Path) -> None:
    """Otherwise a restart of the target would open it again, after it had refused messages."""
    files = UnsavedStates()
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b", files=files) as target:
        await create(source, "t", "c")
        await publish(source, "t", "1", "2")
        mover = Mover(source, target)
        await mover.drain()
        await mover.begin()
        files.fails = True
        assert (await mover.store("c", b"", close=True)).status_code == 503
        files.fails = False
        await mover.all()
        assert await bodies(target, "t", "c") == ["1", "2"]


async def test_an_ok_means_synced_whatever_the_sync_mode(tmp_path: Path) -> None:
    files = HeldFiles()
    slow: dict[str, Any] = {
        "checkpoint_interval_ms": HOUR_MS,
        "sync": "interval",
        "sync_timeout_ms": HOUR_MS,
        "sync_every": 1_000_000,
    }
    async with (
        running_api(tmp_path / "a") as source,
        running_api(tmp_path / "b", files=files, **slow) as target,
    ):
        await create(source, "t", "c")
        await publish(source, "t", "1")
        mover = Mover(source, target)
        await mover.drain()
        await mover.begin()
        batch = await mover.next("c")
        await publish(target, "t", "there")  # so that the log has a file
        answers: list[str] = []

        async def ask(body: bytes) -> None:
            answers.append((await mover.store("c", body)).text)

        files.hold("sync")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, batch.content)
            await files.reached()
            assert "1" in await bodies(target, "t", "c")  # stored, not synced
            nursery.start_soon(ask, b"")
            await target.stats()
            assert answers == []
            files.release()
        assert [json.loads(each)["number"] for each in answers] == [0, 0]


async def test_a_topic_that_was_created_again_is_another_stream(tmp_path: Path) -> None:
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        mover = Mover(source, target)
        await mover.drain()
        for body in ("1", "2"):
            await source.send("PUT", "/config/draining", body=b"false")
            await create(source, "t", "c")
            await publish(source, "t", body)
            await mover.drain()
            await mover.all()
            await source.post("/topic/delete", topic="t")
        assert await bodies(target, "t", "c") == ["1", "2"]


# ---------------------------------------------------------------------- refusals


async def test_requests_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    async with (
        running_api(tmp_path / "a") as source,
        running_api(tmp_path / "b", limits=Limits(max_msg_size=4)) as target,
    ):
        await create(source, "t", "c")
        await publish(source, "t", "large")
        begin = {"topic": "t", "to": "x:1"}
        assert refusal(await source.client.post("/topic/move/begin", params=begin)) == (409, "NOT_DRAINING")
        mover = Mover(source, target)
        await mover.drain()
        assert (await source.get("/topic/move", topic="t")).json() == {"topic": "t", "move": None}
        assert await mover.begin() == (await source.get("/topic/move", topic="t")).json()
        assert refusal(await source.client.post("/topic/move/begin", params=begin)) == (409, "MOVING")
        batch = await mover.next("c")
        assert refusal(await mover.store("c", batch.content)) == (413, "MSG_TOO_BIG")
        assert refusal(await mover.store("c", batch.content[:-1])) == (400, "BAD_BODY")
        mover.move, move = "0" * 16, mover.move
        assert refusal(await mover.next("c")) == (409, "NO_SUCH_MOVE")
        assert (await mover.end())[0] == 409
        mover.move = move
        mover.target = source
        assert refusal(await mover.store("c", b"")) == (409, "SAME_BROKER")


def group(first: int, last: int, *bodies: bytes, **more: Any) -> bytes:
    """Return an encoded group."""
    messages = pack_messages(bodies)
    return MovedGroup(first, last, MessageSet(messages.data, messages.sizes), **more).encode()


def dead_letter(topic: Any = "o", channel: Any = "c", **changes: Any) -> dict[str, Any]:
    """Return the origin of one dead letter, with changes."""
    origin = {"id": "0123456789abcdef", "sequence": 1, "attempts": 1, "at": 1, "reason": "requeued"} | changes
    return {"topic": topic, "channel": channel, "messages": [list(origin.values())]}


@pytest.mark.parametrize(
    "body",
    [
        group(5, 9, b"1") + group(9, 9, b"2"),
        group(5, 9, b"1") + group(0, 3, b"2"),
        group(0, 2048, *[b"x"] * 2049),
        group(0, 1, b"x" * 200_000, b"x" * 200_000),
        group(0, 0, b"1", letters=dead_letter("../../etc")),
        group(0, 0, b"1", letters=dead_letter(channel="../c")),
        group(0, 0, b"1", letters=dead_letter("o" * 65)),
        group(0, 0, b"1", letters=dead_letter(id="\ud800123456789abcde")),
        group(0, 0, b"1", letters=dead_letter(sequence="1")),
        group(0, 0, b"1", letters=dead_letter(sequence=2**63)),
        group(0, 0, b"1", letters=dead_letter(attempts=None)),
        group(0, 0, b"1", letters=dead_letter(at=1e308)),
        group(0, 0, b"1", letters=dead_letter() | {"more": "x" * 100_000}),
        group(0, 0, b"1", channel="c").replace(b'"channel"', b'"chancel"'),
    ],
)
async def test_groups_that_no_broker_sends_are_refused(tmp_path: Path, body: bytes) -> None:
    """They could block other clients, store a message twice, or break the lists of dead letters."""
    async with running_api(tmp_path / "b") as target:
        await create(target, "t", "c")
        answer = await target.client.post(
            "/topic/move/store", params={"topic": "t", "producer": "p"}, content=body
        )
        assert refusal(answer) == (400, "BAD_BODY")
        assert await bodies(target, "t", "c") == []


async def test_many_groups_are_stored_in_several_turns(tmp_path: Path) -> None:
    """One write of all blocked every client for seconds."""
    async with running_api(tmp_path / "b") as target:
        await create(target, "t", "c")
        before = await syncs(target)
        body = b"".join(group(n, n, b"%d" % n, due_ns=1) for n in range(2400))
        answer = await target.client.post(
            "/topic/move/store", params={"topic": "t", "producer": "p"}, content=body
        )
        assert answer.json() == {"topic": "t", "stored": 2400, "number": 2399}
        assert await syncs(target) - before >= 5


async def test_a_topic_that_cannot_remember_a_stream_stores_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of producers bounds memory and saved states, as for batches with a number."""
    monkeypatch.setattr(producers, "MAX_PRODUCERS", 3)
    async with running_api(tmp_path / "b") as target:
        await create(target, "t", "c")
        many = b"".join(group(n, n, b"1") for n in range(3))
        at = {"topic": "t", "producer": "first"}
        assert (await target.client.post("/topic/move/store", params=at, content=many)).status_code == 200
        for number in range(2):
            await publish(target, "t", "1", producer=f"p{number}", number=1)
        for close in ("false", "true"):
            unknown = {"topic": "t", "producer": "unknown", "close": close}
            body = many if close == "false" else b""
            answer = await target.client.post("/topic/move/store", params=unknown, content=body)
            assert refusal(answer)[0] == 503
            assert "cannot remember one more" in answer.json()["message"]
        asked = await target.client.post("/topic/move/store", params={"topic": "t", "producer": "unknown"})
        assert asked.json() == {"topic": "t", "stored": 0, "number": None}


async def syncs(api: Api) -> int:
    """Return how many syncs there were."""
    found = re.search(r"^nsq_syncs_total (\d+)", (await api.get("/metrics")).text, re.MULTILINE)
    assert found is not None
    return int(found[1])


async def test_a_batch_for_a_missing_channel_is_refused(tmp_path: Path) -> None:
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        await create(source, "t", "c")
        await publish(source, "t", "1")
        mover = Mover(source, target)
        await mover.drain()
        await mover.begin()
        await target.post("/channel/delete", topic="t", channel="c")
        batch = await mover.next("c")
        assert refusal(await mover.store("c", batch.content)) == (409, "NO_CHANNEL")
        assert (await target.stats(topic="t"))["topics"][0]["message_count"] == 0


async def test_a_draining_broker_is_no_target(tmp_path: Path) -> None:
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        await create(source, "t", "c")
        await publish(source, "t", "1")
        mover = Mover(source, target)
        await mover.drain()
        await mover.begin()
        await target.send("PUT", "/config/draining", body=b"true")
        batch = await mover.next("c")
        assert refusal(await mover.store("c", batch.content)) == (503, "DRAINING")


async def test_a_waiting_dead_letter_delays_the_stream(tmp_path: Path) -> None:
    async with running_api(tmp_path / "a", max_topics=1) as source, running_api(tmp_path / "b") as target:
        await configure(source, "t", "c", max_attempts=1, dead_letter_topic="dead")
        await publish(source, "t", "1", "2")
        async with client_of(source) as client:
            await client.subscribe("t", "c", 1)
            await fail(client, 1)
        await in_flight_is(source, "c", 0)
        mover = Mover(source, target)
        await mover.drain()
        status = await mover.begin()
        (stream,) = [each for each in status["streams"] if each["channel"] == "c"]
        assert (stream["withdrawn"], stream["dead_letter_topic"]) == (2, "dead")
        assert refusal(await mover.next("c")) == (409, "IN_FLIGHT")
