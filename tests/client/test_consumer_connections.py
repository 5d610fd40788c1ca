"""A consumer whose connections cannot be made, are refused, or are lost, at every step."""

import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

from client.fake_broker import (
    FakeBroker,
    Peer,
    bounded,
    error,
    fins,
    identify_reply,
    message,
    message_id,
)
from trio_nsq.client import BrokerError, ConnectionFailed, Consumer
from trio_nsq.client.connection import HANDSHAKE_TIMEOUT_S
from trio_nsq.protocol import OK_FRAME


def consumer_of(*brokers: FakeBroker, **options: Any) -> Consumer:
    defaults = {"reconnect_min_s": 0.001, "reconnect_max_s": 0.001, "close_timeout_s": 0, "max_in_flight": 5}
    addresses = [broker.address for broker in brokers]
    return Consumer("topic", "channel", nsqd_tcp_addresses=addresses, **defaults | options)


async def entering_fails(consumer: Consumer) -> ConnectionFailed:
    with pytest.raises(ConnectionFailed) as caught:
        await consumer.__aenter__()
    return caught.value


# ------------------------------------------------------------------------------------------------ the first connection


@bounded
async def test_a_refused_connection_is_raised_with_address_and_cause(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.stop()
    failure = await entering_fails(consumer_of(broker))
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
    failure = await entering_fails(consumer_of(broker, other_broker))
    assert failure.address.split(", ") == [broker.address, other_broker.address]
    assert failure.reason.count("Connection refused") == 2


@bounded
async def test_one_broker_of_two_is_enough_and_the_other_is_tried_again(
    broker: FakeBroker, other_broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    other_broker.stop()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept_and_subscribe, broker)
        async with consumer_of(broker, other_broker) as consumer:
            assert consumer.stats().connections == 1
            await other_broker.start()
            peer = await accept_and_subscribe(other_broker, ready=2)
            assert consumer.stats().connections == 2
            await peer.send(message(1))
            assert (await anext(consumer)).nsqd_address == other_broker.address
    assert (
        f"could not connect to {other_broker.address}: Connection refused; next attempt in 0.0" in caplog.text
    )


async def accept_and_subscribe(broker: FakeBroker, ready: int = 5) -> Peer:
    peer = await broker.accept()
    await peer.subscribe(ready=ready)
    return peer


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
        failure = await entering_fails(consumer_of(broker))
    expected = (
        "E_BAD_BODY IDENTIFY heartbeat interval" if step == "magic" else "E_SUB_FAILED SUB failed exiting"
    )
    assert expected in failure.reason
    assert isinstance(failure.__cause__, BrokerError)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "TCP port"),
        (b"\0\0\0\x06\0\0\0\0{}", "TCP port"),
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
        assert reason in (await entering_fails(consumer_of(broker))).reason


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
        assert "no answer within 10 s" in (await entering_fails(consumer_of(broker))).reason


@bounded
async def test_cancelling_the_entry_closes_the_socket(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(consumer_of(broker).__aenter__)
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
        async with consumer_of(broker) as consumer:
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(RuntimeError, match="once"):
                await consumer.__aenter__()


# ------------------------------------------------------------------------------------------------ losing it


Step = Callable[[Peer], Awaitable[None]]


async def at_once(peer: Peer) -> None:
    pass


async def after_identify(peer: Peer) -> None:
    await peer.expect_identify()


async def within_the_reply(peer: Peer) -> None:
    await peer.expect_identify()
    await peer.send(identify_reply()[:20])


async def after_the_reply(peer: Peer) -> None:
    await peer.greet()


async def after_sub(peer: Peer) -> None:
    await peer.greet()
    await peer.expect(b"SUB topic channel\n")


async def within_ok(peer: Peer) -> None:
    await after_sub(peer)
    await peer.send(OK_FRAME[:5])


async def after_ok(peer: Peer) -> None:
    await after_sub(peer)
    await peer.send(OK_FRAME)


async def after_rdy(peer: Peer) -> None:
    await peer.subscribe(ready=5)


async def within_a_message(peer: Peer) -> None:
    await peer.subscribe(ready=5)
    await peer.send(message(7)[:-1])


async def after_a_message(peer: Peer) -> None:
    await peer.subscribe(ready=5)
    await peer.send(message(7))


async def after_an_error(peer: Peer) -> None:
    await peer.subscribe(ready=5)
    await peer.send(error("E_INVALID cannot RDY in current state"))


async def after_nonsense(peer: Peer) -> None:
    await peer.subscribe(ready=5)
    await peer.send(b"\xff" * 100)


STEPS = [
    at_once,
    after_identify,
    within_the_reply,
    after_the_reply,
    after_sub,
    within_ok,
    after_ok,
    after_rdy,
    within_a_message,
    after_a_message,
    after_an_error,
    after_nonsense,
]


@pytest.mark.parametrize("cut", [Peer.hang_up, Peer.reset])
@pytest.mark.parametrize("step", STEPS)
@bounded
async def test_a_connection_cut_at_any_step_is_made_again(
    broker: FakeBroker, step: Step, cut: Callable[[Peer], None]
) -> None:
    async with trio.open_nursery() as nursery:
        first: list[Peer] = []

        async def accept() -> None:
            first.append(await accept_and_subscribe(broker))

        nursery.start_soon(accept)
        async with consumer_of(broker) as consumer:
            await trio.testing.wait_all_tasks_blocked()
            cut(first[0])
            peer = await broker.accept()
            await step(peer)
            cut(peer)
            peer = await accept_and_subscribe(broker)
            await peer.send(message(1))
            async for received in consumer:
                received.finish()
                if received.id == message_id(1):
                    break
            await peer.expect(fins(1))
            assert consumer.stats().connections == 1


@bounded
async def test_answers_to_a_lost_connection_go_nowhere(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_two_and_hang_up, broker)
        async with consumer_of(broker) as consumer:
            batch = await anext(consumer.batches())
            peer = await accept_and_subscribe(broker)
            first, second = batch
            first.touch()
            first.finish()
            second.requeue()
            assert consumer.stats().finished == consumer.stats().requeued == 0
            await peer.expect_nothing()


async def send_two_and_hang_up(broker: FakeBroker) -> None:
    peer = await accept_and_subscribe(broker)
    await peer.send(message(1), message(2))
    await trio.testing.wait_all_tasks_blocked()
    peer.hang_up()


@bounded
async def test_what_nobody_took_from_a_lost_connection_is_left_to_its_redelivery(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_two_and_hang_up, broker)
        async with consumer_of(broker) as consumer:
            peer = await accept_and_subscribe(broker)
            await peer.send(message(2, attempts=2))
            received = await anext(consumer)
            assert (received.id, received.attempts) == (message_id(2), 2)
            assert consumer.stats().received == 3


@bounded
async def test_a_loop_waits_while_no_broker_is_there(broker: FakeBroker) -> None:
    got: list[bytes] = []

    async def loop(consumer: Consumer) -> None:
        async for received in consumer:
            got.append(received.body)

    async with trio.open_nursery() as nursery:
        peers: list[Peer] = []

        async def accept() -> None:
            peers.append(await accept_and_subscribe(broker))

        nursery.start_soon(accept)
        async with consumer_of(broker) as consumer:
            nursery.start_soon(loop, consumer)
            await trio.testing.wait_all_tasks_blocked()
            broker.stop()
            peers[0].hang_up()
            while consumer.stats().connections:
                await trio.testing.wait_all_tasks_blocked()
            await broker.start()
            peer = await accept_and_subscribe(broker)
            await peer.send(message(1))
            await trio.testing.wait_all_tasks_blocked()
            assert got == [b"body 1"]


@bounded
async def test_the_reason_of_a_loss_is_logged(broker: FakeBroker, caplog: pytest.LogCaptureFixture) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_error_and_hang_up, broker)
        async with consumer_of(broker):
            await accept_and_subscribe(broker)
    (record,) = [record for record in caplog.records if record.name == "trio_nsq.client"]
    assert record.levelno == logging.WARNING
    assert record.message.startswith(f"{broker.address} answered E_INVALID so it goes; connecting again in")


async def send_error_and_hang_up(broker: FakeBroker) -> None:
    peer = await accept_and_subscribe(broker)
    await peer.send(error("E_INVALID so it goes"))
    peer.hang_up()


@bounded
async def test_a_silent_broker_is_given_up_after_two_heartbeat_intervals(
    broker: FakeBroker, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with trio.open_nursery() as nursery:
        peers: list[Peer] = []

        async def accept() -> None:
            peers.append(await accept_and_subscribe(broker))

        nursery.start_soon(accept)
        async with consumer_of(broker, heartbeat_interval_ms=4000) as consumer:
            await trio.testing.wait_all_tasks_blocked()
            clock.jump(7.5)
            await trio.testing.wait_all_tasks_blocked()
            assert consumer.stats().connections == 1
            clock.jump(0.5)
            await peers[0].expect_end()
            await accept_and_subscribe(broker)
    assert "not even a heartbeat for 8 s" in caplog.text


@bounded
async def test_a_broker_that_drops_every_connection_is_asked_less_and_less(
    broker: FakeBroker, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with trio.open_nursery() as nursery:
        peers: list[Peer] = []

        async def accept() -> None:
            peers.append(await accept_and_subscribe(broker))

        nursery.start_soon(accept)
        consumer = consumer_of(broker, reconnect_min_s=1, reconnect_max_s=60, random=lambda: 0.0)
        async with consumer:
            await trio.testing.wait_all_tasks_blocked()
            for delay_s in (1, 2, 4):
                peers.pop().hang_up()
                await trio.testing.wait_all_tasks_blocked()
                assert f"again in {delay_s}.0 s" in caplog.records[-1].message
                clock.jump(delay_s)
                await accept()
