"""Tests for a clean stop: running publishes are stored and answered, nothing is lost, and nothing delays it."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
import trio.testing

from broker.api import running_api
from broker.support import HeldFiles, connected, left_open, open_files_before, pub, running_broker, settle
from trio_nsq.broker import BrokerOptions, StartupError, serve
from trio_nsq.broker.storage.data_folder import decode_state


async def test_messages_in_flight_are_not_redelivered_during_the_stop(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        async with running_broker(tmp_path / "d") as bound:
            clients = [await stack.enter_async_context(connected(bound.tcp_address)) for _ in range(5)]
            for client in clients:
                await client.subscribe("t", "c", ready_count=100)
            async with connected(bound.tcp_address) as publisher:
                await publisher.publish("t", *[b"%d" % n for n in range(10)])
            await settle()
        received = 0
        for client in clients:
            while (frame := await client.frame()) is not None:
                received += frame[0] == 2
        assert received == 10
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=10)
        assert [(await client.message()).attempts for _ in range(10)] == [2] * 10


async def test_running_publish_is_stored_and_answered(tmp_path: Path) -> None:
    files = HeldFiles()
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        async with running_broker(tmp_path / "d", files=files) as bound:
            client = await stack.enter_async_context(connected(bound.tcp_address))
            await client.publish("t", b"makes the segment")
            late = await stack.enter_async_context(connected(bound.tcp_address))
            files.hold("sync")
            await client.send(pub("t", b"under way"))
            await files.reached()
            await late.send(pub("t", b"waits for the next sync"))
            await settle()
            nursery.start_soon(let_go_when_all_wait, files)
        await client.ok()
        assert await client.frame() is None
        await late.ok()
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=10)
        assert len({(await client.message()).body for _ in range(3)}) == 3


async def let_go_when_all_wait(files: HeldFiles) -> None:
    await settle()
    files.release()


async def test_stop_while_a_sub_is_saved(tmp_path: Path) -> None:
    files = HeldFiles()
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        async with running_broker(tmp_path / "d", files=files) as bound:
            client = await stack.enter_async_context(connected(bound.tcp_address))
            await client.publish("t", b"kept")
            files.hold("replace")
            await client.send(b"SUB t c\n")
            await files.reached()
            nursery.start_soon(let_go_when_all_wait, files)
    state = decode_state((tmp_path / "d" / "topics" / "t.topic" / "state.json").read_bytes())
    assert [channel["name"] for channel in state["channels"]] == ["c"]
    assert state["channels"][0]["cursor"] == 0


async def test_stop_while_a_topic_is_deleted(tmp_path: Path) -> None:
    files = HeldFiles()
    async with trio.open_nursery() as nursery:
        async with running_api(tmp_path / "d", files=files) as api:
            await api.tcp.publish("t", b"x")
            await api.tcp.publish("other", b"x")
            files.hold("sync")
            await api.tcp.send(pub("t", b"under way"))
            await files.reached()

            async def delete() -> None:
                try:
                    await api.post("/topic/delete", topic="t")
                except Exception:
                    pass  # the broker may stop before the answer

            nursery.start_soon(delete)
            await settle()
            nursery.start_soon(let_go_when_all_wait, files)
    assert [path.name for path in (tmp_path / "d" / "topics").iterdir()] == ["other.topic"]


async def test_nothing_stays_open_after_a_stop(tmp_path: Path) -> None:
    before = open_files_before()
    tasks = trio.lowlevel.current_statistics().tasks_living
    async with running_api(tmp_path / "d") as api:
        await api.tcp.subscribe("t", "c", ready_count=1)
        await api.tcp.publish("t", b"x")
        await api.tcp.publish("u#ephemeral", b"x")
    assert not left_open(before)
    assert trio.lowlevel.current_statistics().tasks_living == tasks


async def test_http_address_in_use_releases_the_tcp_address(tmp_path: Path) -> None:
    before = open_files_before()
    (taken,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with taken:
        address = "127.0.0.1:%d" % taken.socket.getsockname()[1]
        options = BrokerOptions(data_path=tmp_path / "d", tcp_address="127.0.0.1:0", http_address=address)
        with pytest.raises(StartupError, match="--http-address: cannot listen"):
            await serve(options)
    assert not left_open(before)


async def test_snapshot_ahead_of_the_log_is_replaced_before_any_publish(tmp_path: Path) -> None:
    """After a power cut with --sync=interval the log may be shorter than the state expects."""
    async with (
        running_broker(tmp_path / "d", sync="interval") as bound,
        connected(bound.tcp_address) as client,
    ):
        await client.subscribe("t", "c", ready_count=10)
        await client.publish("t", b"1", b"2")
        await client.send(
            b"FIN " + (await client.message()).id + b"\nFIN " + (await client.message()).id + b"\n"
        )
        await client.nothing_more()
    folder = tmp_path / "d" / "topics" / "t.topic"
    segment = folder / "00000000000000000000.log"
    segment.write_bytes(segment.read_bytes()[:32])
    async with running_broker(tmp_path / "d", checkpoint_interval_ms=3_600_000):
        state = decode_state((folder / "state.json").read_bytes())
        assert (state["end"], state["channels"][0]["cursor"]) == (0, 0)
