"""Tests for the discovery service: faulty, silent and disconnecting clients; inactive producers; the log."""

import json
import logging
import socket
from struct import pack
from typing import Any

import httpx
import pytest
import trio
from trio.testing import MockClock

from broker.support import PATIENCE_S, until
from lookup.support import FREE, Lookupd, RawProducer, identify, ours, producer
from trio_nsq.lookup.service.broker_connection import GREETING_TIMEOUT_S
from trio_nsq.lookup.service.options import LookupdOptions
from trio_nsq.lookup.service.server import serve
from trio_nsq.protocol.errors import StartupError


@pytest.fixture
def clock() -> MockClock:
    """A clock that moves only when the test says so."""
    return MockClock()


async def get(lookupd: Lookupd, path: str) -> Any:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        response = await client.get(f"http://{lookupd.http_address}{path}")
    return response.raise_for_status().json()


async def told(lookupd: Lookupd, topic: str = "t") -> list[str]:
    return [each["broadcast_address"] for each in (await get(lookupd, f"/lookup?topic={topic}"))["producers"]]


async def connect(lookupd: Lookupd) -> trio.SocketStream:
    host, _, port = lookupd.tcp_address.rpartition(":")
    return await trio.open_tcp_stream(host, int(port))


# ------------------------------------------------------------------------------------------------ clusters


def leader(epoch: int, name: str = "prod") -> dict[str, Any]:
    return {"cluster": {"name": name, "member": f"f{epoch}", "epoch": epoch}}


async def test_a_new_leader_hides_the_former_one(caplog: pytest.LogCaptureFixture) -> None:
    """The connection of the former one stays open, and consumers do not find it."""
    caplog.set_level(logging.INFO)
    async with ours() as lookupd, producer(lookupd, broadcast_address="one", **leader(1)) as one:
        await one.register("REGISTER t c")
        assert (await get(lookupd, "/lookup?topic=t"))["producers"][0]["cluster"] == leader(1)["cluster"]
        async with (
            producer(lookupd, broadcast_address="two", **leader(2)) as two,
            producer(lookupd, broadcast_address="other", **leader(1, "test")) as other,
        ):
            await two.register("REGISTER t c")
            await other.register("REGISTER t")
            await one.register("REGISTER u")
            assert await told(lookupd) == ["two", "other"]
            assert await told(lookupd, "u") == []
            nodes = (await get(lookupd, "/nodes"))["producers"]
            assert [each["cluster"] for each in nodes] == [
                leader(2)["cluster"],
                leader(1, "test")["cluster"],
            ]
            assert await one.ask(b"PING\n") == [b"OK"]
            async with producer(lookupd, broadcast_address="late", **leader(1)) as late:
                await late.register("REGISTER t")
                assert await told(lookupd) == ["two", "other"]
                connected = (await get(lookupd, "/debug"))["client::"]
    first, second, _, third = (each["id"] for each in connected)
    lines = [line for line in caplog.messages if "the cluster prod" in line]
    assert lines == [
        f"DB: client({first}) leads the cluster prod in epoch 1",
        f"DB: client({second}) leads the cluster prod in epoch 2",
        f"DB: client({first}) led the cluster prod in epoch 1: hidden, client({second}) leads it in epoch 2",
        f"DB: client({third}) led the cluster prod in epoch 1: ignored, a later leader is registered",
    ]


# ------------------------------------------------------------------------------------------------ time


async def test_silent_producer_is_inactive_until_its_next_ping(clock: MockClock) -> None:
    async with ours() as lookupd, producer(lookupd) as one:
        await one.register("REGISTER t")
        clock.jump(301)
        assert await told(lookupd) == []
        assert await get(lookupd, "/nodes") == {"producers": []}
        assert await one.ask(b"PING\n") == [b"OK"]
        assert await told(lookupd) == ["b"]


async def test_times_in_answers_use_the_real_clock(clock: MockClock) -> None:
    async with ours() as lookupd, producer(lookupd) as one:
        await one.register("REGISTER t")
        before = (await get(lookupd, "/debug"))["topic:t:"][0]["last_update"]
        clock.jump(100)
        after = (await get(lookupd, "/debug"))["topic:t:"][0]["last_update"]
        assert 90e9 < before - after < 101e9  # 100 s of a clock that stood still meanwhile


async def test_producer_that_is_silent_for_too_long_is_removed(
    clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with ours() as lookupd, producer(lookupd) as one:
        await one.register("REGISTER t", "REGISTER t c#ephemeral")
        clock.jump(599)
        assert await one.ask(b"PING\n") == [b"OK"]  # restarts the time
        clock.jump(599)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert len((await get(lookupd, "/debug"))["client::"]) == 1
        clock.jump(2)
        assert await one.response() is None
        assert await get(lookupd, "/lookup?topic=t") == {"channels": [], "producers": []}
        assert "no command within the timeout" in caplog.text


@pytest.mark.parametrize("said", [b"", b"  V", b"  V1", b"  V1IDENTIFY\n\0\0\1\0{"])
async def test_client_without_identify_is_disconnected(clock: MockClock, said: bytes) -> None:
    async with ours() as lookupd, await connect(lookupd) as stream:
        await stream.send_all(said)
        await trio.testing.wait_all_tasks_blocked(0.01)
        clock.jump(GREETING_TIMEOUT_S - 1)
        await stream.send_all(b"1")  # bytes that complete no command do not extend the time
        await trio.testing.wait_all_tasks_blocked(0.01)
        clock.jump(2)
        assert await stream.receive_some() == b""


async def test_pings_do_not_replace_identify(clock: MockClock) -> None:
    async with ours() as lookupd, await connect(lookupd) as stream:
        await stream.send_all(b"  V1PING\n")
        assert await stream.receive_some() == b"\0\0\0\2OK"
        clock.jump(GREETING_TIMEOUT_S - 1)
        await stream.send_all(b"PING\n")
        assert await stream.receive_some() == b"\0\0\0\2OK"
        clock.jump(2)
        assert await stream.receive_some() == b""


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"NOPE\n", b"E_INVALID invalid command NOPE"),
        (b"IDENTIFY\n", b"E_INVALID cannot IDENTIFY again"),
        (b"REGISTER |\n", b"E_BAD_TOPIC REGISTER topic name '|' is not valid"),
        (b"REGISTER t |\n", b"E_BAD_CHANNEL REGISTER channel name '|' is not valid"),
        (b"x" * 20_000, b"E_INVALID line longer than 16384 bytes"),
    ],
)
async def test_error_is_delivered_and_ends_the_connection(said: bytes, error: bytes) -> None:
    async with ours() as lookupd, producer(lookupd) as one:
        await one.register("REGISTER t")
        # Unread data after the error would reset the connection.
        await one.stream.send_all(b"REGISTER t c\n" + said + b"PING\n" * 100_000)
        assert [await one.response() for _ in range(3)] == [b"OK", error, None]
        assert await told(lookupd) == []
        assert await get(lookupd, "/channels?topic=t") == {"channels": ["c"]}


@pytest.mark.parametrize("size", [-1, -(2**31), 2**31 - 1])
async def test_invalid_identify_affects_only_its_connection(size: int) -> None:
    async with ours() as lookupd, producer(lookupd) as one:
        async with await connect(lookupd) as stream:
            other = RawProducer(stream)
            await stream.send_all(b"  V1IDENTIFY\n" + pack(">i", size))
            assert (await other.response() or b"").startswith(b"E_BAD_BODY IDENTIFY ")
            assert await other.response() is None
        assert await one.ask(b"PING\n") == [b"OK"]


async def test_registrations_per_producer_are_limited() -> None:
    async with ours(max_registrations=2) as lookupd, producer(lookupd) as one:
        responses = await one.ask(b"REGISTER t c\nREGISTER u\n")
        assert responses == [b"OK", b"E_INVALID REGISTER exceeds the limit of 2 topics and channels"]
        assert await one.response() is None


async def test_names_of_ended_connections_are_limited() -> None:
    async with ours(max_topics=20, max_channels=30) as lookupd:
        for n in range(5):
            async with producer(lookupd) as one:
                lines = [f"REGISTER t{n}-{topic} c{channel}" for topic in range(10) for channel in range(3)]
                responses = await one.ask("".join(f"{line}\n" for line in lines).encode())
                assert set(responses) == {b"OK"}
            while await told(lookupd, f"t{n}-0"):
                pass
        topics = (await get(lookupd, "/topics"))["topics"]
        assert topics == sorted(f"t{n}-{topic}" for n in (3, 4) for topic in range(10))
        assert len((await get(lookupd, "/channels?topic=t4-9"))["channels"]) == 3
        assert (await get(lookupd, "/channels?topic=t3-9"))["channels"] == []


async def test_thousands_of_channels_at_once() -> None:
    lines = [f"REGISTER t{n % 10} c{n}" for n in range(3_000)]
    async with ours() as lookupd, producer(lookupd) as one:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.stream.send_all, "".join(f"{line}\n" for line in lines).encode())
            assert {await one.response() for _ in lines} == {b"OK"}
        assert len((await get(lookupd, "/channels?topic=t3"))["channels"]) == 300
        await one.stream.aclose()
        while await told(lookupd, "t3"):
            pass


async def test_client_that_reads_nothing_delays_no_other(clock: MockClock) -> None:
    async with ours() as lookupd, producer(lookupd) as one, producer(lookupd) as other:
        with trio.move_on_after(0.5) as flooding:

            async def flood() -> None:
                while True:
                    await one.stream.send_all(b"PING\n" * 10_000)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(flood)
                await trio.testing.wait_all_tasks_blocked(0.05)
                clock.jump(1)
        assert flooding.cancelled_caught
        assert await other.ask(b"PING\n") == [b"OK"]
        clock.jump(601)
        await trio.testing.wait_all_tasks_blocked(0.01)
        # Both are removed: neither has sent a ping.
        assert await get(lookupd, "/debug") == {}


async def test_exception_ends_one_connection_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with ours() as lookupd, producer(lookupd) as one, producer(lookupd, hostname="other") as other:
        with monkeypatch.context() as broken:
            broken.setattr("trio_nsq.lookup.service.registry.Registry.ping", lambda *_: 1 / 0)
            await one.stream.send_all(b"PING\n")
            assert await one.response() is None
        assert await other.ask(b"PING\n") == [b"OK"]
        assert [node["hostname"] for node in (await get(lookupd, "/nodes"))["producers"]] == ["other"]
    assert "internal error" in caplog.text


# ------------------------------------------------------------------------------------------------ other tests


async def test_brokers_get_the_addresses_of_the_service() -> None:
    for given, told_host in [(None, "127.0.0.1"), ("elsewhere", "elsewhere")]:
        async with ours(broadcast_address=given) as lookupd, await connect(lookupd) as stream:
            await stream.send_all(b"  V1" + identify())
            info = json.loads(await RawProducer(stream).response() or b"")
            assert (info["broadcast_address"], info["hostname"]) == (told_host, socket.gethostname())
            assert f"127.0.0.1:{info['http_port']}" == lookupd.http_address
            assert f"127.0.0.1:{info['tcp_port']}" == lookupd.tcp_address


async def test_port_in_use_is_an_error() -> None:
    async with ours() as lookupd:
        for options, flag in [
            (LookupdOptions(lookupd.tcp_address, FREE), "--tcp-address"),
            (LookupdOptions(FREE, lookupd.http_address), "--http-address"),
        ]:
            with pytest.raises(StartupError, match=f"{flag}: cannot listen"):
                await serve(options)


async def test_log_messages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "trio_nsq")
    async with ours() as lookupd, producer(lookupd, version="\x1b[31m") as one:
        assert isinstance(one.stream, trio.SocketStream)
        peer = "%s:%d" % one.stream.socket.getsockname()
        await one.register("REGISTER t c", "REGISTER t c", "UNREGISTER t c", "PING")
        await get(lookupd, "/topics")
        await one.ask(b"\x1b[31m\n")
        assert await one.response() is None
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            await client.post(f"http://{lookupd.http_address}/topic/create?topic=u")

        expected = {
            (logging.INFO, "TCP: new client(PEER)"),
            (
                logging.INFO,
                r'CLIENT(PEER): IDENTIFY Address:"b" TCP:4150 HTTP:4151 Version:"\x1b[31m"',
            ),
            (logging.INFO, "DB: client(PEER) REGISTER t c"),
            (logging.INFO, "DB: client(PEER) UNREGISTER t c"),
            (logging.ERROR, r'[PEER] - "E_INVALID invalid command \x1b[31m"'),
            (logging.INFO, "DB: client(PEER) disconnected, 1 registrations"),
            (logging.INFO, "PROTOCOL(V1): [PEER] exiting ioloop"),
            (logging.INFO, "DB: adding topic(u)"),
        }

        def logged() -> set[tuple[int, str]]:
            return {(record.levelno, record.getMessage().replace(peer, "PEER")) for record in caplog.records}

        # The tasks of the connections may log after the clients have got their answers.
        await until(lambda: expected <= logged())
    assert [level for level, text in logged() if "pinged" in text] == [logging.DEBUG]
    assert any(text.startswith("200 GET /topics (127.0.0.1:") for _, text in logged())
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("trio_nsq")]
    assert all(line.isprintable() for line in lines)
    assert (
        sum("REGISTER t c" in line and "UN" not in line for line in lines) == 1
    )  # a repeated registration is not logged
