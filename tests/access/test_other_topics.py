"""Endpoints that reach other topics than the one they name: dead letters, and settings that send messages there."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from access.support import (
    ALL_ROLES,
    Answer,
    AuthFile,
    Given,
    authenticated,
    bearer,
    everything,
    http_connected,
)
from broker.letters import fail
from broker.support import PATIENCE_S, connected, running_broker
from trio_nsq.broker import BoundAddresses
from trio_nsq.broker.moved_groups import MovedGroup
from trio_nsq.protocol import pack_messages
from trio_nsq.protocol.limits import Limits


@asynccontextmanager
async def with_letters(folder: Path) -> AsyncIterator[BoundAddresses]:
    """A broker whose topic `dead` has the dead letters of `a/c` and `b/c`."""
    file = AuthFile(folder / "auth.toml")
    file.add_token("all", everything(*ALL_ROLES))
    file.add_token("dead", Given(["manage", "read"], ["dead"]))
    file.add_token("dead-and-a", Given(["manage"], ["dead", "a"]))
    file.add_token("dead-publish-a", Given(["manage"], ["dead"]), Given(["publish"], ["a"]))
    file.add_token("dead-channel", Given(["manage"], ["dead"]), Given(["manage"], ["a"], ["c"]))
    file.add_token("dead-other-channel", Given(["manage"], ["dead"]), Given(["manage"], ["a"], ["else"]))
    async with running_broker(folder / "d", auth_file=file.write()) as bound:
        for topic in ("a", "b"):
            for path in ("/topic/create", "/channel/create"):
                assert (await ask(bound, "POST", f"{path}?topic={topic}&channel=c", "all")).status == 200
            settings = json.dumps({"max_attempts": 1, "dead_letter_topic": "dead"}).encode()
            answer = await ask(bound, "PUT", f"/channel/settings?topic={topic}&channel=c", "all", settings)
            assert answer.status == 200
            async with connected(bound.tcp_address) as client:
                await authenticated(client, "all-secret")
                await client.subscribe(topic, "c", ready_count=1)
                await client.publish(topic, topic.encode())
                await fail(client, 1)
                with trio.fail_after(PATIENCE_S):
                    while await waiting(bound) < (1 if topic == "a" else 2):
                        await trio.lowlevel.checkpoint()
        yield bound


async def ask(bound: BoundAddresses, method: str, target: str, token: str, body: bytes = b"") -> Answer:
    """A request over a connection of its own."""
    assert bound.http_address is not None
    async with http_connected(bound.http_address) as connection:
        return await connection.request(method, target, {"Authorization": bearer(token)}, body)


async def waiting(bound: BoundAddresses) -> int:
    """How many letters wait."""
    answer = await ask(bound, "GET", "/dead_letters?topic=dead", "all")
    return int(json.loads(answer.body)["waiting"]) if answer.status == 200 else 0


async def depth(bound: BoundAddresses, topic: str) -> int:
    """The depth of a topic's channel `c`."""
    stats = json.loads((await ask(bound, "GET", f"/stats?format=json&topic={topic}", "all")).body)
    return int(stats["topics"][0]["channels"][0]["depth"])


FORBIDDEN = "this needs the role publish or manage on topic {}"


async def test_letters_are_requeued_only_to_topics_that_the_client_may_send_to(tmp_path: Path) -> None:
    async with with_letters(tmp_path) as bound:
        for token, to, allowed in (
            ("dead", "channel", []),
            ("dead", "topic", []),
            ("dead-other-channel", "channel", []),
            ("dead-other-channel", "topic", []),
            ("dead-channel", "topic", []),
            ("dead-channel", "channel", ["a"]),
        ):
            got = await ask(bound, "POST", f"/dead_letters/requeue?topic=dead&to={to}", token)
            kept = [
                {"why": FORBIDDEN.format(topic), "count": 1} for topic in ("a", "b") if topic not in allowed
            ]
            assert json.loads(got.body)["requeued"] == len(allowed), (token, to)
            assert json.loads(got.body)["kept"] == kept
            assert await waiting(bound) == 2 - len(allowed)
        assert await depth(bound, "a") == 1
        assert await depth(bound, "b") == 0
        got = await ask(bound, "POST", "/dead_letters/requeue?topic=dead", "all")
        assert json.loads(got.body)["requeued"] == 1
        assert await depth(bound, "b") == 1


async def test_manage_or_publish_on_the_origin_is_enough(tmp_path: Path) -> None:
    for token in ("dead-and-a", "dead-publish-a"):
        folder = tmp_path / token
        folder.mkdir()
        async with with_letters(folder) as bound:
            got = await ask(bound, "POST", "/dead_letters/requeue?topic=dead&to=topic", token)
            assert json.loads(got.body)["requeued"] == 1
            assert await depth(bound, "a") == 1


async def test_dead_letters_go_only_to_topics_that_the_client_may_send_to(tmp_path: Path) -> None:
    async with with_letters(tmp_path) as bound:
        settings = b'{"max_attempts": 1, "dead_letter_topic": "b"}'
        for query in ("", "&dry_run=true"):
            got = await ask(
                bound, "PUT", f"/channel/settings?topic=a&channel=c{query}", "dead-channel", settings
            )
            assert (got.status, got.message) == (403, f"FORBIDDEN: {FORBIDDEN.format('b')}")
        shown = await ask(bound, "GET", "/channel/settings?topic=a&channel=c", "all")
        assert json.loads(shown.body)["dead_letter_topic"] == "dead"


async def test_more_dead_letters_need_read_on_the_topic_that_they_come_from(tmp_path: Path) -> None:
    """Otherwise a client reads messages that it may not read, in a topic of its own."""
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("all", everything(*ALL_ROLES))
    spy = Given(["publish", "read"], ["spybox"]), Given(["manage"], ["a"], ["c"])
    file.add_token("spy", *spy)
    file.add_token("reader", *spy, Given(["read"], ["a"]))
    file.add_token("reader-of-others", *spy, Given(["read", "consume", "publish"], ["b"]))
    needs_read = "FORBIDDEN: dead letters disclose messages, so this needs the role read on topic a"
    target = "/channel/settings?topic=a&channel=c"
    async with running_broker(tmp_path / "d", auth_file=file.write()) as bound:
        for path in ("/topic/create", "/channel/create"):
            await ask(bound, "POST", f"{path}?topic=a&channel=c", "all")

        async def put(token: str, query: str = "", **changes: object) -> tuple[int, str | None]:
            got = await ask(bound, "PUT", target + query, token, json.dumps(changes).encode())
            return got.status, got.message if got.status != 200 else None

        for token in ("spy", "reader-of-others"):
            for query in ("", "&dry_run=true"):
                for attempts in (0, 1):
                    refused = await put(token, query, max_attempts=attempts, dead_letter_topic="spybox")
                    assert refused == (403, needs_read)
        assert await put("spy", max_attempts=7) == (200, None)  # without a dead-letter topic
        assert await put("reader", dead_letter_topic="spybox") == (200, None)
        for attempts, status in ((7, 200), (6, 403), (8, 200), (0, 200), (65535, 403)):
            assert (await put("spy", max_attempts=attempts))[0] == status, attempts
        assert await put("spy", dead_letter_topic="") == (200, None)
        assert await put("spy", dead_letter_topic="spybox") == (403, needs_read)
        assert await put("spy", dead_letter_topic=None, max_attempts=1) == (200, None)


async def test_a_moved_message_is_deferred_beyond_the_limit_only_with_manage(tmp_path: Path) -> None:
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("publisher", Given(["publish"], ["a"]))
    file.add_token("mover", Given(["publish", "manage"], ["a"]))
    limit_ms = 60_000
    options: dict[str, Any] = {"auth_file": file.write(), "limits": Limits(max_defer_ms=limit_ms)}
    async with running_broker(tmp_path / "d", **options) as bound:
        assert (await ask(bound, "POST", "/topic/create?topic=a", "mover")).status == 200
        for number, (token, due_ms, status) in enumerate(
            (
                ("publisher", 0, 200),
                ("publisher", limit_ms - 1, 200),
                ("publisher", 2 * limit_ms, 403),
                ("mover", 2 * limit_ms, 200),
            )
        ):
            due_ns = time.time_ns() + due_ms * 1_000_000 if due_ms else 0
            group = MovedGroup(number, number, pack_messages([b"x"]), due_ns)
            stored = await ask(bound, "POST", "/topic/move/store?topic=a&producer=p", token, group.encode())
            assert stored.status == status, (token, due_ms, stored.message)


async def test_a_grant_that_is_limited_to_a_channel_does_not_manage_the_topic(tmp_path: Path) -> None:
    """Deleting or emptying the topic would affect all its channels."""
    async with with_letters(tmp_path) as bound:
        for target in ("/topic/delete", "/topic/empty", "/topic/pause", "/topic/create"):
            assert (await ask(bound, "POST", f"{target}?topic=a", "dead-channel")).status == 403
        assert (await ask(bound, "PUT", "/topic/settings?topic=a", "dead-channel", b"{}")).status == 403
        for action in ("pause", "unpause", "empty", "delete"):
            assert (
                await ask(bound, "POST", f"/channel/{action}?topic=a&channel=c", "dead-channel")
            ).status == 200


async def test_ephemeral_names_have_patterns_like_others(tmp_path: Path) -> None:
    """`orders` is not `orders#ephemeral`; `orders*` is both."""
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("exact", Given(["publish", "consume"], ["orders"], ["c"]))
    file.add_token("all-orders", Given(["publish", "consume"], ["orders*"], ["c*"]))
    async with running_broker(tmp_path / "d", auth_file=file.write()) as bound:
        for token, topic, channel, allowed in (
            ("exact", "orders", "c", True),
            ("exact", "orders#ephemeral", "c", False),
            ("exact", "orders", "c#ephemeral", False),
            ("all-orders", "orders#ephemeral", "c#ephemeral", True),
        ):
            async with connected(bound.tcp_address) as client:
                await authenticated(client, f"{token}-secret")
                await client.send(f"SUB {topic} {channel}\n".encode())
                frame = await client.frame()
                assert frame is not None
                assert (frame[1] == b"OK") is allowed


async def test_refused_commands_create_nothing(tmp_path: Path) -> None:
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("all", everything(*ALL_ROLES))
    file.add_token("limited", Given(["publish", "consume"], ["mine"], ["c"]))
    async with running_broker(tmp_path / "d", auth_file=file.write()) as bound:
        for command in (b"SUB other c\n", b"SUB mine other\n", b"PUB other\n\0\0\0\x01x"):
            async with connected(bound.tcp_address) as client:
                await authenticated(client, "limited-secret")
                await client.send(command)
                assert (await client.error()).startswith("E_UNAUTHORIZED")
        for target in (
            "/pub?topic=other",
            "/topic/create?topic=mine",
            "/channel/create?topic=mine&channel=c",
        ):
            assert (await ask(bound, "POST", target, "limited", b"x")).status == 403
        stats = json.loads((await ask(bound, "GET", "/stats?format=json", "all")).body)
        assert stats["topics"] == []


async def test_moved_letters_need_the_right_to_send_to_their_origin(tmp_path: Path) -> None:
    async with with_letters(tmp_path) as bound:
        assert (await ask(bound, "PUT", "/config/draining", "all", b"true")).status == 200
        begun = await ask(bound, "POST", "/topic/move/begin?topic=dead&to=x", "dead-and-a")
        assert begun.status == 200
        move = json.loads(begun.body)["move"]
        target = f"/topic/move/next?topic=dead&channel=dead-letters&move={move}&max_bytes=1"
        refused = await ask(bound, "POST", target, "dead-and-a")
        assert (refused.status, json.loads(refused.body)["message"]) == (
            403, "FORBIDDEN: this needs the role read on topic dead",
        )  # fmt: skip
        batch = await ask(bound, "POST", target, "dead")
        assert batch.status == 200
        (tmp_path / "other").mkdir()
        file = AuthFile(tmp_path / "other" / "auth.toml")
        file.add_token("all", everything(*ALL_ROLES))
        file.add_token("dead", Given(["publish"], ["dead"]))
        file.add_token("dead-and-a", Given(["publish"], ["dead", "a"]))
        async with running_broker(tmp_path / "other" / "d", auth_file=file.write()) as other:
            for path in ("/topic/create", "/channel/create"):
                await ask(other, "POST", f"{path}?topic=dead&channel=dead-letters", "all")
            store = "/topic/move/store?topic=dead&producer=p"
            refused = await ask(other, "POST", store, "dead", batch.body)
            assert (refused.status, json.loads(refused.body)["message"]) == (
                403, f"FORBIDDEN: {FORBIDDEN.format('a')}",
            )  # fmt: skip
            stored = await ask(other, "POST", store, "dead-and-a", batch.body)
            assert json.loads(stored.body)["stored"] == 1
