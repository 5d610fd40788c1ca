"""Tests that a few unfinished messages do not keep gigabytes of log, and are delivered nevertheless."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import trio.testing

from broker.api import Api, running_api
from broker.retention import FAST, fill, segments
from broker.support import RawClient, connected, dpub, identify, until
from trio_nsq.broker.storage import retention
from trio_nsq.broker.storage.verify import verify_topic
from trio_nsq.log.disk.carried_forward import FILE_NAME


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real limits divided by a thousand."""
    monkeypatch.setattr(retention, "PINNED_BYTES", 20_000)
    monkeypatch.setattr(retention, "CARRIED_MESSAGES_SHARE", 0.1)
    monkeypatch.setattr(retention, "RETRY_NS", 20_000_000)


def body(number: int) -> bytes:
    return b"%03d" % number * 300


def carried(data_path: Path) -> Path:
    return data_path / "topics" / "t.topic" / FILE_NAME


async def finish_all_but(client: RawClient, count: int, kept: set[int]) -> list[bytes]:
    """Receive this many messages and finish them, except some; return the ids of those."""
    ids = []
    for number in range(count):
        message = await client.message()
        assert message.body == body(number)
        if number in kept:
            ids.append(message.id)
        else:
            await client.send(b"FIN %s\n" % message.id)
    return ids


async def ready_client(client: RawClient) -> None:
    await client.send(identify(output_buffer_size=-1, heartbeat_interval=60_000))
    await client.ok()
    await client.subscribe("t", "c", 100)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("what", ["in flight", "requeued for later"])
async def test_unfinished_messages_outlive_their_files(
    tmp_path: Path, mock_clock: trio.testing.MockClock, restart: bool, what: str
) -> None:
    # It also jumps: a busy machine must not reach the time for which messages are requeued.
    mock_clock.rate = 1
    delay_s = 0 if what == "in flight" else 25
    data_path = tmp_path / "d"
    async with running_api(data_path, **FAST) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await fill(api, 60)
        async with connected("%s:%d" % api.tcp.stream.socket.getpeername()) as client:
            await ready_client(client)
            ids = await finish_all_but(client, 60, {0, 7})
            for message_id in ids if delay_s else ():
                await client.send(b"REQ %s %d\n" % (message_id, delay_s * 1000))
            await until(lambda: segments(data_path)[0] > 20)
            assert carried(data_path).exists()
            assert not verify_topic(carried(data_path).parent).damaged
            if not restart:
                await check_peek(api, what)
                await client.send(b"CLS\n")
                await client.stream.aclose()
                await take_the_rest(api, data_path, {body(0), body(7)}, partial(mock_clock.jump, delay_s))
                return
    async with running_api(data_path, **FAST) as api:
        await take_the_rest(api, data_path, {body(0), body(7)}, partial(mock_clock.jump, delay_s))


async def check_peek(api: Api, what: str) -> None:
    figures = (await api.get("/metrics")).text
    assert "nsq_channel_oldest_message_age_seconds{" in figures
    if what != "in flight":
        lines = (await api.get("/channel/peek", topic="t", channel="c", state="deferred")).text.splitlines()
        assert [json.loads(line)["sequence"] for line in lines] == [0, 7]
        assert all("body" in line for line in lines)


async def take_the_rest(
    api: Api, data_path: Path, bodies: set[bytes], until_due: Callable[[], object]
) -> None:
    await ready_client(api.tcp)
    until_due()
    while bodies:
        message = await api.tcp.message()
        assert message.attempts == 2
        bodies.remove(message.body)
        assert carried(data_path).exists()
        await api.tcp.send(b"FIN %s\n" % message.id)
    await until(lambda: not carried(data_path).exists())


async def test_message_deferred_by_its_publisher_is_carried_forward_repeatedly(tmp_path: Path) -> None:
    data_path = tmp_path / "d"
    async with running_api(data_path, **FAST | {"checkpoint_interval_ms": 10**9}) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await api.tcp.send(dpub("t", 3_000_000, b"later"))
        await api.tcp.ok()
        async with connected("%s:%d" % api.tcp.stream.socket.getpeername()) as client:
            await ready_client(client)
            for end in (50, 100, 150):
                await fill(api, 50)
                await finish_all_but(client, 50, set())
                await client.nothing_more()
                await api.send("PUT", "/topic/settings?topic=t", body=b"{}")  # saves it
                assert segments(data_path)[0] > end - 30
                assert not verify_topic(carried(data_path).parent).damaged
        assert (await api.channel("t", "c"))["deferred_count"] == 1
    assert carried(data_path).stat().st_size < 200
    assert not verify_topic(carried(data_path).parent).damaged
    async with running_api(data_path, **FAST) as api:
        (line,) = (await api.get("/channel/peek", topic="t", channel="c", state="deferred")).text.splitlines()
        assert json.loads(line)["body"] == "later"


@pytest.mark.parametrize("past_them", [False, True])
async def test_seek_survives_a_kill(tmp_path: Path, past_them: bool) -> None:
    """One is in flight and one deferred; a seek to the beginning of the log keeps both, one past it skips
    them.
    """
    data_path, killed = tmp_path / "d", tmp_path / "killed"
    async with running_api(data_path, **FAST | {"checkpoint_interval_ms": 10**9}) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await api.post("/channel/create", topic="t", channel="other")
        await fill(api, 60)
        await api.post("/channel/empty", topic="t", channel="other")
        async with connected("%s:%d" % api.tcp.stream.socket.getpeername()) as client:
            await ready_client(client)
            _, deferred = await finish_all_but(client, 60, {0, 7})
            await client.send(b"REQ %s 3000000\nRDY 0\n" % deferred)
            await client.nothing_more()
            keep = b'{"retention_bytes": 12000}'
            assert (await api.send("PUT", "/topic/settings?topic=t", body=keep)).status_code == 200
            first = segments(data_path)[0]
            assert first == 48
            assert carried(data_path).exists()
            to = first + 5 if past_them else first
            query = f"topic=t&channel=c&to={to if past_them else 'earliest'}"
            answer = await api.send("POST", f"/channel/seek?{query}")
            moved = answer.json()
            assert (moved["to_sequence"], moved["delivered_again"], moved["in_flight"]) == (to, 60 - to, 1)
            assert moved["skipped"] == (2 if past_them else 0)
            shutil.copytree(data_path, killed)
            other = await api.channel("t", "other")
            assert (other["depth"], other["deferred_count"]) == (0, 0)
    assert not verify_topic(killed / "topics" / "t.topic").damaged
    async with running_api(killed, **FAST) as api:
        channel = await api.channel("t", "c")
        again = 0 if past_them else 1
        assert (channel["depth"], channel["deferred_count"]) == (60 - to + again, again)
        await ready_client(api.tcp)
        messages = [await api.tcp.message() for _ in range(60 - to + again)]
        came = {message.body: message.attempts for message in messages}
        assert came == {body(n): 1 for n in range(to, 60)} | ({} if past_them else {body(0): 2})
        if past_them:
            await until(lambda: not carried(killed).exists())
        else:
            query = "topic=t&channel=c&state=deferred"
            (line,) = (await api.send("GET", f"/channel/peek?{query}")).text.splitlines()
            assert json.loads(line)["body"].encode() == body(7)


async def test_too_many_messages_are_not_carried_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MAX_CARRIED_BYTES", 1500)
    monkeypatch.setattr(retention, "CARRIED_BYTES_SHARE", 1.0)
    data_path = tmp_path / "d"
    async with running_api(data_path, **FAST) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await fill(api, 60)
        await ready_client(api.tcp)
        first, second = await finish_all_but(api.tcp, 60, {3, 8})  # 900 bytes each
        await api.tcp.nothing_more()
        await api.send("PUT", "/topic/settings?topic=t", body=b"{}")  # saves it
        assert segments(data_path)[0] == 2
        assert not carried(data_path).exists()
        await api.tcp.send(b"FIN %s\n" % second)
        await until(lambda: segments(data_path)[0] > 20)
        await api.tcp.send(b"FIN %s\n" % first)
        await until(lambda: not carried(data_path).exists())


async def test_messages_are_not_carried_forward_without_a_benefit(tmp_path: Path) -> None:
    data_path = tmp_path / "d"
    async with running_api(data_path, **FAST) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await fill(api, 60)
        await ready_client(api.tcp)
        ids = await finish_all_but(api.tcp, 60, set(range(0, 60, 4)))
        answer = await api.send("PUT", "/topic/settings?topic=t", body=b"{}")  # saves it
        assert answer.status_code == 200
        assert segments(data_path)[0] == 0
        assert not carried(data_path).exists()
        for message_id in ids:
            await api.tcp.send(b"FIN %s\n" % message_id)
        await until(lambda: len(segments(data_path)) == 1)


async def test_missing_carried_forward_segment_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data_path = tmp_path / "d"
    async with running_api(data_path, **FAST) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await fill(api, 60)
        await ready_client(api.tcp)
        await finish_all_but(api.tcp, 60, {3})
        await until(lambda: carried(data_path).exists())
        await until(lambda: segments(data_path)[0] > 20)
    carried(data_path).unlink()
    (finding,) = verify_topic(carried(data_path).parent).findings
    assert (finding.sequence, finding.messages) == (3, 1)
    async with running_api(data_path, **FAST):
        assert "messages 3 to" in caplog.text
