"""Tests for the drain mode: publishes are refused, everything else goes on."""

import json
import logging
from pathlib import Path
from struct import pack
from typing import Any

import pytest
import trio

from broker.api import OK, Api, running_api
from broker.headers import hpub
from broker.letters import client_of, configure, fail, take
from broker.support import (
    BOTH_SYNCS,
    PATIENCE_S,
    HeldFiles,
    dpub,
    identify,
    mpub,
    pub,
)
from client.support.tokens import SECRETS, AuthFile

TEXT = "DRAINING: this broker accepts no publishes; publish to another broker"
REFUSED = (503, TEXT)
PUBLISHES = {
    "PUB": pub("t", b"x"),
    "MPUB": mpub("t", b"x", b"y"),
    "DPUB": dpub("t", 10, b"x"),
    "HPUB": hpub("t", (b"x", {"a": "1"})),
}


async def drain(api: Api, value: bytes = b"true") -> None:
    answer = await api.send("PUT", "/config/draining", body=value)
    assert (answer.status_code, answer.content) == (200, value)


async def stored(api: Api) -> dict[str, int]:
    """Return how many messages each topic has got."""
    return {topic["topic_name"]: topic["message_count"] for topic in (await api.stats())["topics"]}


# ---------------------------------------------------------------------- refusals


@BOTH_SYNCS
@pytest.mark.parametrize("verb", PUBLISHES)
async def test_refused_publish_ends_the_connection_as_in_nsqd(tmp_path: Path, sync: str, verb: str) -> None:
    async with running_api(tmp_path / "d", sync=sync) as api:
        await api.tcp.publish("t", b"first")
        await drain(api)
        await api.tcp.send(PUBLISHES[verb])
        assert await api.tcp.error() == f"E_{verb}_FAILED {verb} failed {TEXT}"
        assert await api.tcp.frame() is None
        assert await stored(api) == {"t": 1}


@pytest.mark.parametrize("verb", PUBLISHES)
async def test_clients_that_survive_refusals_stay_connected(tmp_path: Path, verb: str) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.send(identify(survive_refusals=True))
        await api.tcp.ok()
        await api.tcp.publish("t", b"first")
        await drain(api)
        await api.tcp.send(PUBLISHES[verb] * 2)
        for _ in range(2):
            assert await api.tcp.error() == f"E_{verb}_FAILED {verb} failed {TEXT}"
        await drain(api, b"false")
        await api.tcp.publish("t", b"last")
        assert await stored(api) == {"t": 2}


async def test_http_publishes_are_refused(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        assert await api.post("/pub", b"x", topic="t") == OK
        await api.post("/channel/create", topic="t", channel="c")
        assert await api.post("/mpub", b"x\ny", topic="t", producer="p", number=1) == OK
        before = await stored(api)
        await drain(api)
        assert await api.post("/pub", b"x", topic="t") == REFUSED
        assert await api.post("/pub", b"x", topic="t", defer=1) == REFUSED
        assert await api.post("/mpub", b"x\ny", topic="t") == REFUSED
        assert await api.post("/mpub", b"x\n" * 100_000, topic="t") == REFUSED
        binary = pack(">iis", 1, 1, b"x")
        assert await api.post("/mpub", binary, topic="t", binary="true") == REFUSED
        assert await api.post("/channel/pub", b"x", topic="t", channel="c") == REFUSED
        assert await api.post("/mpub", b"x", topic="t", producer="p", number=2) == REFUSED
        # A repetition of a batch that is stored: the producer must not send it to another broker.
        assert await api.post("/mpub", b"x\ny", topic="t", producer="p", number=1) == OK
        assert await stored(api) == before


@pytest.mark.parametrize("topic", ["new", "new#ephemeral"])
async def test_refused_publish_creates_no_topic(tmp_path: Path, topic: str) -> None:
    async with running_api(tmp_path / "d") as api:
        await drain(api)
        assert await api.post("/pub", b"x", topic=topic) == REFUSED
        assert await api.post("/mpub", b"x", topic=topic, producer="p", number=1) == REFUSED
        await api.tcp.send(pub(topic, b"x"))
        assert await api.tcp.error() == f"E_PUB_FAILED PUB failed {TEXT}"
        assert await stored(api) == {}
        assert not [path for path in (tmp_path / "d").iterdir() if "new" in path.name]


async def test_dead_letters_are_moved_and_not_requeued(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        await api.tcp.publish("t", b"1", b"2")
        await drain(api)
        async with client_of(api) as reader, client_of(api) as consumer:
            await reader.subscribe("dead", "copy#ephemeral", 100)
            await consumer.subscribe("t", "c", 1)
            await fail(consumer, 2)
            assert {message.body for message in await take(reader, 2)} == {b"1", b"2"}
        for to in ("channel", "topic"):
            assert await api.post("/dead_letters/requeue", topic="dead", to=to) == REFUSED
        letters = (await api.get("/dead_letters")).json()
        assert letters == {"topics": [{"topic": "dead", "waiting": 2, "in_flight": 0}]}
        await drain(api, b"false")
        answer = await api.send("POST", "/dead_letters/requeue?topic=dead&to=topic")
        assert answer.json()["requeued"] == 2


async def test_consumers_and_administration_go_on(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        for channel in ("c", "idle"):
            await api.post("/channel/create", topic="t", channel=channel)
        await api.tcp.publish("t", b"1", b"2", b"3")
        await drain(api)
        await api.tcp.subscribe("t", "c", 1)
        message = await api.tcp.message()
        await api.tcp.send(b"TOUCH %s\nREQ %s 0\n" % (message.id, message.id))
        assert len(await take(api.tcp, 3)) == 3
        for path in (
            "/topic/create?topic=other",
            "/channel/create?topic=other&channel=c",
            "/channel/pause?topic=other&channel=c",
            "/channel/empty?topic=t&channel=idle",
            "/topic/delete?topic=other",
        ):
            assert (await api.send("POST", path)).status_code == 200, path
        assert (await api.get("/topic/read", topic="t")).status_code == 200
        assert (await api.get("/ping")).text == "OK"
        with trio.fail_after(PATIENCE_S):
            while (found := await api.channel("t", "c"))["depth"] or found["in_flight_count"]:
                pass
        assert (await api.channel("t", "idle"))["depth"] == 0


# ---------------------------------------------------------------------- the switch


async def test_mode_is_shown(tmp_path: Path) -> None:
    async def shown(api: Api) -> tuple[Any, ...]:
        metrics = (await api.get("/metrics")).text.splitlines()
        return (
            (await api.get("/config/draining")).text,
            (await api.stats()).get("draining"),
            (await api.get("/info")).json().get("draining"),
            "Draining: the broker refuses publishes" in (await api.get("/stats")).text,
            [line for line in metrics if line.startswith("nsq_draining")],
        )

    off = ("false", None, None, False, ["nsq_draining 0.0"])
    async with running_api(tmp_path / "d") as api:
        assert await shown(api) == off
        await drain(api)
        assert await shown(api) == ("true", True, True, True, ["nsq_draining 1.0"])
        await drain(api, b"false")
        assert await shown(api) == off
        await drain(api)
    async with running_api(tmp_path / "d") as api:  # a restart ends it
        assert await shown(api) == off
        assert await api.post("/pub", b"x", topic="t") == OK


async def test_changes_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trio_nsq.broker")
    async with running_api(tmp_path / "d") as api:
        for value in (b"true", b"true", b"false", b"false"):
            await drain(api, value)
        assert [text for text in caplog.messages if text.startswith("DRAIN")] == [
            "DRAIN: the broker refuses publishes from now on",
            "DRAIN: ended, the broker accepts publishes again",
        ]


async def test_mode_needs_the_role_admin_on_all_topics(tmp_path: Path) -> None:
    path, file = tmp_path / "audit", AuthFile(tmp_path)
    async with running_api(tmp_path / "d", auth_file=file.path, audit_log=str(path)) as api:

        async def ask(method: str, target: str, role: str, body: bytes = b"") -> int:
            headers = {"Authorization": f"Bearer {SECRETS[role]}"}
            return (await api.send(method, target, headers, body)).status_code

        assert (await api.send("PUT", "/config/draining", body=b"true")).status_code == 401
        for role in SECRETS.keys() - {"all", "admin"}:
            assert await ask("PUT", "/config/draining", role, b"true") == 403, role
            assert await ask("GET", "/config/draining", role) == 403, role
        assert await ask("PUT", "/config/draining", "admin", b"true") == 200
        assert await ask("POST", "/pub?topic=t", "publish", b"x") == 503
        assert await ask("POST", "/pub?topic=t", "consume", b"x") == 403
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (done,) = [line for line in lines if line["event"] == "action"]
    assert (done["name"], done["action"], done["status"]) == ("admin", "PUT /config/draining", 200)


@pytest.mark.parametrize("value", [b"1", b"True", b"yes", b'"true"', b"true\n", b"null"])
async def test_invalid_values_change_nothing(tmp_path: Path, value: bytes) -> None:
    async with running_api(tmp_path / "d") as api:
        answer = await api.send("PUT", "/config/draining", body=value)
        assert answer.status_code == 400
        assert answer.json() == {"message": "INVALID_VALUE: the body must be true or false"}
        assert (await api.get("/config/draining")).text == "false"


async def test_answer_waits_for_accepted_publishes(tmp_path: Path) -> None:
    """A client that counts messages after the answer counts all of them."""
    files, answered = HeldFiles(), trio.Event()

    async def begin() -> None:
        await drain(api)
        answered.set()

    async with running_api(tmp_path / "d", files=files) as api, trio.open_nursery() as nursery:
        await api.tcp.publish("t", b"first")
        files.hold("sync")
        await api.tcp.send(pub("t", b"accepted"))
        await files.reached()
        nursery.start_soon(begin)
        async with client_of(api) as other:
            while (await api.get("/config/draining")).text != "true":
                pass
            await other.send(pub("t", b"late"))
            assert await other.error() == f"E_PUB_FAILED PUB failed {TEXT}"
        assert not answered.is_set()
        files.release()
        await api.tcp.ok()
        with trio.fail_after(PATIENCE_S):
            await answered.wait()
        assert await stored(api) == {"t": 2}


@BOTH_SYNCS
async def test_no_publish_is_accepted_after_the_answer(tmp_path: Path, sync: str) -> None:
    """Under load: what was stored at the answer is exactly what got an OK, then and later."""
    confirmed = 0
    first = trio.Event()

    async def publish_tcp(api: Api, number: int) -> None:
        nonlocal confirmed
        async with client_of(api) as client:
            while True:
                await client.send(b"".join(pub(f"t{number % 3}", b"x") for _ in range(20)))
                for _ in range(20):
                    frame = await client.frame()
                    if frame is None or frame[0] == 1:
                        return
                    confirmed += 1

    async def publish_http(api: Api, number: int) -> None:
        nonlocal confirmed
        while (answer := await api.post("/pub", b"x", topic=f"t{number % 3}")) == OK:
            confirmed += 1
            first.set()
        assert answer == REFUSED

    async with running_api(tmp_path / "d", sync=sync) as api:
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(publish_tcp, api, number)
                nursery.start_soon(publish_http, api, number)
            await first.wait()
            await drain(api)
            at_answer = await stored(api)
            assert await api.post("/pub", b"x", topic="t0") == REFUSED
        assert await stored(api) == at_answer
        assert sum(at_answer.values()) == confirmed


async def test_stats_count_deferred_messages_that_wait_for_a_channel(tmp_path: Path) -> None:
    """Without a channel, `depth` counts the ready messages and `deferred_count` the deferred ones."""
    for name in ("t", "t#ephemeral"):
        async with running_api(tmp_path / name) as api:
            await api.tcp.publish(name, b"1", b"2")
            await api.tcp.send(dpub(name, 3_600_000, b"later") * 3)
            for _ in range(3):
                await api.tcp.ok()
            (topic,) = (await api.stats())["topics"]
            assert (topic["depth"], topic["deferred_count"]) == (2, 3)
            metrics = (await api.get("/metrics")).text
            assert f'nsq_topic_deferred{{topic="{name}"}} 3.0' in metrics
            await api.post("/channel/create", topic=name, channel="c")
            (topic,) = (await api.stats())["topics"]
            assert (topic["depth"], topic.get("deferred_count")) == (0, None)
            assert (await api.channel(name, "c"))["deferred_count"] == 3
