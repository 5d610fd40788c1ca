"""Tests for hooks: what producers and consumers tell a program's own code, under both loops and without async code."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from itertools import count
from typing import Any

import anyio
import pytest

from client.support.fake_broker import FakeBroker, bounded, mpub, pub
from client.support.loops import Loop, on_both, run
from client.support.producers import Outcome, opened
from interop.peers import Broker, free_address, qcli_serve
from trio_nsq import (
    ConnectionFailed,
    Consumer,
    DeadLetter,
    DecodeFailed,
    Hooks,
    Message,
    MessageBatch,
    NSQError,
    ProcessCall,
    Producer,
    PublishCall,
    PublishFailed,
    sync,
)
from trio_nsq.protocol import pack_messages
from trio_nsq.protocol.frames import OK_FRAME
from trio_nsq.protocol.headers import MAX_HEADERS

ADDED = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
_topics = map("topic{}".format, count())
_place: ContextVar[str] = ContextVar("place", default="elsewhere")


class Recorder(Hooks):
    """Notes what it is told, and adds headers."""

    def __init__(self, added: dict[str, str] | None = None) -> None:
        self.added = added
        self.publishes: list[PublishCall] = []
        self.publish_ends: list[tuple[PublishCall, BaseException | None]] = []
        self.batches: list[tuple[str, str, int]] = []
        self.processes: list[ProcessCall] = []
        self.process_ends: list[tuple[ProcessCall, BaseException | None]] = []
        self.connections: list[tuple[str, str, Exception | None]] = []
        self.places: list[str] = []

    def publish_started(self, call: PublishCall) -> None:
        self.publishes.append(call)
        self.places.append(_place.get())
        if self.added is not None:
            call.add_headers(self.added)

    def publish_ended(self, call: PublishCall, error: BaseException | None) -> None:
        self.publish_ends.append((call, error))

    def received(self, topic: str, channel: str, batch: MessageBatch) -> None:
        self.batches.append((topic, channel, len(batch)))

    def process_started(self, call: ProcessCall) -> None:
        self.processes.append(call)
        _place.set("handler")

    def process_ended(self, call: ProcessCall, error: BaseException | None) -> None:
        assert _place.get() == "handler"
        self.process_ends.append((call, error))

    def connected(self, nsqd_address: str) -> None:
        self.connections.append(("connected", nsqd_address, None))

    def connection_failed(self, nsqd_address: str, error: ConnectionFailed) -> None:
        self.connections.append(("failed", nsqd_address, error))

    def disconnected(self, nsqd_address: str, error: NSQError | None) -> None:
        self.connections.append(("disconnected", nsqd_address, error))


class Broken(Recorder):
    """Raises in each method."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def __getattribute__(self, name: str) -> Any:
        if name in vars(Hooks) and name not in ("install", "uninstall"):
            return self.fail
        return super().__getattribute__(name)

    def fail(self, *_: object) -> None:
        raise self.error("broken")


@pytest.fixture(scope="module")
def broker_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with qcli_serve(tmp_path_factory.mktemp("broker") / "data", "--sync=interval") as process:
        yield process


@pytest.fixture
def topic(broker_process: Broker) -> str:
    """A new topic with the channel `c`."""
    broker_process.create(name := next(_topics), "c")
    return name


@pytest.mark.slow  # starts a broker
@on_both
def test_publishes(loop: Loop, broker_process: Broker, topic: str) -> None:
    async def main() -> None:
        hooks = Recorder(ADDED)
        address = broker_process.tcp_address
        _place.set("program")
        async with Producer(address, hooks=hooks) as producer:
            await producer.publish(topic, b"0")
            await producer.publish(topic, b"1", headers={"a": "1", "traceparent": "old"}, defer_s=0.001)
            await producer.submit(topic, b"2").wait()
            await producer.publish_many(topic, [b"3", b"4"], headers=[{}, {"a": "2"}])
            await producer.publish_many(topic, [b"5", b"6"], defer_s=0.001)
            await producer.publish_many(topic, [])
            await producer.publish_set(topic, pack_messages([b"7", b"8"]))
        assert [(call.topic, call.count, call.is_list, call.is_packed) for call in hooks.publishes] == [
            (topic, 1, False, False),
            (topic, 1, False, False),
            (topic, 1, False, False),
            (topic, 2, True, False),
            (topic, 2, True, False),
            (topic, 2, True, True),
        ]
        assert [call.bodies for call in hooks.publishes] == [
            [b"0"],
            [b"1"],
            [b"2"],
            [b"3", b"4"],
            [b"5", b"6"],
            [],
        ]
        assert [call.defer_s for call in hooks.publishes] == [0, 0.001, 0, 0, 0.001, 0]
        assert hooks.publish_ends == [(call, None) for call in hooks.publishes]
        assert [call.nsqd_address for call in hooks.publishes] == [*[address] * 3, None, None, address]
        assert hooks.places == ["program"] * 6
        headers: dict[bytes, Mapping[str, str]] = {}
        async with Consumer(topic, "c", nsqd_tcp_addresses=address, max_in_flight=20) as consumer:
            while len(headers) < 9:
                message = await consumer.get()
                headers[message.body] = message.headers
                message.finish()
        assert headers == {b"%d" % number: ADDED for number in range(7)} | {
            b"1": {"a": "1"} | ADDED,
            b"4": {"a": "2"} | ADDED,
            b"7": {},
            b"8": {},
        }

    run(loop, main)


@pytest.mark.slow
@on_both
def test_handlers(loop: Loop, broker_process: Broker, topic: str) -> None:
    """Also one that fails, and dead letters, which are published with the same hooks."""

    async def main() -> None:
        hooks = Recorder()
        handled: list[str] = []
        async with Producer(broker_process.tcp_address) as producer:
            for body in (b"ok", b"bad", b"letter"):
                await producer.publish(topic, body, headers={"of": body.decode()})

        async def handle(message: Message, value: str) -> DeadLetter | None:
            handled.append(_place.get())
            await anyio.lowlevel.checkpoint()
            if value == "letter":
                return DeadLetter(f"{topic}-dead")
            return None

        def decode(body: bytes) -> str:
            if body == b"bad":
                raise ValueError("bad")
            return body.decode()

        async with Consumer(
            topic, "c", nsqd_tcp_addresses=broker_process.tcp_address, hooks=hooks
        ) as consumer:

            async def failed(message: Message, error: Exception) -> DeadLetter:
                return DeadLetter(f"{topic}-dead")

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: consumer.run(handle, decode=decode, on_failure=failed))
                while consumer.stats().finished < 3:
                    await anyio.sleep(0.001)
                tasks.cancel_scope.cancel()
        assert sum(many for *_, many in hooks.batches) == 3
        assert {(of, channel) for of, channel, _ in hooks.batches} == {(topic, "c")}
        ends = {call.bodies[0]: (call, error) for call, error in hooks.process_ends}
        for body, (call, _) in ends.items():
            assert (call.topic, call.channel, call.is_batch) == (topic, "c", False)
            assert (call.attempts, call.headers) == ([1], [{"of": body.decode()}])
            assert call.nsqd_address == broker_process.tcp_address
            assert len(call.ids[0]) == 16
            assert call.timestamps_ns[0]
        assert {body: type(error) for body, (_, error) in ends.items()} == {
            b"ok": type(None),
            b"bad": DecodeFailed,
            b"letter": type(None),
        }
        assert ends[b"letter"][0].answer == DeadLetter(f"{topic}-dead")
        assert len(hooks.processes) == 3
        assert handled == ["handler"] * 2
        assert [(call.topic, call.bodies) for call in hooks.publishes] == [
            (f"{topic}-dead", [b"bad"]),
            (f"{topic}-dead", [b"letter"]),
        ]

    run(loop, main)


@pytest.mark.slow
@on_both
def test_blocks_that_process(loop: Loop, broker_process: Broker, topic: str) -> None:
    """A message, and a batch."""

    async def main() -> None:
        hooks = Recorder()
        async with Producer(broker_process.tcp_address) as producer:
            await producer.publish_many(topic, [b"1", b"2", b"3"])
        async with Consumer(
            topic, "c", nsqd_tcp_addresses=broker_process.tcp_address, hooks=hooks, max_in_flight=3
        ) as consumer:
            message = await consumer.get()
            with pytest.raises(LookupError), consumer.processing(message):
                raise LookupError
            message.finish()
            async for batch in consumer.batches(max_messages=2, max_wait_s=60):
                with consumer.processing(batch):
                    batch.finish()
                break
            with pytest.raises(KeyboardInterrupt), consumer.processing(message):
                raise KeyboardInterrupt
        ends = [(call.bodies, call.is_batch, type(error)) for call, error in hooks.process_ends]
        assert ends == [
            ([b"1"], False, LookupError),
            ([b"2", b"3"], True, type(None)),
            ([b"1"], False, KeyboardInterrupt),
        ]

    run(loop, main)


@pytest.mark.slow
@on_both
def test_connections(loop: Loop, broker_process: Broker, topic: str) -> None:
    async def main() -> None:
        hooks = Recorder()
        address = broker_process.tcp_address
        async with Producer(address, hooks=hooks) as producer:
            await producer.publish(topic, b"x")
            assert hooks.connections == [("connected", address, None)]
        assert hooks.connections[1:] == [("disconnected", address, None)]
        hooks.connections.clear()
        async with Consumer(topic, "c", nsqd_tcp_addresses=address, hooks=hooks):
            assert hooks.connections == [("connected", address, None)]
        assert [what for what, *_ in hooks.connections] == ["connected", "disconnected"]
        hooks.connections.clear()
        nowhere = free_address()
        with pytest.raises(ConnectionFailed):
            async with Producer(nowhere, hooks=hooks):
                pass
        ((what, where, error),) = hooks.connections
        assert (what, where) == ("failed", nowhere)
        assert isinstance(error, ConnectionFailed)

    run(loop, main)


@pytest.mark.slow
@on_both
@pytest.mark.parametrize(
    "error", [RuntimeError, pytest.param(asyncio.CancelledError, id="result-of-a-cancelled-future")]
)
def test_hooks_that_fail_change_nothing(
    loop: Loop,
    error: type[BaseException],
    broker_process: Broker,
    topic: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        hooks = Broken(error)
        async with Producer(broker_process.tcp_address, hooks=hooks) as producer:
            await producer.publish(topic, b"1")
            await producer.submit(topic, b"2").wait()
            await producer.publish_many(topic, [b"3"])
        done: list[bytes] = []

        async def handle(message: Message) -> None:
            done.append(message.body)
            if len(done) == 3:
                consumer.close_soon()

        async with Consumer(
            topic, "c", nsqd_tcp_addresses=broker_process.tcp_address, hooks=hooks
        ) as consumer:
            await consumer.run(handle)
        assert sorted(done) == [b"1", b"2", b"3"]

    with caplog.at_level(logging.CRITICAL, "trio_nsq.client"):
        run(loop, main)


@pytest.mark.slow
@on_both
def test_installed_hooks(loop: Loop, broker_process: Broker, topic: str) -> None:
    """For those that have no option of their own."""
    hooks, own = Recorder(), Recorder()

    async def main() -> None:
        hooks.install()
        try:
            async with Producer(broker_process.tcp_address) as producer:
                await producer.publish(topic, b"x")
            for option in (None, own):
                async with Producer(broker_process.tcp_address, hooks=option) as producer:
                    await producer.publish(topic, b"x")
            own.uninstall()  # they are not installed
            async with Producer(broker_process.tcp_address) as producer:
                await producer.publish(topic, b"x")
        finally:
            hooks.uninstall()
        async with Producer(broker_process.tcp_address) as producer:
            await producer.publish(topic, b"x")

    run(loop, main)
    assert (len(hooks.publishes), len(own.publishes)) == (2, 1)


@pytest.mark.slow
def test_without_async_code(broker_process: Broker, topic: str) -> None:
    hooks = Recorder(ADDED)
    _place.set("program")
    with sync.Producer(broker_process.tcp_address, hooks=hooks) as producer:
        producer.publish(topic, b"1")
        producer.submit(topic, b"2").wait()
        producer.publish_many(topic, [b"3", b"4"])
        producer.publish_set(topic, pack_messages([b"5"]))
    assert [call.count for call in hooks.publishes] == [1, 1, 2, 1]
    assert hooks.publish_ends == [(call, None) for call in hooks.publishes]
    assert hooks.places == ["program"] * 4
    with pytest.raises(NSQError):
        producer.publish(topic, b"x")
    assert len(hooks.publishes) == len(hooks.publish_ends)
    places: list[str] = []

    def handle(message: sync.Message) -> None:
        places.append(_place.get())
        if message.body == b"2" and message.attempts == 1:
            raise LookupError
        if message.body == b"5":
            consumer.close_soon()

    options: Any = {"nsqd_tcp_addresses": broker_process.tcp_address, "hooks": hooks}
    with sync.Consumer(topic, "c", **options, default_requeue_delay_s=0) as consumer:
        message = consumer.get()
        with consumer.processing(message):
            message.finish()
        consumer.run(handle)
    ends = [(call.bodies, type(error)) for call, error in hooks.process_ends]
    assert ends[:2] == [([b"1"], type(None)), ([b"2"], LookupError)]
    assert {bodies[0] for bodies, error in ends if error is type(None)} == {b"1", b"2", b"3", b"4", b"5"}
    assert len(ends) == len(hooks.processes) == 6
    assert places == ["handler"] * 5
    assert hooks.processes[1].headers == [ADDED]


# ---------------------------------------------------------------------- failures, with a broker that knows no headers


@bounded
async def test_broker_without_headers_gets_messages_without_what_hooks_add(broker: FakeBroker) -> None:
    """Whatever they are published with; and it gets none of those to which the program gave headers."""
    async with opened(broker, hooks=Recorder(ADDED)) as (producer, peer, nursery):
        first = Outcome(nursery, producer.publish, "t", b"1")
        await peer.expect(pub("t", b"1"))
        own = Outcome(nursery, partial(producer.publish, "t", b"2", headers={"a": "1"}))
        with pytest.raises(PublishFailed, match="does not know headers"):
            await producer.publish_many("t", [b"2", b"3"], headers=[{"a": "1"}, {}])
        receipts = [producer.submit("t", body) for body in (b"3", b"4")]
        await peer.expect(mpub("t", b"3", b"4"))
        late = Outcome(nursery, partial(producer.publish, "t", b"5", defer_s=0.001))
        await peer.expect(b"DPUB t 1\n\0\0\0\1" + b"5")
        many = Outcome(nursery, producer.publish_many, "t", [b"6", b"7"])
        await peer.expect(mpub("t", b"6", b"7"))
        late_ones = Outcome(nursery, partial(producer.publish_many, "t", [b"8", b"9"], defer_s=0.001))
        await peer.expect(b"DPUB t 1\n\0\0\0\1" + b"8", b"DPUB t 1\n\0\0\0\1" + b"9")
        await peer.send(OK_FRAME * 6)
        for outcome in (first, late, many, late_ones):
            await outcome.success()
        for receipt in receipts:
            await receipt.wait()
        await own.ended.wait()
        assert "does not know headers" in str(own.error)
        assert producer.stats().stored == 8
        await peer.expect_nothing()


@bounded
async def test_failed_and_cancelled_publishes_end(broker: FakeBroker) -> None:
    hooks = Recorder()
    async with opened(broker, hooks=hooks) as (producer, peer, nursery):
        with pytest.raises(PublishFailed):
            await producer.publish("t", b"1", timeout_s=0.001)
        await peer.expect(pub("t", b"1"))
        cancelled = Outcome(nursery, producer.publish, "t", b"2")
        await peer.expect(pub("t", b"2"))
        receipt = producer.submit("t", b"3")
        withdrawn = producer.submit("t", b"4")
        assert withdrawn.withdraw()
        await peer.expect(pub("t", b"3"))
        with pytest.raises(TypeError):
            await producer.publish("t", "text")  # type: ignore[call-overload]  # what it checks
        peer.hang_up()
        with pytest.raises(PublishFailed):
            await receipt.wait()
        await cancelled.ended.wait()
    ends = {call.bodies[0]: error for call, error in hooks.publish_ends}
    assert ends.keys() == {b"1", b"2", b"3", b"4"}
    assert len(hooks.publishes) == len(hooks.publish_ends) == 4
    assert all(isinstance(error, PublishFailed) for error in ends.values())
    assert "withdrawn" in str(ends[b"4"])
    assert "within 0.001 s" in str(ends[b"1"])


@bounded
async def test_invalid_changes_are_undone(broker: FakeBroker, caplog: pytest.LogCaptureFixture) -> None:
    class Careless(Hooks):
        def publish_started(self, call: PublishCall) -> None:
            if call.bodies[0] == b"4":
                call.bodies.append(b"more")
            else:
                call.bodies[-1:] = [b""]

    async with opened(broker, hooks=Careless()) as (producer, peer, nursery):
        one = Outcome(nursery, producer.publish, "t", b"1")
        await peer.expect(pub("t", b"1"))
        many = Outcome(nursery, producer.publish_many, "t", [b"2", b"3"])
        await peer.expect(mpub("t", b"2", b"3"))
        more = Outcome(nursery, producer.publish_many, "t", [b"4", b"5"])
        await peer.expect(mpub("t", b"4", b"5"))
        await peer.send(OK_FRAME * 3)
        for outcome in (one, many, more):
            await outcome.success()
    assert caplog.text.count("published without their changes") == 3


def test_no_headers_are_added_to_a_message_that_has_the_most() -> None:
    own = {f"h{number}": "" for number in range(MAX_HEADERS)}
    call = PublishCall(Hooks(), "t", [b"1", b"2"], [own, {}])
    call.add_headers(ADDED)
    assert call.headers == [own, ADDED]


def test_hooks_must_be_hooks() -> None:
    with pytest.raises(TypeError, match="hooks"):
        Producer(hooks=print)  # type: ignore[arg-type]  # what it checks
