"""Tests for a consumer whose first connection fails or is refused."""

import socket
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from client.support.consumers import accept_and_subscribe, eager_consumer_of, hold_open
from client.support.fake_broker import FakeBroker, Peer, bounded, error, identify_reply, message
from trio_nsq.client import BrokerError, ConnectionFailed, Consumer
from trio_nsq.client.connection.connection import HANDSHAKE_TIMEOUT_S, LEADER_TIMEOUT_S
from trio_nsq.protocol.frames import OK_FRAME


async def entering_fails(consumer: Consumer) -> ConnectionFailed:
    with pytest.raises(ConnectionFailed) as caught:
        await consumer.__aenter__()
    return caught.value


@bounded
async def test_refused_connection_is_raised_with_address_and_cause(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.stop()
    failure = await entering_fails(eager_consumer_of(broker))
    assert str(failure) == f"could not connect to {broker.address}: Connection refused"
    assert failure.address == broker.address
    assert isinstance(failure.__cause__, ConnectionRefusedError)
    assert not caplog.records  # what is raised is not logged, too


@bounded
async def test_entering_waits_for_a_broker_that_starts_in_time(
    broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    broker.stop()
    subscribed = trio.Event()
    async with trio.open_nursery() as nursery:

        async def start_later() -> None:
            for _ in range(3):
                await trio.testing.wait_all_tasks_blocked(0.01)
                clock.jump(0.9)
            await broker.start()
            await accept_and_subscribe(broker)
            subscribed.set()

        nursery.start_soon(start_later)
        async with eager_consumer_of(broker, connect_timeout_s=60, reconnect_min_s=0.5, reconnect_max_s=1):
            await subscribed.wait()


@bounded
async def test_entering_gives_up_after_the_connect_timeout(
    broker: FakeBroker, other_broker: FakeBroker, autojump_clock: trio.testing.MockClock
) -> None:
    broker.stop()
    other_broker.stop()
    began = trio.current_time()
    failure = await entering_fails(
        eager_consumer_of(broker, other_broker, connect_timeout_s=10, reconnect_min_s=0.5, reconnect_max_s=2)
    )
    assert 10 <= trio.current_time() - began < 11  # the last attempt is at the deadline
    assert broker.address in failure.address
    assert other_broker.address in failure.address


@bounded
async def test_unknown_host_is_raised() -> None:
    class NoNames(trio.abc.HostnameResolver):
        async def getaddrinfo(self, *args: object) -> Any:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        async def getnameinfo(self, *args: object) -> Any:
            raise NotImplementedError

    trio.socket.set_custom_hostname_resolver(NoNames())
    failure = await entering_fails(Consumer("topic", "channel", nsqd_tcp_addresses=["nowhere.invalid:4150"]))
    assert failure.address == "nowhere.invalid:4150"
    assert failure.reason == "the host cannot be found: Name or service not known"


@bounded
async def test_invalid_host_name_is_reported() -> None:
    failure = await entering_fails(Consumer("topic", "channel", nsqd_tcp_addresses=["a..b:4150"]))
    assert "'a..b' is not a host name" in failure.reason


@bounded
async def test_host_that_does_not_answer_times_out(clock: trio.testing.MockClock) -> None:
    class NoAnswer(trio.abc.HostnameResolver):
        async def getaddrinfo(self, *args: object) -> Any:
            clock.jump(2.5)
            await trio.sleep_forever()

        async def getnameinfo(self, *args: object) -> Any:
            raise NotImplementedError

    trio.socket.set_custom_hostname_resolver(NoAnswer())
    consumer = Consumer("topic", "channel", nsqd_tcp_addresses=["slow.invalid:4150"], dial_timeout_s=2.5)
    assert (await entering_fails(consumer)).reason == "no answer within 2.5 s"


@bounded
async def test_if_all_are_refused_all_are_named(broker: FakeBroker, other_broker: FakeBroker) -> None:
    broker.stop()
    other_broker.stop()
    failure = await entering_fails(eager_consumer_of(broker, other_broker))
    assert failure.address.split(", ") == [broker.address, other_broker.address]
    assert failure.reason.count("Connection refused") == 2


@bounded
async def test_one_of_two_brokers_is_enough_and_the_other_is_retried(
    broker: FakeBroker, other_broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    other_broker.stop()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept_and_subscribe, broker)
        async with eager_consumer_of(broker, other_broker) as consumer:
            assert consumer.stats().connections == 1
            await other_broker.start()
            peer = await accept_and_subscribe(other_broker, ready=2)
            assert consumer.stats().connections == 2
            await peer.send(message(1))
            assert (await anext(consumer)).nsqd_address == other_broker.address
    assert (
        f"could not connect to {other_broker.address}: Connection refused; next attempt in 0.0" in caplog.text
    )


@pytest.mark.parametrize("step", ["magic", "sub"])
@bounded
async def test_refusal_has_the_text_of_the_broker(broker: FakeBroker, step: str) -> None:
    async def refuse() -> None:
        peer = await broker.accept()
        if step == "magic":
            await peer.expect_identify()
            await peer.send(error("E_BAD_BODY IDENTIFY heartbeat interval (61000) is invalid"))
        else:
            await peer.greet()
            await peer.expect(b"SUB topic channel\n")
            await peer.send(error("E_SUB_FAILED SUB failed exiting"))
        peer.hang_up()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(refuse)
        failure = await entering_fails(eager_consumer_of(broker))
    expected = (
        "E_BAD_BODY IDENTIFY heartbeat interval" if step == "magic" else "E_SUB_FAILED SUB failed exiting"
    )
    assert expected in failure.reason
    assert isinstance(failure.__cause__, BrokerError)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "use the port of the TCP protocol"),
        (b"\0\0\0\x06\0\0\0\0[]", "TCP port"),
        (b"\0\0\0\x05\0\0\0\0[", "TCP port"),
        (message(1), "a message"),
        (b"", "closed the connection"),
    ],
)
@bounded
async def test_server_that_is_not_a_broker_is_detected(
    broker: FakeBroker, answer: bytes, reason: str
) -> None:
    async def play() -> None:
        peer = await broker.accept()
        await peer.expect_identify()
        await peer.send(answer)
        if answer:
            await peer.expect_end()
        peer.hang_up()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(play)
        assert reason in (await entering_fails(eager_consumer_of(broker))).reason


@bounded
async def test_silent_broker_times_out(
    broker: FakeBroker, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        peer = await broker.accept()
        await peer.expect_identify()
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(HANDSHAKE_TIMEOUT_S)
        await trio.testing.wait_all_tasks_blocked()
        assert (
            "no answer within 10 s: it hangs, or its cluster has no leader; waiting up to 35 s" in caplog.text
        )
        clock.jump(LEADER_TIMEOUT_S - HANDSHAKE_TIMEOUT_S)
        await peer.expect_end()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(play)
        assert "no answer within 35 s" in (await entering_fails(eager_consumer_of(broker))).reason


@bounded
async def test_cancelled_entry_closes_the_socket(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(eager_consumer_of(broker).__aenter__)
        peer = await broker.accept()
        await peer.greet()
        await peer.expect(b"SUB topic channel\n")
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await peer.expect_end()


@bounded
async def test_consumer_can_be_entered_only_once(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept_and_subscribe, broker)
        async with eager_consumer_of(broker) as consumer:
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(RuntimeError, match="once"):
                await consumer.__aenter__()


# ---------------------------------------------------------------------- private channels


def private_consumer_of(broker: FakeBroker) -> Consumer:
    return Consumer(
        "topic",
        "look#ephemeral",
        nsqd_tcp_addresses=[broker.address],
        private_channel=True,
        close_timeout_s=0,
        reconnect_min_s=0.001,
        reconnect_max_s=0.001,
    )


async def greet(broker: FakeBroker, *, private: bool) -> Peer:
    """Accept a connection, and answer IDENTIFY with or without support for private channels."""
    peer = await broker.accept()
    assert (await peer.expect_identify())["private_channel"] is True
    await peer.send(identify_reply(**({"private_channel": True} if private else {})))
    return peer


@bounded
async def test_private_channel_is_requested(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery:

        async def serve() -> None:
            peer = await greet(broker, private=True)
            await peer.expect(b"SUB topic look#ephemeral\n")
            await peer.send(OK_FRAME)
            await peer.expect(b"RDY 1\n")
            nursery.cancel_scope.cancel()

        nursery.start_soon(serve)
        nursery.start_soon(hold_open, private_consumer_of(broker))


@bounded
async def test_broker_without_private_channels_is_refused(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery:

        async def serve() -> None:
            peer = await greet(broker, private=False)
            await peer.expect_end()
            peer.hang_up()

        nursery.start_soon(serve)
        failure = await entering_fails(private_consumer_of(broker))
    assert failure.reason == "it has no private channels, and private_channel is True"


@bounded
async def test_broker_without_private_channels_may_be_accepted(
    broker: FakeBroker,
) -> None:
    consumer = private_consumer_of(broker)
    asked = []

    async def accept_it(address: str) -> None:
        asked.append(address)

    consumer.without_private_channels = accept_it
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold_open, consumer)
        for _ in range(2):
            peer = await greet(broker, private=False)
            await peer.expect(b"SUB topic look#ephemeral\n")
            await peer.send(OK_FRAME)
            await peer.expect(b"RDY 1\n")
            peer.hang_up()
        nursery.cancel_scope.cancel()
    assert asked == [broker.address] * 2


@bounded
async def test_exception_of_the_callback_ends_the_consumer(
    broker: FakeBroker,
) -> None:
    consumer = private_consumer_of(broker)

    async def refuse(address: str) -> None:
        raise RuntimeError("not here")

    consumer.without_private_channels = refuse
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(greet, broker, private=False))
        with pytest.raises(ExceptionGroup) as caught:
            await consumer.__aenter__()
    assert caught.group_contains(RuntimeError, match="not here")


def test_private_channel_is_ephemeral() -> None:
    with pytest.raises(ValueError, match="'channel' must end in #ephemeral"):
        Consumer("topic", "channel", private_channel=True)
