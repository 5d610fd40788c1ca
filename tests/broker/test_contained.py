"""Tests that a bug in one place is logged, and ends neither the broker nor its work for other clients."""

import logging
from pathlib import Path
from typing import Any

import pytest

from broker.api import DONE, running_api
from broker.letters import client_of, configure, fail
from broker.support import connected, identify, running_broker, until
from trio_nsq.broker.state.broker import Broker
from trio_nsq.broker.state.channel import Channel
from trio_nsq.broker.topic_registry import TopicRegistry
from trio_nsq.log import Files


class BrokenFiles(Files):
    """Saving a state raises an exception that is not an OSError."""

    broken = False

    def replace(self, path: Path, content: bytes) -> None:
        if self.broken:
            raise ZeroDivisionError("a defect")
        super().replace(path, content)


async def test_exception_while_saving(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = BrokenFiles()
    async with running_api(tmp_path / "d", files=files, checkpoint_interval_ms=1) as api:
        await api.tcp.publish("t", b"1")
        files.broken = True
        await api.tcp.publish("t", b"2")
        await until(lambda: "ZeroDivisionError" in caplog.text)
        assert await api.post("/channel/create", topic="t", channel="c") == (
            503, "cannot save the state of topic t: internal error",
        )  # fmt: skip
        assert (await api.get("/ping")).status_code == 500
        files.broken = False
        assert await api.post("/channel/create", topic="t", channel="c") == DONE
        assert (await api.get("/ping")).text == "OK"
        await api.tcp.subscribe("t", "c", ready_count=5)
        assert [(await api.tcp.message()).body for _ in range(2)] == [b"1", b"2"]


@pytest.mark.uncompiled
async def test_exception_while_processing_a_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeouts of other channels work."""
    tick = Channel.tick

    def break_one(channel: Channel, *args: Any) -> int:
        if channel.name == "broken":
            raise ZeroDivisionError("a defect")
        return tick(channel, *args)

    monkeypatch.setattr(Channel, "tick", break_one)
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        async with connected(bound.tcp_address) as other:
            for each, channel in ((other, "broken"), (client, "c")):
                await each.send(identify(msg_timeout=1000))
                await each.ok()
                await each.subscribe("t", channel, ready_count=1)
            await client.publish("t", b"x")
            assert [(await client.message()).attempts for _ in range(2)] == [1, 2]


@pytest.mark.uncompiled
async def test_exception_in_the_timers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tick = Broker.tick
    failures = iter([ZeroDivisionError("a defect")])

    def fail_once(broker: Broker, now_ns: int) -> list[Channel]:
        for error in failures:
            raise error
        return tick(broker, now_ns)

    monkeypatch.setattr(Broker, "tick", fail_once)
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.send(identify(msg_timeout=1000))
        await client.ok()
        await client.subscribe("t", "c", ready_count=1)
        await client.publish("t", b"x")
        assert [(await client.message()).attempts for _ in range(2)] == [1, 2]
    assert [record.levelno for record in caplog.records if record.exc_info] == [logging.ERROR]


async def test_exception_in_the_dead_letter_mover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It retries after a pause, not continuously."""
    publish, is_broken = TopicRegistry.publish_durably, True

    async def break_it(topics: TopicRegistry, *args: Any, **kwargs: Any) -> None:
        if is_broken:
            raise ZeroDivisionError("a defect")
        await publish(topics, *args, **kwargs)

    monkeypatch.setattr(TopicRegistry, "publish_durably", break_it)
    async with running_api(tmp_path / "d") as api, client_of(api) as reader:
        await reader.subscribe("dead", "any", 1)
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        await api.tcp.publish("t", b"a")
        await api.tcp.subscribe("t", "c", 1)
        await fail(api.tcp, 1)
        await until(lambda: "dead letters could not be moved" in caplog.text)
        for _ in range(10):
            await api.tcp.nothing_more()
        assert caplog.text.count("dead letters could not be moved") == 1
        is_broken = False
        assert (await reader.message()).body == b"a"
