"""Tests for kombu's transport, without Celery, with our broker and with nsqd."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trustme
from kombu import Connection, Consumer, Exchange, Queue
from kombu.exceptions import OperationalError

from client.support.tokens import SECRETS, AuthFile
from integrations.support import PATIENCE_S, until
from interop.peers import Broker, free_address, nsqd, qcli_serve
from trio_nsq.client import (
    BrokerError,
    ConnectionFailed,
    ConnectionLost,
    ConnectionSettings,
    PublishFailed,
    RequestRefused,
)
from trio_nsq.integrations.kombu.envelope import decode, wait_s
from trio_nsq.integrations.kombu.names import nsq_name
from trio_nsq.integrations.kombu.subscription import Source, Subscription
from trio_nsq.protocol import is_valid_name
from trio_nsq.protocol.frames import encode_error, encode_response

pytestmark = pytest.mark.slow  # starts a broker
_numbers = count()


on_both = pytest.mark.parametrize("broker", ["qcli", "nsqd"], indirect=True)
"""Where the brokers differ."""


@pytest.fixture(scope="module")
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    path = tmp_path_factory.mktemp("broker") / "data"
    with (
        qcli_serve(path, "--sync=interval")
        if getattr(request, "param", "qcli") == "qcli"
        else nsqd(path) as running
    ):
        yield running


@pytest.fixture
def queue() -> Queue:
    """A queue of this name, with an exchange and a key of its own, that no other test uses."""
    name = f"queue{next(_numbers)}"
    return Queue(name, Exchange(f"{name}.exchange"), routing_key="key")


@pytest.fixture
def connect(broker: Broker) -> Iterator[Callable[..., Connection]]:
    """Opens connections that the test need not close."""
    opened = []

    def connect(**options: Any) -> Connection:
        options.setdefault("nsqd_http_address", broker.http_address)
        opened.append(Connection(f"nsq://{broker.tcp_address}", transport_options=options))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.release()


def publish(connection: Connection, body: Any, queue: Queue, **options: Any) -> None:
    with connection.Producer() as producer:
        producer.publish(
            body, exchange=queue.exchange, routing_key=queue.routing_key, declare=[queue], **options
        )


class Received:
    """What a consumer has received; it drains its connection until there is enough."""

    def __init__(self, connection: Connection, *queues: Queue, **options: Any) -> None:
        self.messages: list[Any] = []
        self.connection = connection
        self.consumer = Consumer(
            connection, queues, callbacks=[lambda _, message: self.messages.append(message)], **options
        )
        self.consumer.consume()

    def bodies(self) -> list[Any]:
        return [message.payload for message in self.messages]

    def wait_for(self, number: int) -> list[Any]:
        until_drained = PATIENCE_S
        while len(self.messages) < number:
            self.connection.drain_events(timeout=until_drained)
        return self.messages

    def nothing_more(self) -> None:
        """See shortly whether more comes: a machine that is held up finds less."""
        with pytest.raises(TimeoutError):
            self.connection.drain_events(timeout=0.2)


def in_flight(broker: Broker, queue: Queue) -> int:
    return int(broker.channel_stats(nsq_name(queue.name), "celery")["in_flight_count"])


@pytest.mark.parametrize(
    "name", ["celery", "a b", "w1@host.celery.pidbox", "ünï", "x" * 64, "x" * 65, "a#b", "", "t#ephemeral"]
)
def test_names(name: str) -> None:
    assert is_valid_name(nsq_name(name))
    assert is_valid_name(nsq_name(name, ephemeral=True))
    assert nsq_name(name, ephemeral=True).endswith("#ephemeral")
    assert (nsq_name(name) == name) is is_valid_name(name)


def test_similar_names_stay_apart() -> None:
    names = ["a b", "a@b", "a-b", "x" * 65, "x" * 66]
    assert len({nsq_name(name) for name in names}) == len(names)


def test_messages_of_all_kinds(connect: Callable[..., Connection], queue: Queue) -> None:
    connection = connect()
    bodies: list[tuple[Any, dict[str, Any]]] = [
        ({"number": 1, "text": "ü"}, {"serializer": "json", "headers": {"h": "1"}}),
        ({"number": 2}, {"serializer": "json", "compression": "zlib"}),
        (b"\x00\xff", {"content_type": "application/data", "content_encoding": "binary"}),
        ("text", {}),
    ]
    for body, options in bodies:
        publish(connection, body, queue, **options)
    received = Received(connection, queue)
    messages = received.wait_for(len(bodies))
    assert [message.payload for message in messages] == [body for body, _ in bodies]
    assert messages[0].headers["h"] == "1"
    assert messages[0].delivery_info["routing_key"] == "key"


@on_both
def test_acknowledged_requeued_and_dropped(
    connect: Callable[..., Connection], broker: Broker, queue: Queue
) -> None:
    connection = connect()
    for body in ("ack", "requeue", "drop"):
        publish(connection, body, queue)
    received = Received(connection, queue)
    first = {message.payload: message for message in received.wait_for(3)}
    assert not any(message.delivery_info["redelivered"] for message in first.values())
    first["ack"].ack()
    first["drop"].reject()
    first["requeue"].requeue()
    again = received.wait_for(4)[-1]
    assert again.payload == "requeue"
    assert again.delivery_info["redelivered"]
    again.ack()
    until(lambda: broker.is_drained(queue.name, "celery"))


def test_prefetch_count_limits_what_is_in_flight(
    connect: Callable[..., Connection], broker: Broker, queue: Queue
) -> None:
    connection = connect()
    for number in range(5):
        publish(connection, number, queue)
    received = Received(connection, queue, prefetch_count=2)
    received.wait_for(2)
    received.nothing_more()
    assert in_flight(broker, queue) == 2
    received.consumer.qos(prefetch_count=3)
    received.wait_for(3)
    received.messages[0].ack()
    received.wait_for(4)
    received.nothing_more()
    for message in received.messages[1:]:
        message.ack()
    received.wait_for(5)


def test_no_queue_starves(connect: Callable[..., Connection]) -> None:
    connection = connect()
    names = [f"queue{next(_numbers)}" for _ in range(4)]
    queues = [Queue(name, Exchange(name), routing_key=name) for name in names]
    received = Received(connection, *queues, prefetch_count=1)
    for queue in reversed(queues):
        publish(connect(), queue.name, queue)
    for number in range(4):
        received.wait_for(number + 1)[number].ack()
    assert set(received.bodies()) == set(names)


@on_both
def test_closed_connection_returns_its_messages(connect: Callable[..., Connection], queue: Queue) -> None:
    first, second = connect(), connect()
    for number in range(3):
        publish(first, number, queue)
    received = Received(first, queue)
    received.wait_for(3)
    first.close()
    received.messages[0].ack()  # too late: without effect
    again = Received(second, queue).wait_for(3)
    assert {message.payload for message in again} == {0, 1, 2}
    assert all(message.delivery_info["redelivered"] for message in again)


def test_canceled_consumer_may_still_acknowledge(
    connect: Callable[..., Connection], broker: Broker, queue: Queue
) -> None:
    connection = connect()
    for number in range(3):
        publish(connection, number, queue)
    received = Received(connection, queue, prefetch_count=1)
    received.wait_for(1)
    received.consumer.cancel()
    received.messages[0].ack()
    until(lambda: broker.channel_stats(queue.name, "celery")["depth"] == 2 and not in_flight(broker, queue))


@on_both
def test_fanout_and_topic_exchanges_reach_queues_of_other_connections(
    connect: Callable[..., Connection],
) -> None:
    name = f"exchange{next(_numbers)}"
    fanout, topics = Exchange(name, "fanout"), Exchange(f"{name}.topic", "topic")
    first, second = (
        Received(
            connect(),
            Queue(f"{name}@{number}", fanout, auto_delete=True),
            Queue(f"{name}@{number}.t", topics, routing_key=f"*.{number}", auto_delete=True),
            no_ack=True,
        )
        for number in range(2)
    )
    with connect().Producer() as producer:
        producer.publish("all", exchange=fanout, declare=[fanout])
        for number in range(2):
            producer.publish(
                f"only {number}",
                exchange=topics,
                declare=[topics],
                routing_key=f"a.{number}",
                delivery_mode=1,
            )
    assert {message.payload for message in first.wait_for(2)} == {"all", "only 0"}
    assert {message.payload for message in second.wait_for(2)} == {"all", "only 1"}
    first.nothing_more()


def test_lasting_queues_of_a_fanout_exchange(connect: Callable[..., Connection]) -> None:
    name = f"exchange{next(_numbers)}"
    fanout = Exchange(name, "fanout")
    queues = [Queue(f"{name}.{number}", fanout) for number in range(2)]
    received = [Received(connect(), queue) for queue in queues]
    with connect().Producer() as producer:
        producer.publish("all", exchange=fanout, declare=[fanout])
    for each in received:
        assert [message.payload for message in each.wait_for(1)] == ["all"]


@on_both
def test_old_broadcasts_are_not_for_new_queues(
    connect: Callable[..., Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a `shutdown` of Celery's remote control that no worker was there to get."""
    name = f"exchange{next(_numbers)}"
    fanout = Exchange(name, "fanout")
    with connect().Producer() as producer:
        producer.publish("old", exchange=fanout, declare=[fanout])
        with monkeypatch.context() as later:
            later.setattr("time.time_ns", lambda: (datetime.now(UTC).timestamp() + 60) * 10**9)
            received = Received(connect(), Queue(f"{name}@", fanout, auto_delete=True), no_ack=True)
        received.nothing_more()
    assert received.bodies() == []


def test_messages_of_other_programs(connect: Callable[..., Connection], broker: Broker, queue: Queue) -> None:
    bodies = [
        b"\xff\x00",
        b"plain",
        b"[]",
        b'{"properties":{}}',
        b"[" * 100_000,
        b'{"body":1,"headers":{},"properties":{"delivery_info":{}}}',
    ]
    for body in bodies:
        broker.post("/pub", body, topic=queue.name)
    received = Received(connect(), queue)
    messages = received.wait_for(len(bodies))
    assert {message.body for message in messages[:5]} >= {b"plain", b"[]"}
    for message in messages:
        message.reject()
    until(lambda: broker.is_drained(queue.name, "celery"))


@on_both
def test_message_that_the_broker_refuses(connect: Callable[..., Connection], queue: Queue) -> None:
    connection = connect()
    with pytest.raises(BrokerError, match="E_BAD_MESSAGE"):
        publish(connection, "x" * 2**20, queue)
    publish(connection, "small", queue)
    assert Received(connection, queue).wait_for(1)[0].payload == "small"


def test_eta(connect: Callable[..., Connection], broker: Broker, queue: Queue) -> None:
    connection = connect(max_defer_s=0.2)
    eta = (datetime.now(UTC) + timedelta(hours=10)).isoformat()
    publish(connection, "late", queue, headers={"eta": eta, "task": "t"})
    publish(connection, "now", queue, headers={"eta": "2020-01-01T00:00:00Z", "task": "t"})
    received = Received(connection, queue)
    received.wait_for(1)[0].ack()
    # Deferred for a while, and then again, as it is not due.
    while broker.channel_stats(queue.name, "celery")["requeue_count"] < 2:
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.1)
    assert received.bodies() == ["now"]


@pytest.mark.parametrize("eta", [None, 5, "soon", "2100-01-01T00:00:00", "9999-12-31T23:59:59-23:59", []])
def test_etas_that_are_none(eta: Any) -> None:
    assert wait_s({"headers": {"eta": eta}}) in (
        0.0,
        pytest.approx(wait_s({"headers": {"eta": eta}}), abs=60),
    )
    assert wait_s({"headers": None}) == 0.0


def test_body_without_a_message_of_kombu() -> None:
    assert decode(b"\xff")["properties"]["delivery_info"] == {"exchange": "", "routing_key": ""}


@on_both
def test_sizes_and_purge(connect: Callable[..., Connection], queue: Queue) -> None:
    connection = connect()
    simple = connection.SimpleQueue(queue.name)
    for number in range(3):
        simple.put(number)
    until(lambda: simple.qsize() == 3)
    assert simple.clear() == 3
    until(lambda: simple.qsize() == 0)
    simple.close()


def test_get(connect: Callable[..., Connection], broker: Broker, queue: Queue) -> None:
    connection = connect()
    bound = queue(connection.default_channel)
    bound.declare()
    assert bound.get() is None
    publish(connection, "one", queue)
    publish(connection, "two", queue)
    found = [bound.get() for _ in range(2)]
    assert {message.payload for message in found} == {"one", "two"}
    for message in found:
        message.ack()
    until(lambda: broker.is_drained(queue.name, "celery"))


def test_idle_publisher_reconnects(tmp_path: Path, queue: Queue) -> None:
    address = free_address()
    with qcli_serve(tmp_path / "data", f"--tcp-address={address}") as first:
        connection = Connection(f"nsq://{address}")
        publish(connection, "one", queue)
        first.process.kill()
        first.process.wait()
    with pytest.raises((ConnectionFailed, OperationalError)):
        publish(connection, "lost", queue)
    with qcli_serve(tmp_path / "data", f"--tcp-address={address}"):
        publish(connection, "two", queue)
        assert {message.payload for message in Received(connection, queue).wait_for(2)} == {"one", "two"}
        connection.release()


def test_options_in_milliseconds_are_deprecated() -> None:
    options = {"heartbeat_interval_ms": 500}
    connection = Connection("nsq://localhost", transport_options=options)
    with (
        pytest.warns(DeprecationWarning, match="use heartbeat_interval_s=0.5"),
        pytest.raises(ValueError, match=r"heartbeat_interval_s is 0\.5; it must be -1 or at least 1"),
    ):
        _ = connection.transport


def test_messages_in_flight_are_touched(
    broker: Broker, queue: Queue, connect: Callable[..., Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    settings = ConnectionSettings(msg_timeout_s=60, output_buffer_timeout_s=0.025)
    source = Source(queue.name, "celery")
    subscription = Subscription(broker.tcp_address, settings, source, clock=lambda: now[0])
    publish(connect(), "long", queue)
    subscription.set_rdy(1)
    assert subscription.socket.wait(PATIENCE_S)
    (message,) = subscription.receive()
    sent: list[bytes] = []
    with monkeypatch.context() as during:
        during.setattr(subscription.socket, "send", sent.append)
        for _ in range(1000):
            now[0] += 1
            subscription.keep_alive()
    # After 15 minutes, the broker delivers it again whatever happens. Heartbeats are answered without reading them.
    touch = b"TOUCH %s\n" % message.id
    assert sent.count(touch) == 44
    assert sent.count(b"NOP\n") >= 5
    assert set(sent) == {touch, b"NOP\n"}
    subscription.close()
    until(lambda: in_flight(broker, queue) == 0)


def test_a_thread_keeps_connections_alive(
    connect: Callable[..., Connection], queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = threading.Event()
    monkeypatch.setattr(Subscription, "keep_alive", lambda _: called.set())
    Received(connect(), queue)
    assert called.wait(PATIENCE_S)


def test_consumer_that_raises_loses_no_message(connect: Callable[..., Connection], queue: Queue) -> None:
    connection = connect()
    for number in range(5):
        publish(connection, number, queue)
    seen: list[int] = []

    def handle(body: int, message: Any) -> None:
        seen.append(body)
        message.ack()
        if body == 2:
            raise LookupError("the consumer's own error")

    Consumer(connection, [queue], callbacks=[handle]).consume()
    while 2 not in seen:
        with suppress(LookupError):
            connection.drain_events(timeout=PATIENCE_S)
    while len(seen) < 5:
        connection.drain_events(timeout=PATIENCE_S)
    assert seen == [0, 1, 2, 3, 4]


def test_message_that_timed_out_before_it_was_read_comes_once(
    connect: Callable[..., Connection], broker: Broker, queue: Queue
) -> None:
    connection = connect(visibility_timeout=1)
    received = Received(connection, queue)
    publish(connection, "one", queue)

    def is_delivered_again() -> bool:
        stats = broker.channel_stats(queue.name, "celery")
        return bool(stats["timeout_count"] and stats["in_flight_count"])

    until(is_delivered_again)
    connection.drain_events(timeout=PATIENCE_S)
    assert received.bodies() == ["one"]
    assert received.messages[0].delivery_info["redelivered"]


class Interrupted(Exception):
    """What a signal handler raises, such as Celery's for soft time limits."""


def test_interrupted_publish_does_not_leave_its_answer_to_the_next(
    connect: Callable[..., Connection], queue: Queue, broker: Broker
) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    def publish_interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        publish(connection, "interrupted", queue)

    connection = connect()
    publish(connection, "zero", queue)
    handler = signal.signal(signal.SIGALRM, interrupt)
    broker.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(Interrupted):
            publish_interrupted()
        # The answer comes when the next publish waits for its own.
        later = threading.Timer(0.3, broker.process.send_signal, (signal.SIGCONT,))
        later.start()
        with pytest.raises(BrokerError, match="E_BAD_MESSAGE"):
            publish(connection, "x" * 2**20, queue)
        later.join()
    finally:
        signal.signal(signal.SIGALRM, handler)
        broker.process.send_signal(signal.SIGCONT)


def test_broker_that_is_silent_counts_as_lost(
    connect: Callable[..., Connection], queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connect()
    Received(connection, queue)
    monotonic = time.monotonic
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.01)
    with monkeypatch.context() as later:
        later.setattr(time, "monotonic", lambda: monotonic() + 61)
        with pytest.raises(ConnectionLost, match="no heartbeat for 60 s"):
            connection.drain_events(timeout=0.01)


@pytest.mark.parametrize("compression", ["snappy", "deflate"])
def test_tls_secret_and_compression(tmp_path: Path, queue: Queue, compression: str) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    secret = SECRETS["all"]
    with qcli_serve(
        tmp_path / "data",
        f"--tls-cert={tmp_path / 'server.pem'}",
        f"--tls-key={tmp_path / 'server.pem'}",
        "--tls-required=true",
        f"--auth-file={AuthFile(tmp_path).path}",
    ) as broker:
        options = {compression: True, "nsqd_http_address": broker.http_address}

        def connection_with(secret: str, **ssl: Any) -> Connection:
            url = f"nsq://:{secret}@{broker.tcp_address}"
            return Connection(url, ssl=ssl or False, transport_options=options)

        ca = str(tmp_path / "ca.pem")
        for refused in (connection_with("wrong", ca_certs=ca), connection_with(secret)):
            with pytest.raises(ConnectionFailed):
                refused.transport.establish_connection()
            with pytest.raises(RequestRefused):
                refused.transport.depth("t", "celery")
        with connection_with(secret, ca_certs=ca) as connection:
            for body in ("x" * 100_000, "y"):
                publish(connection, body, queue)
            received = Received(connection, queue)
            assert [len(message.payload) for message in received.wait_for(2)] == [100_000, 1]
            for message in received.messages:
                message.ack()
        assert secret not in connection.as_uri()


def sockets() -> set[str]:
    """Return the names of this process's sockets, which copies of them share."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder itself is closed
            found.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    return {name for name in found if name.startswith("socket:")}


def test_child_process_has_no_connection_of_its_parent(
    connect: Callable[..., Connection], queue: Queue
) -> None:
    before = sockets()
    connection = connect()
    publish(connection, "one", queue)
    received = Received(connection, queue)
    received.wait_for(1)
    own = sockets() - before
    assert len(own) == 2
    child = os.fork()
    if not child:
        failed = 100
        try:
            failed = len(own & sockets())
            publish(connection, "by the child", queue)
            Received(connection, Queue(f"{queue.name}.child"))  # with a thread of its own
            failed += "trio_nsq kombu" not in {thread.name for thread in threading.enumerate()}
        finally:
            os._exit(failed)
    _, status = os.waitpid(child, 0)
    assert status == 0
    received.messages[0].ack()
    assert received.wait_for(2)[1].payload == "by the child"


def test_connection_fails(tmp_path: Path) -> None:
    with pytest.raises((ConnectionFailed, OperationalError)):
        Connection(f"nsq://{free_address()}").transport.establish_connection()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()

        def answer() -> None:
            accepted, _ = server.accept()
            accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            accepted.recv(1000)
            accepted.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises((ConnectionFailed, OperationalError), match="HTTP"):
            Connection(f"nsq://127.0.0.1:{address[1]}").transport.establish_connection()
        thread.join()


@pytest.mark.parametrize(
    ("reason", "raised"),
    [
        ("AUTH failed: the token is unknown, expired or revoked", BrokerError),
        ("AUTH failed", PublishFailed),  # the auth server does not answer
    ],
)
def test_only_a_secret_that_may_be_accepted_later_is_worth_a_retry(
    reason: str, raised: type[Exception]
) -> None:
    limits = {"max_rdy_count": 1, "msg_timeout": 60_000, "max_msg_timeout": 900_000}
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            accepted, _ = server.accept()
            with accepted:
                accepted.recv(10_000)
                accepted.sendall(encode_response(json.dumps(limits).encode()))
                accepted.recv(10_000)
                accepted.sendall(encode_error(b"E_AUTH_FAILED " + reason.encode()))

        thread = threading.Thread(target=answer)
        thread.start()
        transport = Connection(f"nsq://127.0.0.1:{server.getsockname()[1]}").transport
        transport.establish_connection()
        with pytest.raises(raised):
            transport.publish("topic", b"body")
        thread.join()


@pytest.mark.parametrize("options", [{"visibility_timeout": 0.1}, {"snappy": 1, "deflate": 1}])
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Connection("nsq://127.0.0.1:1", transport_options=options).connect()
