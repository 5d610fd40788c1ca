"""Tests for connections to discovery services that stall, send invalid data, disconnect and return."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from lookup.fake_lookupd import PATIENCE_S, fake_lookupd
from trio_nsq.http.messages import Response
from trio_nsq.lookup.peer import MAX_DELAY_S, MIN_DELAY_S, PING_INTERVAL_S, STEP_TIMEOUT_S
from trio_nsq.lookup.protocol import MAX_RESPONSE_BYTES, PeerInfo
from trio_nsq.lookup.registration import LookupRegistration

INFO = PeerInfo("127.0.0.1", "here", 4151, 4150, "0.1")


@pytest.fixture
def clock() -> MockClock:
    """A clock that moves only while all tasks wait, after data between sockets has arrived."""
    return MockClock(autojump_threshold=0.02)


@dataclass(eq=False)
class Topic:
    channels: dict[str, object] = field(default_factory=dict)


class Here:
    """Topics and channels of a broker, and their registration."""

    def __init__(self, addresses: tuple[str, ...], **options: Any) -> None:
        self.topics: dict[str, Topic] = {}
        settings: dict[str, Any] = {
            "connect_timeout_s": 2,
            "request_timeout_s": 5,
            "random_fraction": lambda: 0.0,
        }
        self.registration = LookupRegistration(self.topics, INFO, addresses, **(settings | options))

    def make(self, topic: str, *channels: str) -> None:
        if topic not in self.topics:
            self.topics[topic] = Topic()
            self.registration.changed(topic)
        for channel in channels:
            self.topics[topic].channels[channel] = object()
            self.registration.changed(topic, channel)

    def delete(self, topic: str, channel: str | None = None) -> None:
        if channel is None:
            del self.topics[topic]
        else:
            del self.topics[topic].channels[channel]
        self.registration.changed(topic, channel)


@asynccontextmanager
async def running(*addresses: str, **options: Any) -> AsyncIterator[Here]:
    here = Here(addresses, **options)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(here.registration.run)
        yield here
        nursery.cancel_scope.cancel()


# ------------------------------------------------------------------------------------------------ registrations


async def test_identify(clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with fake_lookupd() as lookupd:
        async with running(lookupd.tcp_address) as here:
            here.make("t")
            conversation = await lookupd.heard(0, "REGISTER t")
            assert conversation.identity == {
                "broadcast_address": "127.0.0.1",
                "hostname": "here",
                "http_port": 4151,
                "tcp_port": 4150,
                "version": "0.1",
            }
        await lookupd.until(lambda: conversation.ended)
    address = lookupd.tcp_address
    assert f"LOOKUP({address}): adding peer" in caplog.messages
    assert f"LOOKUP connecting to {address}" in caplog.messages
    assert any(line.startswith(f"LOOKUPD({address}): peer info ") for line in caplog.messages)
    assert caplog.messages[-1] == "LOOKUP: closing"


async def test_everything_first_and_then_changes(clock: MockClock) -> None:
    async with fake_lookupd() as lookupd, running(lookupd.tcp_address) as here:
        here.make("a")
        here.make("b", "c", "d#ephemeral")
        await lookupd.heard(0, "REGISTER a", "REGISTER b c", "REGISTER b d#ephemeral")
        here.make("e#ephemeral")
        await lookupd.heard(0, "REGISTER e#ephemeral")
        here.make("a", "c")
        here.delete("b", "c")
        await lookupd.heard(0, "REGISTER a c", "UNREGISTER b c")
        here.delete("b")
        conversation = await lookupd.heard(0, "UNREGISTER b d#ephemeral", "UNREGISTER b")
        assert conversation.registered == {("a",), ("a", "c"), ("e#ephemeral",)}


async def test_drain_mode_is_told_by_another_connection(clock: MockClock) -> None:
    """A service accepts one IDENTIFY for each connection."""
    async with fake_lookupd() as lookupd, running(lookupd.tcp_address) as here:
        here.make("t", "c")
        first = await lookupd.heard(0, "REGISTER t c")
        assert "draining" not in first.identity
        began = trio.current_time()
        here.registration.set_draining(True)
        second = await lookupd.heard(1, "REGISTER t c")
        assert second.identity == first.identity | {"draining": True}
        here.registration.set_draining(True)
        here.make("t", "d")
        await lookupd.heard(1, "REGISTER t d")
        here.registration.set_draining(False)
        third = await lookupd.heard(2, "REGISTER t d")
        assert third.identity == first.identity
        assert third.registered == {("t",), ("t", "c"), ("t", "d")}
        assert trio.current_time() - began < MIN_DELAY_S
        await lookupd.until(lambda: first.ended and second.ended)
        assert len(lookupd.conversations) == 3


async def test_drain_mode_is_told_to_later_connections(clock: MockClock) -> None:
    async with fake_lookupd() as one, fake_lookupd() as two, running(one.tcp_address) as here:
        here.make("t")
        here.registration.set_draining(True)
        here.registration.set_addresses([one.tcp_address, two.tcp_address])
        assert (await two.heard(0, "REGISTER t")).identity["draining"]
        await (await two.conversation(0)).hang_up()
        assert (await two.heard(1, "REGISTER t")).identity["draining"]


async def test_drain_mode_is_told_after_a_connection_that_hangs(clock: MockClock) -> None:
    async with fake_lookupd() as lookupd:
        lookupd.replies["IDENTIFY"] = None
        async with running(lookupd.tcp_address) as here:
            await lookupd.conversation(0)
            here.registration.set_draining(True)
            del lookupd.replies["IDENTIFY"]
            here.make("t")
            assert (await lookupd.heard(1, "REGISTER t")).identity["draining"]


async def test_ten_thousand_channels(clock: MockClock) -> None:
    async with fake_lookupd() as lookupd, running(lookupd.tcp_address) as here:
        here.make("t", *(f"c{number}" for number in range(10_000)))
        conversation = await lookupd.conversation(0)
        await lookupd.until(lambda: len(conversation.lines) == 10_000)
        here.delete("t")
        await lookupd.until(lambda: len(conversation.lines) == 20_001)
        assert conversation.registered == set()
        assert len(lookupd.conversations) == 1


async def test_pings(clock: MockClock) -> None:
    async with fake_lookupd() as lookupd, running(lookupd.tcp_address) as here:
        await lookupd.conversation(0)
        connected = trio.current_time()
        here.make("t")
        await lookupd.heard(0, "REGISTER t", "PING")
        assert trio.current_time() - connected == pytest.approx(PING_INTERVAL_S, abs=0.5)
        conversation = await lookupd.heard(0, "REGISTER t", "PING", "PING", "PING")
        assert trio.current_time() - connected == pytest.approx(3 * PING_INTERVAL_S, abs=0.5)
        assert len(conversation.lines) == 4


async def test_reply_in_pieces(clock: MockClock) -> None:
    async with fake_lookupd() as lookupd:
        lookupd.replies["REGISTER"] = None
        async with running(lookupd.tcp_address) as here:
            here.make("t")
            conversation = await lookupd.heard(0, "REGISTER t")
            for byte in b"\0\0\0\2OK":
                await trio.sleep(STEP_TIMEOUT_S / 2)
                await conversation.say(bytes([byte]))
            await lookupd.heard(0, "REGISTER t", "PING")


# ------------------------------------------------------------------------------------------------ failures


async def test_everything_is_registered_again_after_a_lost_connection(clock: MockClock) -> None:
    async with fake_lookupd() as lookupd, running(lookupd.tcp_address) as here:
        here.make("a", "c")
        here.make("b")
        conversation = await lookupd.heard(0, "REGISTER a c", "REGISTER b")
        await conversation.hang_up()
        here.delete("b")
        here.make("d")
        await lookupd.heard(1, "REGISTER a c", "REGISTER d")
        here.make("e")
        again = await lookupd.heard(1, "REGISTER e")
        assert again.registered == {("a",), ("a", "c"), ("d",), ("e",)}


async def test_lost_connection_is_detected_while_idle(
    clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with fake_lookupd() as lookupd, running(lookupd.tcp_address):
        conversation = await lookupd.conversation(0)
        await trio.testing.wait_all_tasks_blocked(0.01)
        cut_at = trio.current_time()
        await conversation.hang_up()
        await lookupd.conversation(1)
        assert trio.current_time() - cut_at < 1
        assert f"LOOKUPD({lookupd.tcp_address}): it closed the connection" in caplog.messages


@pytest.mark.parametrize(
    ("verb", "reply", "said"),
    [
        (
            "IDENTIFY",
            b"E_BAD_BODY IDENTIFY missing fields",
            "IDENTIFY - 'E_BAD_BODY IDENTIFY missing fields'",
        ),
        ("IDENTIFY", b"OK", "IDENTIFY - 'OK'"),
        ("IDENTIFY", b"\xff\n", "IDENTIFY - '\\ufffd\\n'"),
        ("IDENTIFY", None, f"timed out after {STEP_TIMEOUT_S:g} s"),
        ("REGISTER", b"E_INVALID client must IDENTIFY", "REGISTER t - 'E_INVALID client must IDENTIFY'"),
        ("REGISTER", b"x" * 70_000, f"response body size (70000) is not within 0-{MAX_RESPONSE_BYTES}"),
        ("REGISTER", None, f"timed out after {STEP_TIMEOUT_S:g} s"),
        ("PING", b"", "PING - ''"),
        ("PING", None, f"timed out after {STEP_TIMEOUT_S:g} s"),
    ],
)
async def test_invalid_reply_ends_the_connection(
    clock: MockClock, caplog: pytest.LogCaptureFixture, verb: str, reply: bytes | None, said: str
) -> None:
    async with fake_lookupd() as lookupd:
        lookupd.replies[verb] = reply
        async with running(lookupd.tcp_address) as here:
            here.make("t")
            conversation = await lookupd.conversation(0)
            await lookupd.until(lambda: conversation.ended)
            lookupd.replies.clear()
            await lookupd.heard(1, "REGISTER t")  # and the connection works
    assert f"LOOKUPD({lookupd.tcp_address}): {said}" in caplog.messages


@pytest.mark.parametrize("data", [b"\0\0\0\2OK", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff\xff\xff\xff"])
async def test_unexpected_reply_ends_the_connection(
    clock: MockClock, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    async with fake_lookupd() as lookupd, running(lookupd.tcp_address):
        conversation = await lookupd.conversation(0)
        await conversation.say(data)
        await lookupd.until(lambda: conversation.ended)
        await lookupd.conversation(1)
    assert any(record.levelno == logging.ERROR for record in caplog.records)


async def test_service_that_reads_nothing_delays_no_other(clock: MockClock) -> None:
    async with fake_lookupd() as good:
        listeners = await trio.open_tcp_listeners(
            0, host="127.0.0.1"
        )  # connections are accepted, and nothing is read
        async with listeners[0]:
            deaf = "%s:%d" % listeners[0].socket.getsockname()
            async with running(deaf, good.tcp_address) as here:
                here.make("t")
                await good.heard(0, "REGISTER t")


async def test_delays_between_attempts_grow_until_a_connection_lasts(
    clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with fake_lookupd() as lookupd:
        lookupd.replies["IDENTIFY"] = b"no"
        async with running(lookupd.tcp_address):
            times = []
            for number in range(12):
                await lookupd.until(lambda: len(lookupd.conversations) > number)  # noqa: B023 - awaited at once
                times.append(trio.current_time())
            delays = [after - before for before, after in pairwise(times)]
            expected = [min(0.1 * 2**number, MAX_DELAY_S) for number in range(11)]
            assert delays == pytest.approx(expected, abs=0.05)
            lookupd.replies.clear()
            conversation = await lookupd.heard(12, "PING")
            hung_up_at = trio.current_time()
            await conversation.hang_up()
            await lookupd.conversation(13)
            assert trio.current_time() - hung_up_at < 1


async def test_delays_are_randomized(clock: MockClock) -> None:
    async with fake_lookupd() as lookupd:
        lookupd.replies["IDENTIFY"] = b"no"
        async with running(lookupd.tcp_address, random_fraction=lambda: 0.5):
            await lookupd.until(lambda: len(lookupd.conversations) > 0)
            first = trio.current_time()
            await lookupd.until(lambda: len(lookupd.conversations) > 1)
            assert trio.current_time() - first == pytest.approx(0.075, abs=0.01)


async def test_service_that_starts_later(clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    async with fake_lookupd() as lookupd:
        pass
    port = int(lookupd.tcp_address.rpartition(":")[2])
    async with running(lookupd.tcp_address) as here:
        here.make("t")
        with trio.fail_after(PATIENCE_S):
            while not caplog.messages:
                await trio.sleep(1)
        address = lookupd.tcp_address
        refused = f"LOOKUPD({address}): all attempts to connect to {address} failed: Connection refused"
        assert caplog.messages[0] == refused
        async with fake_lookupd(port) as revived:
            await revived.heard(0, "REGISTER t")


async def test_refused_broker_without_http_gets_a_hint(
    clock: MockClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.INFO", PeerInfo("127.0.0.1", "here", 0, 4150, "0.1"))
    async with fake_lookupd() as lookupd:
        lookupd.replies["IDENTIFY"] = b"E_BAD_BODY IDENTIFY missing fields"
        async with running(lookupd.tcp_address):
            await lookupd.until(lambda: lookupd.conversations and lookupd.conversations[0].ended)
    assert "--broadcast-http-port" in caplog.text


# ------------------------------------------------------------------------------------------------ changed services


async def test_services_can_be_changed_at_runtime(clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with fake_lookupd() as one, fake_lookupd() as two, running() as here:
        here.make("t")
        assert not here.registration.addresses
        here.registration.set_addresses([one.tcp_address])
        first = await one.heard(0, "REGISTER t")
        here.registration.set_addresses([one.tcp_address, two.tcp_address, two.tcp_address])
        await two.heard(0, "REGISTER t")
        here.registration.set_addresses([two.tcp_address])
        await one.until(lambda: first.ended)
        assert here.registration.addresses == (two.tcp_address,)
        assert f"LOOKUP({one.tcp_address}): removing peer" in caplog.messages
        here.make("u")
        await two.heard(0, "REGISTER t", "REGISTER u")
        assert len(one.conversations) == len(two.conversations) == 1
        here.registration.set_addresses([one.tcp_address])
        await one.heard(1, "REGISTER t", "REGISTER u")


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.0.0.1:", "127.0.0.1:0", ":4160", "a b:4160", "::1:4160"]
)
async def test_invalid_address_changes_nothing(clock: MockClock, address: str) -> None:
    with pytest.raises(ValueError):
        Here((address,))
    async with fake_lookupd() as lookupd, running(lookupd.tcp_address) as here:
        await lookupd.conversation(0)
        with pytest.raises(ValueError):
            here.registration.set_addresses(["127.0.0.1:1", address])
        assert here.registration.addresses == (lookupd.tcp_address,)
        here.make("t")
        await lookupd.heard(0, "REGISTER t")


async def test_services_can_be_changed_after_the_end(clock: MockClock) -> None:
    async with fake_lookupd() as lookupd:
        async with running() as here:
            pass
        here.registration.set_addresses([lookupd.tcp_address])
        await trio.sleep(1)
        assert not lookupd.conversations


async def test_unknown_host(clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    address = f"{'x' * 70}:4160"  # longer than any host name
    async with fake_lookupd() as lookupd, running(address, lookupd.tcp_address):
        await lookupd.conversation(0)
        await trio.testing.wait_all_tasks_blocked(0.01)
    assert any(line.startswith(f"LOOKUPD({address}): ") for line in caplog.messages)
    assert not any(record.exc_info for record in caplog.records)


# ------------------------------------------------------------------------------------------------ queries


async def test_channels_of_all_services_are_combined(clock: MockClock) -> None:
    async with fake_lookupd() as one, fake_lookupd() as two:
        one.channels["t#ephemeral"] = ["b", "a", "gone#ephemeral", "not valid", "", None]
        two.channels["t#ephemeral"] = ["c", "b", "x" * 65]
        async with running(one.tcp_address, two.tcp_address) as here:
            assert await here.registration.channels("t#ephemeral") == ["a", "b", "c"]
            assert await here.registration.channels("unknown") == []
        assert one.asked == two.asked == ["t#ephemeral", "unknown"]


BAD_ANSWERS = [
    Response.text("no", 500),
    Response.text("no JSON"),
    Response.json({"channels": "a"}),
    Response.json({"channels": ["a" * 64] * 100_000}),
]


@pytest.mark.parametrize("bad", BAD_ANSWERS, ids=["500", "no JSON", "wrong type", "too long"])
async def test_service_with_an_invalid_answer(
    clock: MockClock, caplog: pytest.LogCaptureFixture, bad: Response
) -> None:
    async with (
        fake_lookupd() as one,
        fake_lookupd() as two,
        running(one.tcp_address, two.tcp_address) as here,
    ):
        one.channels["t"] = ["a"]
        two.channels["t"] = bad
        assert await here.registration.channels("t") == ["a"]
        (record,) = caplog.records
        prefix = "failed to query nsqlookupd for channels to pre-create for topic t - "
        assert record.levelno == logging.WARNING
        assert record.message.startswith(f"{prefix}{two.http_address}: ")
        one.channels["t"] = bad
        assert await here.registration.channels("t") == []
        assert caplog.records[1].levelno == logging.ERROR


async def test_silent_service(clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        fake_lookupd() as one,
        fake_lookupd() as two,
        running(one.tcp_address, two.tcp_address) as here,
    ):
        one.channels["t"] = ["a"]
        two.gate = trio.Event()
        await two.conversation(0)
        started = trio.current_time()
        assert await here.registration.channels("t") == ["a"]
        assert trio.current_time() - started == pytest.approx(5, abs=0.5)
        assert "no answer within 5 s" in caplog.text


async def test_new_broker_connects_before_it_queries(clock: MockClock) -> None:
    async with fake_lookupd() as lookupd:
        lookupd.channels["t"] = ["c"]
        async with running(lookupd.tcp_address) as here:
            assert here.registration.addresses
            assert not lookupd.conversations
            assert await here.registration.channels("t") == ["c"]


async def test_query_without_services(clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    async with fake_lookupd() as lookupd:
        pass
    complaint = "no available nsqlookupd to query for channels to pre-create for topic t"
    async with running(lookupd.tcp_address) as here:
        started = trio.current_time()
        assert await here.registration.channels("t") == []
        assert trio.current_time() - started <= STEP_TIMEOUT_S
        assert complaint in caplog.messages
        caplog.clear()
    async with fake_lookupd() as lookupd:
        lookupd.fields["broadcast_address"] = ""
        async with running(lookupd.tcp_address) as here:
            assert await here.registration.channels("t") == []
            assert f"LOOKUPD({lookupd.tcp_address}): no broadcast address" in caplog.messages
            assert complaint in caplog.messages


async def test_query_without_a_connection(clock: MockClock) -> None:
    async with fake_lookupd() as lookupd, running(lookupd.tcp_address) as here:
        here.make("other")
        lookupd.channels["t"] = ["c"]
        conversation = await lookupd.heard(0, "REGISTER other")
        lookupd.replies["IDENTIFY"] = None
        await conversation.hang_up()
        await lookupd.until(lambda: len(lookupd.conversations) > 1)
        assert await here.registration.channels("t") == ["c"]


@pytest.mark.parametrize(
    "fields", [{"http_port": 99_999}, {"http_port": -1}, {"broadcast_address": "x" * 70}]
)
async def test_service_with_an_invalid_address(
    clock: MockClock, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    async with fake_lookupd() as lookupd:
        lookupd.fields |= fields
        async with running(lookupd.tcp_address) as here:
            assert await here.registration.channels("t") == []
    assert "failed to query nsqlookupd" in caplog.text


async def test_removed_service_is_not_awaited(clock: MockClock) -> None:
    async with fake_lookupd() as lookupd, running(lookupd.tcp_address) as here:
        lookupd.replies["IDENTIFY"] = None
        await lookupd.conversation(0)
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.registration.channels, "t")
            await trio.testing.wait_all_tasks_blocked()
            here.registration.set_addresses([])
        assert trio.current_time() - started < STEP_TIMEOUT_S / 2


async def test_query_during_the_removal_of_a_service(clock: MockClock) -> None:
    async with fake_lookupd() as lookupd, running(lookupd.tcp_address) as here:
        lookupd.channels["t"] = ["c"]
        lookupd.gate = trio.Event()
        found: list[str] = []

        async def ask() -> None:
            found.extend(await here.registration.channels("t"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await lookupd.until(lambda: lookupd.asked)
            here.registration.set_addresses([])
            lookupd.gate.set()
        assert found == ["c"]
