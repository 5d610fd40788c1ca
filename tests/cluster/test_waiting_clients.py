"""Clients of this project that begin while a cluster has no leader."""

from pathlib import Path

import pytest
import trio

from broker.support import PATIENCE_S
from cluster.running import running_members
from trio_nsq.client import Consumer, Producer


async def test_new_clients_wait_for_a_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # They would have given up after this time.
    monkeypatch.setattr("trio_nsq.client.connection.connection.HANDSHAKE_TIMEOUT_S", 0.1)
    monkeypatch.setattr("trio_nsq.client.connection.connection.LEADER_TIMEOUT_S", PATIENCE_S)
    async with running_members(tmp_path, "static:") as members:
        one = await members.start("one")
        received: list[bytes] = []

        async def consume() -> None:
            async with Consumer("t", "c", nsqd_tcp_addresses=[one.bound.tcp_address]) as consumer:
                async for message in consumer:
                    received.append(message.body)
                    message.finish()
                    break

        async def publish() -> None:
            async with Producer([one.bound.tcp_address], publish_timeout_s=PATIENCE_S) as producer:
                await producer.publish("t", b"1")

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(consume)
                nursery.start_soon(publish)
                while caplog.text.count("it hangs, or its cluster has no leader") < 2:
                    await trio.sleep(0.02)
                monkeypatch.undo()
                assert (await one.client.post("/cluster/promote")).status_code == 200
        assert received == [b"1"]
