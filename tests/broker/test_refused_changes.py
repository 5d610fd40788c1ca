"""Tests that a channel is saved before it is used, and that a refused request has changed nothing."""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from broker.api import DONE, OK, Api, running_api
from broker.letters import another
from broker.support import (
    FailingFiles,
    HeldFiles,
    RawClient,
    UnsavedStates,
    connected,
    dpub,
    mpub,
    settle,
    threads_done,
)
from trio_nsq.broker.state.settings import TopicSettings

NO_SCHEDULE = {"checkpoint_interval_ms": 3_600_000}


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


def address(api: Api) -> str:
    """Return the broker's TCP address."""
    host, port = api.tcp.stream.socket.getpeername()
    return f"{host}:{port}"


async def test_every_client_of_a_new_channel_waits_until_it_is_saved(tmp_path: Path) -> None:
    files = HeldFiles()
    async with running_api(tmp_path / "d", files=files, **NO_SCHEDULE) as api:
        await api.tcp.publish("t", b"makes the topic")
        files.hold("replace")
        await api.tcp.send(b"SUB t c\n")
        await files.reached()
        state = tmp_path / "d" / "topics" / "t.topic" / "state.json"
        async with connected(address(api)) as other, trio.open_nursery() as nursery:
            answers: list[str] = []

            async def answered(client: RawClient) -> None:
                await client.ok()
                answers.append("OK")
                assert b'"name":"c"' in state.read_bytes()

            async def create() -> None:
                assert await api.post("/channel/create", topic="t", channel="c") == DONE
                answers.append("created")
                assert b'"name":"c"' in state.read_bytes()

            await other.send(b"SUB t c\n")
            nursery.start_soon(answered, api.tcp)
            nursery.start_soon(answered, other)
            nursery.start_soon(create)
            await settle()
            assert answers == []
            files.release()
        assert sorted(answers) == ["OK", "OK", "created"]


async def everything(api: Api) -> object:
    """Return /stats and the settings, without clients, and without metrics of the process and times."""
    stats = await api.stats(include_clients=False, include_mem=False)
    topics = [topic for topic in stats["topics"] if topic["topic_name"] != "marker"]
    for topic in topics:
        topic["settings"] = (await api.get("/topic/settings", topic=topic["topic_name"])).json()
        for channel in topic["channels"]:
            del channel["oldest_message_age_ms"]
            query = {"topic": topic["topic_name"], "channel": channel["channel_name"]}
            channel["settings"] = (await api.get("/channel/settings", **query)).json()
    return topics


CHANGES = [
    ("POST", "/topic/pause?topic=t", b""),
    ("POST", "/topic/unpause?topic=paused", b""),
    ("POST", "/topic/empty?topic=paused", b""),
    ("POST", "/topic/create?topic=new", b""),
    ("POST", "/channel/create?topic=t&channel=new", b""),
    ("POST", "/channel/create?topic=backlog&channel=new", b""),
    ("POST", "/channel/pause?topic=t&channel=c", b""),
    ("POST", "/channel/unpause?topic=t&channel=paused", b""),
    ("POST", "/channel/empty?topic=t&channel=c", b""),
    ("POST", "/channel/delete?topic=t&channel=c", b""),
    ("POST", "/channel/seek?topic=t&channel=c&to=latest", b""),
    ("POST", "/channel/seek?topic=t&channel=done&to=earliest", b""),
    ("PUT", "/topic/settings?topic=t", b'{"ttl_ms": 1}'),
    ("PUT", "/channel/settings?topic=t&channel=c", b'{"max_attempts": 1}'),
]


@pytest.mark.parametrize(("method", "target", "body"), CHANGES, ids=[target for _, target, _ in CHANGES])
async def test_change_that_cannot_be_saved_is_not_made(
    tmp_path: Path, method: str, target: str, body: bytes
) -> None:
    files = UnsavedStates()
    async with running_api(tmp_path / "d", files=files, **NO_SCHEDULE) as api:
        for topic in ("t", "paused", "backlog"):
            await api.tcp.publish(topic, b"1", b"2")
        for channel in ("c", "paused"):
            await api.post("/channel/create", topic="t", channel=channel)
        await api.post("/channel/create", topic="paused", channel="c")
        await api.post("/channel/create", topic="t", channel="done")
        await api.post("/channel/empty", topic="t", channel="done")
        await api.post("/channel/pause", topic="t", channel="paused")
        await api.post("/topic/pause", topic="paused")
        await api.tcp.publish("paused", b"3")
        await api.tcp.subscribe("t", "c")
        before = await everything(api)
        files.fails = True
        refused = await api.send(method, target, body=body)
        assert (refused.status_code, "Input/output error" in refused.text) == (503, True)
        assert await everything(api) == before
        await api.tcp.nothing_more()  # and it is still connected
        async with connected(address(api)) as client:
            await client.send(b"SUB backlog new\n")
            assert (await client.error()).startswith("E_SUB_FAILED SUB failed cannot save the state of topic")
        assert await everything(api) == before
        files.fails = False
        done = await api.send(method, target, body=body)
        assert done.status_code == 200, done.text
        assert await everything(api) != before
        # The first channel of a topic still gets all waiting messages.
        async with connected(address(api)) as client:
            await client.subscribe("backlog", "new", ready_count=5)
            assert [(await client.message()).body for _ in range(2)] == [b"1", b"2"]


async def test_refused_topic_does_not_exist_after_a_restart(tmp_path: Path) -> None:
    files = UnsavedStates()
    async with running_api(tmp_path / "d", files=files, **NO_SCHEDULE) as api:
        files.fails = True
        assert (await api.post("/topic/create", topic="new"))[0] == 503
        async with connected(address(api)) as client:
            await client.send(b"SUB new c\n")
            assert (await client.error()).startswith("E_SUB_FAILED")
        files.fails = False
    async with running_api(tmp_path / "d") as api:
        assert (await api.stats())["topics"] == []


async def test_deferred_messages_that_cannot_be_cancelled_keep_waiting(tmp_path: Path) -> None:
    files = UnsavedStates()
    async with running_api(tmp_path / "d", files=files, **NO_SCHEDULE) as api:
        await api.tcp.send(dpub("t", 3_600_000, b"later"))
        await api.tcp.ok()
        await api.post("/channel/create", topic="t", channel="c")
        line = (await api.get("/channel/deferred", topic="t", channel="c")).json()
        files.fails = True
        answer = await api.post("/channel/deferred/cancel", topic="t", channel="c", id=line["id"])
        assert answer[0] == 503
        assert (await api.get("/channel/deferred", topic="t", channel="c")).json() == line
        files.fails = False
        await api.send("POST", f"/channel/deferred/cancel?topic=t&channel=c&id={line['id']}")
        assert (await api.channel("t", "c"))["deferred_count"] == 0


async def test_dead_letters_that_cannot_be_dropped_stay(tmp_path: Path) -> None:
    files = UnsavedStates()
    async with running_api(tmp_path / "d", files=files, **NO_SCHEDULE) as api:
        await api.tcp.publish("dead", b"1", b"2")
        await api.post("/channel/create", topic="dead", channel="dead-letters")
        files.fails = True
        assert (await api.post("/dead_letters/drop", topic="dead"))[0] == 503
        await api.tcp.subscribe("dead", "dead-letters", ready_count=5)
        assert [(await api.tcp.message()).body for _ in range(2)] == [b"1", b"2"]


class HeldUnsavedStates(HeldFiles, UnsavedStates):
    """Saves of states wait, and then fail."""


async def test_dead_letters_that_cannot_be_dropped_go_to_a_waiting_consumer(tmp_path: Path) -> None:
    files = HeldUnsavedStates()
    async with running_api(tmp_path / "d", files=files, **NO_SCHEDULE) as api:
        await api.tcp.publish("dead", b"1", b"2")
        await api.tcp.subscribe("dead", "dead-letters")
        files.hold("replace")
        files.fails = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(api.post, "/dead_letters/drop", topic="dead"))
            await files.reached()
            await api.tcp.send(b"RDY 5\n")
            await settle()  # nothing is delivered: they are withdrawn
            files.release()
        assert (await api.channel("dead", "dead-letters"))["in_flight_count"] == 2, (
            "not with the next heartbeat"
        )
        assert [(await api.tcp.message()).body for _ in range(2)] == [b"1", b"2"]


async def test_message_that_becomes_due_during_its_cancellation_survives_a_kill(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    """The saved state lacks it, and it is kept."""
    files = HeldFiles()
    async with running_api(tmp_path / "d", files=files, **NO_SCHEDULE) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await api.tcp.send(dpub("t", 1000, b"due meanwhile") + dpub("t", 9000, b"cancelled"))
        await api.tcp.ok()
        await api.tcp.ok()
        lines = (await api.get("/channel/deferred", topic="t", channel="c")).text.splitlines()
        due, cancelled = (json.loads(line)["id"] for line in lines)
        files.hold("replace")
        answers: list[object] = []

        async def cancel() -> None:
            answer = await api.send(
                "POST", f"/channel/deferred/cancel?topic=t&channel=c&id={due},{cancelled}"
            )
            answers.append(answer.json())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel)
            await files.reached()
            clock.jump(1)
            await settle()
            files.release()
        assert answers == [{"cancelled": [cancelled], "not_deferred": [due]}]
        async with another(api, tmp_path / "d") as after:
            await after.tcp.subscribe("t", "c", ready_count=5)
            assert (await after.tcp.message()).body == b"due meanwhile"
            assert (await after.channel("t", "c"))["deferred_count"] == 0


async def test_refused_publish_leaves_no_topic(tmp_path: Path) -> None:
    files = FailingFiles()
    async with running_api(tmp_path / "d", files=files, **NO_SCHEDULE) as api:
        files.full_after = 0
        assert (await api.post("/pub", b"x", topic="new"))[0] == 503
        async with connected(address(api)) as client:
            await client.send(mpub("newer", b"x"))
            assert (await client.error()).startswith("E_MPUB_FAILED")
        await threads_done()
        assert (await api.stats())["topics"] == []
        files.full_after = None
        await api.tcp.publish("new", b"x")
    async with running_api(tmp_path / "d") as api:
        assert [topic["topic_name"] for topic in (await api.stats())["topics"]] == ["new"]


class HeldFullFiles(HeldFiles, FailingFiles):
    """A disk that can be full, and whose operations can be held."""

    def __init__(self) -> None:
        HeldFiles.__init__(self)
        FailingFiles.__init__(self)


@pytest.mark.parametrize("is_full", [True, False])
async def test_requests_during_the_removal_of_a_refused_topic_wait(tmp_path: Path, is_full: bool) -> None:
    """They get the disk's error, or succeed, but never an error that the broker is exiting."""
    files = HeldFullFiles()
    async with (
        running_api(tmp_path / "d", files=files, **NO_SCHEDULE) as api,
        connected(address(api)) as publisher,
        connected(address(api)) as consumer,
    ):
        files.full_after = 0
        files.hold("rename")
        answers: dict[str, tuple[int, bytes]] = {}

        async def publish(name: str) -> None:
            answer = await api.send("POST", "/pub?topic=new", body=b"x")
            answers[name] = answer.status_code, answer.content

        async with trio.open_nursery() as nursery:
            nursery.start_soon(publish, "first")
            await files.reached()
            nursery.start_soon(publish, "second")
            await publisher.send(mpub("new", b"x"))
            await consumer.send(b"SUB new c\n")
            await settle()
            assert "second" not in answers
            files.full_after = 0 if is_full else None
            files.release()
        first = answers["first"]
        assert first[0] == 503
        assert b"No space left on device" in first[1]
        frames = [await publisher.frame(), await consumer.frame()]
        if is_full:
            # With another text, if another waiting request failed on the full disk before it.
            assert answers["second"][0] == 503
            assert b"No space left on device" in answers["second"][1]
            for frame in frames:
                assert frame is not None
                assert (frame[0], b"No space left on device" in frame[1]) == (1, True)
        else:
            assert (answers["second"], frames) == ((200, b"OK"), [(0, b"OK"), (0, b"OK")])
            await consumer.send(b"RDY 5\n")
            assert [(await consumer.message()).body for _ in range(2)] == [b"x", b"x"]


@pytest.mark.parametrize("client", ["TCP", "HTTP"])
async def test_publish_refused_for_another_reason_leaves_no_topic(tmp_path: Path, client: str) -> None:
    async with running_api(
        tmp_path / "d", topic_defaults=TopicSettings(max_messages=1), **NO_SCHEDULE
    ) as api:
        if client == "HTTP":
            assert (await api.post("/mpub", b"x\ny", topic="new"))[0] == 503
        else:
            await api.tcp.send(mpub("new", b"x", b"y"))
            assert (await api.tcp.error()).startswith("E_TOPIC_FULL MPUB failed")
        await threads_done()
        assert (await api.stats())["topics"] == []


async def test_forgotten_producer_stays_forgotten(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", **NO_SCHEDULE) as api:
        assert await api.post("/mpub", b"a\nb", topic="t", producer="p", number=9) == OK
        assert await api.post("/topic/producer/forget", topic="t", producer="p") == DONE
        shutil.copytree(tmp_path / "d", tmp_path / "killed")
    async with running_api(tmp_path / "killed") as api:
        assert (await api.get("/topic/producer", topic="t", producer="p")).json()["number"] is None
        answer = await api.send("POST", "/mpub?topic=t&producer=p&number=1", body=b"c")
        assert answer.headers["NSQ-Batch"] == "published"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("broker.json", "pipe"), ("topics/t.topic/state.json", "pipe"), ("topics/t.topic/state.json", "folder")],
)
async def test_special_file_counts_as_damage(tmp_path: Path, name: str, kind: str) -> None:
    """The second copy is used."""
    async with running_api(tmp_path / "d") as api:
        await api.tcp.publish("t", b"x")
        await api.post("/channel/create", topic="t", channel="c")
        await api.post("/topic/create", topic="other")
    path = tmp_path / "d" / name
    path.unlink()
    if kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    async with running_api(tmp_path / "d") as api:
        assert {topic["topic_name"] for topic in (await api.stats())["topics"]} == {"t", "other"}
        await api.tcp.publish("other", b"y")
        await api.tcp.subscribe("t", "c", ready_count=1)
        assert (await api.tcp.message()).body == b"x"
