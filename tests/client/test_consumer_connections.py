"""A consumer whose first connection cannot be made, or is refused."""

import socket
from typing import Any

import pytest
import trio
import trio.testing

from client.consumers import accept_and_subscribe, eager_consumer_of
from client.fake_broker import FakeBroker, bounded, error, message
from trio_nsq.client import BrokerError, ConnectionFailed, Consumer
from trio_nsq.client.connection import HANDSHAKE_TIMEOUT_S


async def entering_fails(consumer: Consumer) -> ConnectionFailed:
    with pytest.raises(ConnectionFailed) as caught:
        await consumer.__aenter__()
    return caught.value


@bounded
async def test_a_refused_connection_is_raised_with_address_and_cause(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.stop()
    failure = await entering_fails(eager_consumer_of(broker))
    assert str(failure) == f"could not connect to {broker.address}: Connection refused"
    assert failure.address == broker.address
    assert isinstance(failure.__cause__, ConnectionRefusedError)
    assert not caplog.records  # what is raised is not logged as well


@bounded
async def test_a_host_that_does_not_exist_is_raised() -> None:
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
async def test_a_name_that_cannot_be_a_hosts_is_told() -> None:
    failure = await entering_fails(Consumer("topic", "channel", nsqd_tcp_addresses=["a..b:4150"]))
    assert "'a..b' is not a host name" in failure.reason


@bounded
async def test_a_host_that_does_not_answer_is_given_up(clock: trio.testing.MockClock) -> None:
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
async def test_when_all_are_refused_all_are_named(broker: FakeBroker, other_broker: FakeBroker) -> None:
    broker.stop()
    other_broker.stop()
    failure = await entering_fails(eager_consumer_of(broker, other_broker))
    assert failure.address.split(", ") == [broker.address, other_broker.address]
    assert failure.reason.count("Connection refused") == 2


@bounded
async def test_one_broker_of_two_is_enough_and_the_other_is_tried_again(
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
async def test_a_refusal_is_raised_in_the_brokers_words(broker: FakeBroker, step: str) -> None:
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
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "TCP port"),
        (b"\0\0\0\x06\0\0\0\0[]", "TCP port"),
        (b"\0\0\0\x05\0\0\0\0[", "TCP port"),
        (message(1), "a message"),
        (b"", "closed the connection"),
    ],
)
@bounded
async def test_something_else_than_a_broker_is_told_apart(
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
async def test_a_broker_that_accepts_and_says_nothing_is_given_up(
    broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    async def play() -> None:
        peer = await broker.accept()
        await peer.expect_identify()
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(HANDSHAKE_TIMEOUT_S)
        await peer.expect_end()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(play)
        assert "no answer within 10 s" in (await entering_fails(eager_consumer_of(broker))).reason


@bounded
async def test_cancelling_the_entry_closes_the_socket(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(eager_consumer_of(broker).__aenter__)
        peer = await broker.accept()
        await peer.greet()
        await peer.expect(b"SUB topic channel\n")
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await peer.expect_end()


@bounded
async def test_a_consumer_is_entered_only_once(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept_and_subscribe, broker)
        async with eager_consumer_of(broker) as consumer:
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(RuntimeError, match="once"):
                await consumer.__aenter__()
