"""Tests for a full or failing disk: publishers get errors, no acknowledged message is lost, and the broker
recovers.
"""

from pathlib import Path

import pytest

from broker.support import FailingFiles, connected, mpub, running_broker


@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_disk_full(tmp_path: Path, sync: str) -> None:
    files = FailingFiles()
    async with running_broker(tmp_path / "d", files=files, sync=sync) as bound:
        async with connected(bound.tcp_address) as client:
            await client.publish("t", b"before")
            files.full_after = 70  # a header and a part of the body
            await client.send(mpub("t", b"refused" * 10))
            error = await client.error()
            assert error.startswith("E_MPUB_FAILED MPUB failed cannot write ")
            assert error.endswith("No space left on device")
        files.full_after = None
        async with connected(bound.tcp_address) as client:
            await client.publish("t", b"after")
            await client.subscribe("t", "c", ready_count=10)
            assert [(await client.message()).body for _ in range(2)] == [b"before", b"after"]
            await client.nothing_more()
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "again", ready_count=10)
        await client.nothing_more()


async def test_failed_sync_refuses_the_publish(tmp_path: Path) -> None:
    files = FailingFiles()
    async with running_broker(tmp_path / "d", files=files) as bound:
        async with connected(bound.tcp_address) as client:
            await client.publish("t", b"before")
            files.sync_fails = True
            await client.send(mpub("t", b"refused"))
            assert "Input/output error" in await client.error()
        files.sync_fails = False
        async with connected(bound.tcp_address) as client:
            # A sync of the removal may have begun before; if it fails now, messages written meanwhile are refused, too.
            await client.send(mpub("t", b"after"))
            while (await client.frame()) != (0, b"OK"):
                await client.send(mpub("t", b"after"))
            await client.subscribe("t", "c", ready_count=10)
            assert [(await client.message()).body for _ in range(2)] == [b"before", b"after"]


async def test_disk_full_while_creating_a_topic(tmp_path: Path) -> None:
    files = FailingFiles()
    async with running_broker(tmp_path / "d", files=files) as bound:
        files.full_after = 0
        async with connected(bound.tcp_address) as client:
            await client.send(mpub("new", b"refused"))
            assert "No space left on device" in await client.error()
        files.full_after = None
        async with connected(bound.tcp_address) as client:
            await client.publish("new", b"stored")
            await client.subscribe("new", "c", ready_count=10)
            assert (await client.message()).body == b"stored"
