"""Tests for the broker's HTTP endpoints, with httpx."""

import os
import sys
from pathlib import Path
from struct import pack

import httpx
import pytest

from broker.api import DONE, OK, running_api
from broker.support import FailingFiles, dpub
from trio_nsq import __version__
from trio_nsq.fleet.identity import BrokerIdentity


async def test_ping_and_info(tmp_path: Path) -> None:
    told = {"broadcast_address": "here", "broadcast_tcp_port": 1, "broadcast_http_port": 2}
    async with running_api(tmp_path / "d", **told) as api:
        ping = await api.get("/ping")
        assert (ping.status_code, ping.text) == (200, "OK")
        info = (await api.get("/info")).json()
        assert info["version"] == __version__
        assert info["broadcast_address"] == "here"
        assert info["tcp_port"] > 2  # the bound ports; the others are for discovery
        assert info["http_port"] > 2
        assert info["max_heartbeat_interval"] == 60_000_000_000
        assert list(info) == [
            "version", "broadcast_address", "hostname", "http_port", "tcp_port", "start_time", "instance",
            "max_heartbeat_interval", "max_output_buffer_size", "max_output_buffer_timeout", "max_deflate_level",
        ]  # fmt: skip


async def test_brokers_with_the_same_ports_that_start_in_the_same_second_differ(tmp_path: Path) -> None:
    """On IP addresses of their own; all other fields are equal then."""
    async with running_api(tmp_path / "a") as one:
        info = (await one.get("/info")).json()
        addresses = {f"{name}_address": f"127.0.0.2:{info[f'{name}_port']}" for name in ("http", "tcp")}
        async with running_api(tmp_path / "b", **addresses) as other:
            found = [(await each.get("/info")).json() for each in (one, one, other)]
    found[2]["start_time"] = found[0]["start_time"]
    identities = [BrokerIdentity.of(info) for info in found]
    assert identities[0] == identities[1] != identities[2]


async def test_pub_and_mpub(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.subscribe("t", "c", ready_count=100)
        assert await api.post("/pub", b"with\nline feed", topic="t") == OK
        assert await api.post("/mpub", b"\none\n\ntwo\r\nthree", topic="t") == OK
        binary = pack(">ii", 2, 3) + b"a\nb" + pack(">i", 1) + b"c"
        assert await api.post("/mpub", binary, topic="t", binary="true") == OK
        assert await api.post("/mpub", b"", topic="t") == OK
        bodies = [(await api.tcp.message()).body for _ in range(6)]
        assert bodies == [b"with\nline feed", b"one", b"two\r", b"three", b"a\nb", b"c"]
        await api.tcp.nothing_more()


async def test_pub_defer(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.subscribe("t", "c", ready_count=100)
        assert await api.post("/pub", b"soon", topic="t", defer=1) == OK
        assert await api.post("/pub", b"late", topic="t", defer=3_600_000) == OK
        assert (await api.tcp.message()).body == b"soon"
        assert (await api.channel("t", "c"))["deferred_count"] == 1


@pytest.mark.parametrize(
    ("path", "body", "query", "answer"),
    [
        ("/pub", b"", {"topic": "t"}, (400, "MSG_EMPTY")),
        ("/pub", b"x", {}, (400, "MISSING_ARG_TOPIC")),
        ("/pub", b"x", {"topic": "bad|name"}, (400, "INVALID_TOPIC")),
        ("/pub", b"x", {"topic": "t", "defer": "31536000001"}, (400, "INVALID_DEFER")),
        ("/pub", b"x", {"topic": "t", "defer": "-1"}, (400, "INVALID_DEFER")),
        ("/pub", b"x", {"topic": "t", "defer": "9" * 5000}, (400, "INVALID_DEFER")),
        ("/pub", b"x", {"topic": "t", "defer": "0" * 5000}, (200, "OK")),
        ("/pub", b"x", {"topic": "t", "defer": "+5"}, (200, "OK")),
        ("/pub", b"x", {"topic": "t", "defer": ""}, (400, "INVALID_DEFER")),
        ("/mpub", pack(">ii", 1, 1_048_577), {"topic": "t", "binary": "1"}, (413, "BAD_MESSAGE")),
        ("/mpub", b"text", {"topic": "t", "binary": "F"}, (413, "BAD_BODY")),
        ("/pub", b"x" * 1_048_577, {"topic": "t"}, (413, "MSG_TOO_BIG")),
        ("/mpub", b"x", {}, (400, "MISSING_ARG_TOPIC")),
        ("/mpub", b"x" * 1_048_577, {"topic": "t"}, (413, "MSG_TOO_BIG")),
        ("/mpub", b"x\n" * 2_621_441, {"topic": "t"}, (413, "BODY_TOO_BIG")),
        ("/mpub", b"abc", {"topic": "t", "binary": ""}, (413, "BAD_BODY")),
        ("/mpub", pack(">i", 0), {"topic": "t", "binary": "1"}, (413, "BAD_BODY")),
        ("/mpub", pack(">ii", 1, 9) + b"short", {"topic": "t", "binary": "1"}, (413, "BAD_MESSAGE")),
        ("/topic/create", b"", {"topic": ".." * 40}, (400, "INVALID_TOPIC")),
        ("/topic/delete", b"", {"topic": "unknown"}, (404, "TOPIC_NOT_FOUND")),
        ("/topic/pause", b"", {}, (400, "MISSING_ARG_TOPIC")),
        ("/channel/create", b"", {"topic": "unknown", "channel": "c"}, (404, "TOPIC_NOT_FOUND")),
        ("/channel/create", b"", {"topic": "bad|", "channel": "c"}, (400, "INVALID_ARG_TOPIC")),
        ("/channel/pause", b"", {"topic": "t"}, (400, "MISSING_ARG_CHANNEL")),
        ("/channel/empty", b"", {"topic": "known", "channel": "unknown"}, (404, "CHANNEL_NOT_FOUND")),
        ("/nowhere", b"", {}, (404, "NOT_FOUND")),
    ],
)
async def test_bad_requests(
    tmp_path: Path, path: str, body: bytes, query: dict[str, str], answer: tuple[int, str]
) -> None:
    async with running_api(tmp_path / "d") as api:
        assert await api.post("/topic/create", topic="known") == DONE
        assert await api.post(path, body, **query) == answer


async def test_topic_pause_holds_back_and_survives_a_restart(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.subscribe("t", "c", ready_count=10)
        assert await api.post("/topic/pause", topic="t") == DONE
        await api.tcp.publish("t", b"held")
        await api.tcp.nothing_more()
        assert await api.depth("t") == 1
    async with running_api(tmp_path / "d") as api:
        await api.tcp.subscribe("t", "c", ready_count=10)
        await api.tcp.nothing_more()
        assert (await api.stats(topic="t"))["topics"][0]["paused"] is True
        assert await api.post("/topic/unpause", topic="t") == DONE
        assert (await api.tcp.message()).body == b"held"


async def test_channel_pause_and_unpause(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.subscribe("t", "c", ready_count=10)
        assert await api.post("/channel/pause", topic="t", channel="c") == DONE
        await api.tcp.publish("t", b"held")
        await api.tcp.nothing_more()
        assert (await api.channel("t", "c"))["depth"] == 1
        assert await api.post("/channel/unpause", topic="t", channel="c") == DONE
        assert (await api.tcp.message()).body == b"held"


async def test_empty_topic_and_channel(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.publish("t", b"dropped")
        assert await api.post("/topic/empty", topic="t") == DONE
        assert await api.depth("t") == 0
        await api.tcp.subscribe("t", "c", ready_count=1)
        await api.tcp.publish("t", b"in flight", b"waiting")
        message = await api.tcp.message()
        await api.tcp.send(dpub("t", 1000, b"deferred"))
        await api.tcp.ok()
        assert await api.post("/channel/empty", topic="t", channel="c") == DONE
        described = await api.channel("t", "c")
        assert [described[key] for key in ("depth", "in_flight_count", "deferred_count")] == [0, 0, 0]
        await api.tcp.send(b"FIN " + message.id + b"\n")
        assert "ID not in flight" in await api.tcp.error()
        await api.tcp.publish("t", b"goes on")
        assert (await api.tcp.message()).body == b"goes on"


async def test_delete_channel_and_topic_disconnect_their_clients(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.subscribe("t", "c", ready_count=1)
        assert await api.post("/channel/delete", topic="t", channel="c") == DONE
        assert await api.tcp.frame() is None
        assert (await api.stats(topic="t"))["topics"][0]["channels"] == []
        assert (tmp_path / "d" / "topics" / "t.topic").exists()
        assert await api.post("/topic/delete", topic="t") == DONE
        assert (await api.stats(topic="t"))["topics"] is None
        assert not (tmp_path / "d" / "topics" / "t.topic").exists()
        assert await api.post("/pub", b"anew", topic="t") == OK


async def test_created_channel_gets_messages_and_survives_a_restart(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        assert await api.post("/topic/create", topic="t") == DONE
        assert await api.post("/channel/create", topic="t", channel="a") == DONE
        assert await api.post("/channel/create", topic="t", channel="a") == DONE
        await api.tcp.publish("t", b"x")
        assert (await api.channel("t", "a"))["depth"] == 1
    async with running_api(tmp_path / "d") as api:
        assert (await api.channel("t", "a"))["depth"] == 1


async def test_stats_fields_are_nsqds(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.subscribe("t", "c", ready_count=2)
        await api.tcp.publish("t", b"12345", b"678", b"9")
        await api.tcp.message()
        stats = await api.stats()
        assert list(stats) == ["version", "health", "start_time", "topics", "memory", "producers"]
        (topic,) = stats["topics"]
        assert list(topic) == [
            "topic_name", "channels", "depth", "backend_depth", "message_count", "message_bytes", "paused",
            "e2e_processing_latency",
        ]  # fmt: skip
        assert (topic["message_count"], topic["message_bytes"], topic["depth"]) == (3, 9, 0)
        (channel,) = topic["channels"]
        assert list(channel) == [
            "channel_name", "depth", "backend_depth", "in_flight_count", "deferred_count", "message_count",
            "requeue_count", "timeout_count", "client_count", "clients", "paused", "e2e_processing_latency",
            "oldest_message_age_ms",
        ]  # fmt: skip
        assert (channel["depth"], channel["in_flight_count"], channel["message_count"]) == (1, 2, 3)
        (client,) = channel["clients"]
        assert (client["state"], client["ready_count"], client["in_flight_count"]) == (3, 2, 2)
        assert client["pub_counts"] == [{"topic": "t", "count": 3}]
        assert [producer["remote_address"] for producer in stats["producers"]] == [client["remote_address"]]
        bare = await api.stats(include_clients="false")
        assert bare["topics"][0]["channels"][0]["clients"] is None
        assert bare["producers"] is None


async def test_stats_tell_the_space_on_the_disk(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        assert "disk" not in await api.stats()
        before = (await api.stats(include_disk="true"))["disk"]
        assert before["used_bytes"] == 0
        await api.tcp.publish("t", b"x" * 100_000)
        await api.tcp.publish("t#ephemeral", b"not on the disk")
        disk = (await api.stats(include_disk="true"))["disk"]
        assert 100_000 < disk["used_bytes"] < 101_000
        system = os.statvfs(tmp_path)
        assert disk["total_bytes"] == system.f_blocks * system.f_frsize
        assert 0 < disk["free_bytes"] < disk["total_bytes"]


async def test_ping_reports_an_error_until_a_write_succeeds(tmp_path: Path) -> None:
    files = FailingFiles()
    async with running_api(tmp_path / "d", files=files) as api:
        files.full_after = 0
        status, text = await api.post("/pub", b"x", topic="t")
        assert status == 503
        assert "No space left on device" in text
        ping = await api.get("/ping")
        assert ping.status_code == 500
        assert ping.text.startswith("NOK - cannot write")
        assert (await api.stats())["health"] == ping.text
        files.full_after = None
        assert await api.post("/pub", b"x", topic="t") == OK
        assert (await api.get("/ping")).text == "OK"


async def test_bug_ends_one_http_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*args: object) -> None:
        raise ZeroDivisionError

    async with running_api(tmp_path / "d") as api:
        with monkeypatch.context() as broken:
            broken.setattr(sys.modules["trio_nsq.broker.api.server"], "serve_connection", fail)
            with pytest.raises(httpx.RemoteProtocolError):
                await api.get("/ping")
        assert "internal error" in caplog.text
        assert (await api.get("/ping")).text == "OK"
