"""The stages of the broker's work, measured in this process. `stages.py` starts it, with any checkout's Python.

It imports only the standard library and `trio_nsq`. The first line on stdout describes the process. Then each line on
stdin, `REPEATS STAGE`, is answered with a JSON array: the processor time of each repeat, in nanoseconds per message. If
the checkout does not have an interface that a stage calls, the answer is an object with `error`.
"""

import gc
import json
import platform
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio_nsq
from trio_nsq.broker.state.batch import Batch
from trio_nsq.broker.state.cache import BatchCache
from trio_nsq.broker.state.channel import Channel
from trio_nsq.broker.state.consumer import Consumer
from trio_nsq.broker.state.topic import Topic
from trio_nsq.event_loop.reactor import SendBuffer
from trio_nsq.http.messages import Request, Response
from trio_nsq.http.parsing import RequestReader
from trio_nsq.http.routing import Route, Router
from trio_nsq.log import DiskLog, RecordBatch
from trio_nsq.protocol import Limits, pack_messages
from trio_nsq.protocol.command_reader import CommandReader
from trio_nsq.protocol.commands import Requeue
from trio_nsq.protocol.encode import encode_finish, encode_mpub, encode_pub, encode_requeue
from trio_nsq.protocol.limits import MAGIC_V2
from trio_nsq.protocol.states import State

BODY_BYTES = 200
FRAME_BYTES = 34 + BODY_BYTES
SOCKET_BYTES = 512 * 1024
"""Bytes that a socket accepts while the other side does not read."""
MOST_BYTES = 64 * 1024 * 1024
FIRST_ID = 7 << 54 | 1 << 36
NOW_NS = 1_700_000_000_000_000_000
MS = 1_000_000
REPEAT_NS = 2_000_000
"""Processor time of one repeat: enough for the clock, and short enough to be repeated often."""
MOST_TIMES = 400
SEED = 7

Run = Callable[[], object]
"""The timed part of a stage. What it needs is prepared before."""


# ------------------------------------------------------------------------------------------ parts


def record_of(batch: int, base: int = 0, due_ns: int = 0) -> RecordBatch:
    """Return a record of this many messages, whose ids continue those before it."""
    return RecordBatch(base, FIRST_ID + base, NOW_NS, due_ns, pack_messages([bytes(BODY_BYTES)] * batch))


def reader_in(state: State) -> CommandReader:
    """Return the reader of a connection in this state."""
    reader = CommandReader(Limits())
    reader.receive_data(MAGIC_V2)
    reader.next_command()
    reader.state = state
    return reader


def ids_of(batch: int) -> list[bytes]:
    """Return the ids of the messages of `record_of`."""
    return [b"%016x" % (FIRST_ID + n) for n in range(batch)]


def shuffled_ids(batch: int) -> list[bytes]:
    """Return the same ids in random order, always the same."""
    ids = ids_of(batch)
    random.Random(SEED).shuffle(ids)
    return ids


class Ignoring:
    """A subscriber that drops what it gets."""

    def deliver(self, frames: bytes | memoryview) -> None:
        """Drop the frames."""

    def send_delivered(self) -> None:
        """Send nothing."""

    def close(self) -> None:
        """Close nothing."""


async def answer(request: Request) -> Response:
    """Answer a request; no stage calls it."""
    raise NotImplementedError(request.target)


ROUTER = Router([Route("POST", f"/{name}", answer, MOST_BYTES) for name in ("pub", "mpub")])


class Fixture:
    """What the repeats of a stage share: a log, topics, sockets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._log: DiskLog | None = None
        self._sockets: list[socket.socket] = []

    def close_sockets(self) -> None:
        """Close the sockets of the last repeat."""
        for each in self._sockets:
            each.close()
        self._sockets.clear()

    def send_buffer(self) -> SendBuffer:
        """Return the buffer of a client that reads nothing."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            client, _ = server.accept()
        ours.setblocking(False)
        self._sockets += (ours, client)
        return SendBuffer(ours)

    @property
    def log(self) -> DiskLog:
        """A log in a file."""
        if self._log is None:
            self._log = self.new_log()
            self._log.append([record_of(1)], sync=True)
        return self._log

    def new_log(self) -> DiskLog:
        """Return an empty log."""
        return DiskLog(Path(tempfile.mkdtemp(dir=self.folder)))

    def records(self, batch: int, times: int) -> list[RecordBatch]:
        """Return records that can be appended to the log one after the other."""
        base = self.log.next_sequence
        return [record_of(batch, base + n * batch) for n in range(times)]

    def topic(self, log: DiskLog | None = None) -> Topic:
        """Return a new topic without messages."""
        return Topic("topic", log or DiskLog(self.folder / "none"), BatchCache(MOST_BYTES), 10_000)

    def channel(self, batch: int, due_ns: int = 0) -> Channel:
        """Return a channel whose messages have their frames already, because another channel has delivered them."""
        topic = self.topic()
        channels = [topic.add_channel(name) for name in ("other", "measured")]
        for channel in channels:
            consumer = Consumer(60_000, Ignoring())
            consumer.ready_count = 2500
            channel.add(consumer)
        topic.accept([record_of(batch, due_ns=due_ns)])
        if not due_ns:
            channels[0].dispatcher.dispatch(NOW_NS)
        return channels[1]

    def in_flight(self, batch: int) -> tuple[Channel, Consumer]:
        """Return a channel that has delivered this many messages together, and its consumer."""
        channel = self.channel(batch)
        channel.dispatcher.dispatch(NOW_NS)
        (consumer,) = channel.consumers
        return channel, consumer


# ------------------------------------------------------------------------------------------ stages


def parse(fixture: Fixture, batch: int, times: int) -> Run:
    """Read a PUB or MPUB that arrives whole."""
    del fixture
    reader = reader_in(State.INIT)
    body = bytes(BODY_BYTES)
    wire = encode_pub("topic", body) if batch == 1 else encode_mpub("topic", pack_messages([body] * batch))

    def run() -> None:
        for _ in range(times):
            reader.receive_data(wire)
            while reader.next_command() is not None:
                pass

    return run


def http_parse(fixture: Fixture, batch: int, times: int) -> Run:
    """Read a request to /pub or /mpub that arrives whole, without splitting its body."""
    del fixture
    reader = RequestReader(ROUTER, "127.0.0.1:4151")
    path, body = ("pub", b"x" * BODY_BYTES) if batch == 1 else ("mpub", (b"x" * BODY_BYTES + b"\n") * batch)
    head = f"POST /{path}?topic=topic HTTP/1.1\r\nHost: 127.0.0.1:4151\r\nContent-Length: {len(body)}\r\n\r\n"
    wire = head.encode() + body

    def run() -> None:
        for _ in range(times):
            assert reader.receive_data(wire)

    return run


def append(fixture: Fixture, batch: int, times: int, *, sync: bool = False) -> Run:
    """Encode a record and write it to the log's file.

    Args:
        sync: Sync after each record. The time in which the disk works is not processor time.
    """
    log, records = fixture.log, fixture.records(batch, times)

    def run() -> None:
        for record in records:
            log.append([record], sync=sync)

    return run


def accept(fixture: Fixture, batch: int, times: int) -> Run:
    """Give a record that is in the log to the topic and its channel."""
    topics = [fixture.topic() for _ in range(times)]
    for topic in topics:
        topic.add_channel("measured")
    records = [record_of(batch)]

    def run() -> None:
        for topic in topics:
            topic.accept(records)

    return run


def encode(fixture: Fixture, batch: int, times: int) -> Run:
    """Build the frames and the FIN lines of messages, once for all channels."""
    del fixture
    batches = [Batch([record_of(batch)]) for _ in range(times)]

    def run() -> None:
        for each in batches:
            each.take(0, batch, MOST_BYTES)

    return run


def dispatch(fixture: Fixture, batch: int, times: int) -> Run:
    """Choose a consumer for messages whose frames exist, and put them in flight."""
    channels = [fixture.channel(batch) for _ in range(times)]
    return lambda: dispatch_all(channels)


def dispatch_all(channels: list[Channel]) -> None:
    """Deliver what each channel has."""
    for channel in channels:
        assert channel.dispatcher.dispatch(NOW_NS)


def send(fixture: Fixture, batch: int, times: int) -> Run:
    """Send the frames of messages to a socket whose client does not read yet."""
    frames = memoryview(bytes(batch * FRAME_BYTES))
    per_socket = SOCKET_BYTES // len(frames)
    buffers = [fixture.send_buffer() for _ in range(-(-times // per_socket))]

    def run() -> None:
        for n in range(times):
            buffer = buffers[n // per_socket]
            buffer.put(frames)
            buffer.flush()

    return run


def read_finish(fixture: Fixture, batch: int, times: int) -> Run:
    """Read FINs that arrive together."""
    del fixture
    reader, wire = reader_in(State.SUBSCRIBED), encode_finish(ids_of(batch))

    def run() -> None:
        for _ in range(times):
            reader.receive_data(wire)
            while reader.next_command() is not None:
                pass

    return run


def finish(fixture: Fixture, batch: int, times: int) -> Run:
    """Remove messages from those in flight, in the order of delivery."""
    return finish_all(fixture, batch, times, [encode_finish(ids_of(batch))])


def finish_shuffled(fixture: Fixture, batch: int, times: int) -> Run:
    """The same for FINs in random order that arrive together."""
    return finish_all(fixture, batch, times, [encode_finish(shuffled_ids(batch))])


def finish_singly(fixture: Fixture, batch: int, times: int) -> Run:
    """The same for FINs in random order that arrive one by one."""
    return finish_all(fixture, batch, times, [encode_finish([each]) for each in shuffled_ids(batch)])


def finish_all(fixture: Fixture, batch: int, times: int, answers: list[bytes]) -> Run:
    """Return a run in which each of several consumers sends these FIN lines."""
    subscriptions = [fixture.in_flight(batch) for _ in range(times)]

    def run() -> None:
        for channel, consumer in subscriptions:
            for lines in answers:
                assert not channel.finish(consumer, lines, NOW_NS)

    return run


def requeue(fixture: Fixture, batch: int, times: int) -> Run:
    """Read REQs without delay in random order that arrive together, and requeue their messages."""
    return requeue_all(fixture, batch, times, 0)


def requeue_deferred(fixture: Fixture, batch: int, times: int) -> Run:
    """The same for REQs with a delay."""
    return requeue_all(fixture, batch, times, 100)


def requeue_all(fixture: Fixture, batch: int, times: int, delay_ms: int) -> Run:
    """Return a run in which each of several consumers sends REQs for all its messages."""
    subscriptions = [(reader_in(State.SUBSCRIBED), *fixture.in_flight(batch)) for _ in range(times)]
    wire = b"".join([encode_requeue(each, delay_ms) for each in shuffled_ids(batch)])

    def run() -> None:
        for reader, channel, consumer in subscriptions:
            reader.receive_data(wire)
            while (command := reader.next_command()) is not None:
                assert isinstance(command, Requeue)
                assert channel.requeue(consumer, command.id, command.delay_ms, NOW_NS) is None

    return run


def redeliver(fixture: Fixture, batch: int, times: int) -> Run:
    """Deliver requeued messages."""
    channels = []
    for _ in range(times):
        channel, consumer = fixture.in_flight(batch)
        for each in shuffled_ids(batch):
            channel.requeue(consumer, each, 0, NOW_NS)
        channels.append(channel)
    return lambda: dispatch_all(channels)


def become_due(fixture: Fixture, batch: int, times: int) -> Run:
    """Move deferred messages that are due to those that can be delivered."""
    channels = [fixture.channel(batch, NOW_NS + 100 * MS) for _ in range(times)]

    def run() -> None:
        for channel in channels:
            assert channel.tick(NOW_NS + 200 * MS) == batch

    return run


def deliver_due(fixture: Fixture, batch: int, times: int) -> Run:
    """Deliver messages that were deferred for 100 ms, each published between 50 others that are delivered already."""
    log = fixture.new_log()
    topic = fixture.topic(log)
    channel = topic.add_channel("measured")
    consumer = Consumer(60_000, Ignoring())
    consumer.ready_count = batch * times * 51
    channel.add(consumer)
    for _ in range(batch * times):
        for record in (
            record_of(50, log.next_sequence),
            record_of(1, log.next_sequence + 50, NOW_NS + 100 * MS),
        ):
            log.append([record], sync=False)
            topic.accept([record])
    while channel.dispatcher.dispatch(NOW_NS):
        pass
    channel.tick(NOW_NS + 200 * MS)
    assert channel.messages.ready_count == batch * times

    def run() -> None:
        while channel.messages.ready_count:
            channel.dispatcher.dispatch(NOW_NS)

    return run


SIZES = (1, 20, 200)

STAGES: dict[str, tuple[Callable[[Fixture, int, int], Run], tuple[int, ...]]] = {
    "parse PUB or MPUB": (parse, SIZES),
    "parse HTTP": (http_parse, SIZES),
    "append": (append, SIZES),
    "append + sync": (partial(append, sync=True), SIZES),
    "accept": (accept, SIZES),
    "encode frames": (encode, SIZES),
    "dispatch": (dispatch, SIZES),
    "send": (send, SIZES),
    "parse FIN": (read_finish, SIZES),
    "finish": (finish, SIZES),
    "finish shuffled": (finish_shuffled, SIZES[1:]),
    "finish shuffled singly": (finish_singly, SIZES[1:]),
    "requeue": (requeue, SIZES),
    "requeue with delay": (requeue_deferred, SIZES),
    "redeliver": (redeliver, SIZES),
    "become due": (become_due, SIZES),
    "deliver due": (deliver_due, (1,)),
}
"""The stages and their batch sizes, in the order of a message's life."""

# ------------------------------------------------------------------------------------------ measuring


def measure(stage: str, repeats: int, fixture: Fixture) -> list[float]:
    """Return the processor time of each repeat, in nanoseconds per message."""
    name, _, size = stage.rpartition(" x ")
    prepare, _ = STAGES[name]
    batch = int(size)
    times = 8
    cpu_ns(prepare(fixture, batch, times))  # the first one fills caches
    took_ns = cpu_ns(prepare(fixture, batch, times))
    times = max(1, min(MOST_TIMES, times * REPEAT_NS // max(1, took_ns)))
    figures = []
    for _ in range(repeats):
        figures.append(cpu_ns(prepare(fixture, batch, times)) / (batch * times))
        fixture.close_sockets()
    return figures


def cpu_ns(run: Run) -> int:
    """Return the processor time of this thread, kernel included."""
    gc.collect()
    began_ns = time.thread_time_ns()
    run()
    return time.thread_time_ns() - began_ns


def compiled() -> list[str]:
    """Return the modules of the library that are compiled."""
    modules = sys.modules.copy().items()
    return sorted(
        name
        for name, module in modules
        if name.startswith("trio_nsq") and (getattr(module, "__file__", None) or "").endswith(".so")
    )


def main() -> None:
    """Describe this process, then measure as requested until stdin ends."""
    folder = Path(trio_nsq.__file__).parent
    about = {
        "folder": str(folder),
        "python": platform.python_version(),
        "compiled": compiled(),
        "modules": sum(name.startswith("trio_nsq") for name in sys.modules),
    }
    print(json.dumps(about), flush=True)
    gc.collect()
    gc.freeze()
    gc.disable()
    with tempfile.TemporaryDirectory(prefix="stages-", dir=sys.argv[1]) as data:
        fixture = Fixture(Path(data))
        for line in sys.stdin:
            repeats, _, stage = line.strip().partition(" ")
            answer: list[float] | dict[str, str]
            try:
                answer = measure(stage, int(repeats), fixture)
            except (AttributeError, TypeError) as exc:
                answer = {"error": f"{type(exc).__name__}: {exc}"}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
