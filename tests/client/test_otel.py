"""Tests for OpenTelemetry's spans and metrics, with its SDK and a real broker."""

import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any

import anyio
import httpx
import pytest
from opentelemetry import baggage, context, propagate
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from client.support.fake_broker import FakeBroker, bounded, pub
from client.support.loops import Loop, on_both, run
from client.support.producers import Outcome, opened
from interop.peers import Broker, qcli_serve
from trio_nsq import Consumer, Message, Producer, PublishFailed, otel, sync
from trio_nsq.protocol import pack_messages
from trio_nsq.protocol.frames import OK_FRAME
from trio_nsq.protocol.headers import encode_headers, prefix_of

_topics = map("topic{}".format, count())


class Telemetry:
    """Providers that keep what they get."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.meters = MeterProvider([self._reader])

    def hooks(self, **options: Any) -> otel.OpenTelemetryHooks:
        return otel.OpenTelemetryHooks(tracer_provider=self.tracers, meter_provider=self.meters, **options)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def span(self, name: str) -> ReadableSpan:
        (span,) = self.spans(name)
        return span

    def metrics(self) -> dict[str, dict[tuple[object, ...], Any]]:
        """The points of each metric: counts and sums, by operation or class of error."""
        data = self._reader.get_metrics_data()
        assert data is not None
        found: dict[str, dict[tuple[object, ...], Any]] = {}
        for metric in data.resource_metrics[0].scope_metrics[0].metrics:
            for point in metric.data.data_points:
                attributes = point.attributes or {}
                assert attributes["messaging.system"] == "nsq"
                names = "messaging.operation.name", "messaging.destination.name", "error.type"
                key = tuple(attributes[name] for name in names if name in attributes)
                found.setdefault(metric.name, {})[key] = getattr(
                    point, "value", getattr(point, "count", None)
                )
        return found


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    telemetry = Telemetry()
    yield telemetry
    telemetry.meters.shutdown()
    telemetry.tracers.shutdown()


@pytest.fixture(scope="module")
def broker_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with qcli_serve(tmp_path_factory.mktemp("broker") / "data", "--sync=interval") as process:
        yield process


@pytest.fixture
def topic(broker_process: Broker) -> str:
    """A new topic with the channel `c`."""
    broker_process.create(name := next(_topics), "c")
    return name


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def id_of(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def parent_of(span: ReadableSpan) -> tuple[int, int] | None:
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


def links_of(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


@pytest.mark.slow  # starts a broker
@on_both
def test_a_trace_from_a_program_through_a_handler_to_the_next_topic(
    loop: Loop, telemetry: Telemetry, broker_process: Broker, topic: str
) -> None:
    tracer = telemetry.tracers.get_tracer("program")
    address = broker_process.tcp_address
    host, _, port = address.partition(":")
    next_topic = f"{topic}-next"
    tenants: list[object] = []

    async def main() -> None:
        async with Producer(address, hooks=telemetry.hooks()) as producer:
            with tracer.start_as_current_span("request"):
                token = context.attach(baggage.set_baggage("tenant", "7"))
                await producer.publish(topic, b"body", headers={"a": "1"})
                context.detach(token)

            async def handle(message: Message) -> None:
                await anyio.lowlevel.checkpoint()
                tenants.append(baggage.get_baggage("tenant"))
                assert message.headers["a"] == "1"
                await producer.submit(next_topic, b"next").wait()
                consumer.close_soon()

            async with Consumer(topic, "c", nsqd_tcp_addresses=address, hooks=telemetry.hooks()) as consumer:
                await consumer.run(handle)
                assert not get_current_span().get_span_context().is_valid
                message_id = telemetry.span(f"process {topic}").attributes

        request, sent = telemetry.span("request"), telemetry.span(f"send {topic}")
        process, passed_on = telemetry.span(f"process {topic}"), telemetry.span(f"send {next_topic}")
        assert parent_of(sent) == id_of(request)
        assert parent_of(process) == id_of(sent)
        assert links_of(process) == [id_of(sent)]
        assert parent_of(passed_on) == id_of(process)
        assert (sent.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
        assert message_id is not None
        common = {
            "messaging.system": "nsq",
            "messaging.destination.name": topic,
            "messaging.message.body.size": 4,
            "server.address": host,
            "server.port": int(port),
        }
        assert attributes_of(sent) == common | {
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
        }
        assert attributes_of(process) == common | {
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.consumer.group.name": "c",
            "messaging.message.id": message_id["messaging.message.id"],
            "messaging.nsq.message.delivery_attempt": 1,
        }
        assert tenants == ["7"]

    run(loop, main)
    metrics = telemetry.metrics()
    assert metrics["messaging.client.sent.messages"] == {("send", topic): 1, ("send", next_topic): 1}
    assert metrics["messaging.client.consumed.messages"] == {("receive", topic): 1}
    assert metrics["messaging.client.operation.duration"] == {("send", topic): 1, ("send", next_topic): 1}
    assert metrics["messaging.process.duration"] == {("process", topic): 1}
    assert metrics["nsq.client.connections"] == {(): 0}


@pytest.mark.slow
@on_both
def test_batches(loop: Loop, telemetry: Telemetry, broker_process: Broker, topic: str) -> None:
    """One span for a batch, with a link to each sender."""

    async def main() -> None:
        hooks = telemetry.hooks()
        async with Producer(broker_process.tcp_address, hooks=hooks) as producer:
            await producer.publish(topic, b"1")
            await producer.publish_many(topic, [b"2", b"3"])
            await producer.publish_set(topic, pack_messages([b"4"]))
        async with Consumer(
            topic, "c", nsqd_tcp_addresses=broker_process.tcp_address, hooks=hooks, max_in_flight=9
        ) as consumer:
            async for batch in consumer.batches(max_messages=4, max_wait_s=60):
                with consumer.processing(batch):
                    assert get_current_span().get_span_context().is_valid
                    batch.finish()
                assert not get_current_span().get_span_context().is_valid
                break
        one, many, packed = telemetry.spans(f"send {topic}")
        process = telemetry.span(f"process {topic}")
        assert sorted(links_of(process)) == sorted([id_of(one), *[id_of(many)] * 2])
        assert parent_of(process) is None
        counts = [
            attributes_of(span).get("messaging.batch.message_count") for span in (one, many, packed, process)
        ]
        assert counts == [None, 2, 1, 4]
        assert packed.kind == SpanKind.CLIENT

    run(loop, main)
    assert telemetry.metrics()["messaging.client.sent.messages"] == {("send", topic): 4}


@pytest.mark.slow
@on_both
def test_failures_and_dead_letters(
    loop: Loop, telemetry: Telemetry, broker_process: Broker, topic: str
) -> None:
    """The dead letter stays in the trace."""
    dead = f"{topic}-dead"

    async def main() -> None:
        hooks = telemetry.hooks()
        async with Producer(broker_process.tcp_address, hooks=hooks) as producer:
            await producer.publish(topic, b"x")

        async def fail(_: Message) -> None:
            raise LookupError("no such order")

        options: Any = {"nsqd_tcp_addresses": broker_process.tcp_address, "hooks": hooks}
        async with Consumer(topic, "c", **options, default_requeue_delay_s=0) as consumer:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(consumer.run, fail, max_attempts=2, dead_letter_topic=dead))
                while not consumer.stats().finished:
                    await anyio.sleep(0.001)
                tasks.cancel_scope.cancel()
        (sent,) = telemetry.spans(f"send {topic}")
        first, second = telemetry.spans(f"process {topic}")
        for attempt, span in enumerate((first, second), 1):
            assert span.status.status_code == StatusCode.ERROR
            assert span.status.description == "no such order"
            assert attributes_of(span)["error.type"] == "LookupError"
            assert attributes_of(span)["messaging.nsq.message.delivery_attempt"] == attempt
            assert [event.name for event in span.events] == ["exception"]
            assert parent_of(span) == id_of(sent)
        assert parent_of(telemetry.span(f"send {dead}")) == id_of(sent)

    run(loop, main)
    assert telemetry.metrics()["messaging.process.duration"] == {("process", topic, "LookupError"): 2}


@pytest.mark.slow
@on_both
def test_traceparent_of_an_http_request(
    loop: Loop, telemetry: Telemetry, broker_process: Broker, topic: str
) -> None:
    traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    url = f"http://{broker_process.http_address}/pub?topic={topic}"
    httpx.post(url, content=b"x", headers={"traceparent": traceparent}).raise_for_status()

    async def main() -> None:
        for continues in (True, False):
            hooks = telemetry.hooks(continue_traces=continues)
            async with Consumer(
                topic, "c", nsqd_tcp_addresses=broker_process.tcp_address, hooks=hooks
            ) as consumer:
                message = await consumer.get()
                with consumer.processing(message):
                    pass

    run(loop, main)
    sender = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
    child, root = telemetry.spans(f"process {topic}")
    assert (parent_of(child), parent_of(root)) == (sender, None)
    assert links_of(child) == links_of(root) == [sender]
    assert id_of(root)[0] != sender[0]


@pytest.mark.slow
def test_without_async_code(telemetry: Telemetry, broker_process: Broker, topic: str) -> None:
    tracer = telemetry.tracers.get_tracer("program")
    otel.instrument(tracer_provider=telemetry.tracers, meter_provider=telemetry.meters)
    try:
        with sync.Producer(broker_process.tcp_address) as producer, tracer.start_as_current_span("request"):
            producer.publish(topic, b"1")
            producer.submit(topic, b"2").wait()
            producer.publish_many(topic, [b"3"])
            producer.publish_set(topic, pack_messages([b"4"]))

        def handle(message: sync.Message) -> None:
            with tracer.start_as_current_span("work"):
                if message.body == b"4":
                    consumer.close_soon()

        with sync.Consumer(topic, "c", nsqd_tcp_addresses=broker_process.tcp_address) as consumer:
            consumer.run(handle)
    finally:
        otel.uninstrument()
    request = id_of(telemetry.span("request"))
    sent = telemetry.spans(f"send {topic}")
    assert [parent_of(span) for span in sent] == [request] * 4
    processes = telemetry.spans(f"process {topic}")
    assert [parent_of(span) for span in processes] == [*map(id_of, sent[:3]), None]
    assert [parent_of(span) for span in telemetry.spans("work")] == [id_of(span) for span in processes]


@pytest.mark.slow
@on_both
def test_envelopes(loop: Loop, telemetry: Telemetry, broker_process: Broker, topic: str) -> None:
    """The broker sees none of the headers, and messages without an envelope are received as they are."""
    lookalike = otel.ENVELOPE + b"\x00\x05a"
    inner = otel.ENVELOPE + prefix_of("c:3\n") + b"inner"

    async def main() -> None:
        address = broker_process.tcp_address
        async with Producer(address, hooks=telemetry.hooks(envelope=True)) as producer:
            await producer.publish(topic, b"1", headers={"a": "ü"})
            await producer.publish_many(topic, [b"2", lookalike])
        hooks = telemetry.hooks(envelope=True, propagate_context=False)
        async with Producer(address, hooks=hooks) as producer:
            await producer.publish(topic, inner)
        async with Producer(address) as producer:
            await producer.publish(topic, b"plain")
            await producer.publish(topic, lookalike)
            await producer.publish(topic, b"own", headers={"b": "2"})
        found: list[tuple[bytes, dict[str, str]]] = []
        async with Consumer(
            topic, "c", nsqd_tcp_addresses=address, hooks=telemetry.hooks(envelope=True), max_in_flight=9
        ) as consumer:
            while len(found) < 7:
                message = await consumer.get()
                with consumer.processing(message):
                    rest = {name: each for name, each in message.headers.items() if name != "traceparent"}
                    found.append((message.body, rest))
                    message.finish()
        assert found == [
            (b"1", {"a": "ü"}),
            (b"2", {}),
            (lookalike, {}),
            (inner, {}),
            (b"plain", {}),
            (lookalike, {}),
            (b"own", {"b": "2"}),
        ]
        sent = telemetry.spans(f"send {topic}")
        parents = [parent_of(span) for span in telemetry.spans(f"process {topic}")]
        assert parents == [id_of(sent[0]), id_of(sent[1]), id_of(sent[1]), *[None] * 4]

    run(loop, main)


@pytest.mark.slow
@on_both
def test_dead_letters_have_an_envelope_again(
    loop: Loop, telemetry: Telemetry, broker_process: Broker, topic: str
) -> None:
    dead = f"{topic}-dead"

    async def main() -> None:
        hooks = telemetry.hooks(envelope=True)
        address = broker_process.tcp_address
        async with Producer(address, hooks=hooks) as producer:
            await producer.publish(topic, b"x", headers={"a": "1"})

        async def fail(_: Message) -> None:
            raise LookupError

        async with Consumer(topic, "c", nsqd_tcp_addresses=address, hooks=hooks) as consumer:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(consumer.run, fail, max_attempts=1, dead_letter_topic=dead))
                async with Consumer(dead, "c", nsqd_tcp_addresses=address, hooks=None) as dead_letters:
                    message = await dead_letters.get()
                tasks.cancel_scope.cancel()
        assert message.body.startswith(otel.ENVELOPE)
        assert b"a:1\n" in message.body
        assert message.body.endswith(b"\nx")
        assert message.headers == {}

    run(loop, main)


def test_without_the_extra_an_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "trio_nsq.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ImportError, match=r"extra 'otel': pip install 'trio-nsq\[otel\]'"):
        import_module("trio_nsq.otel")


# ---------------------------------------------------------------------- brokers that know no headers


@bounded
async def test_brokers_without_headers_get_plain_messages_or_envelopes(
    telemetry: Telemetry, broker: FakeBroker
) -> None:
    async with opened(broker, hooks=telemetry.hooks()) as (producer, peer, nursery):
        plain = Outcome(nursery, producer.publish, "t", b"x")
        await peer.expect(pub("t", b"x"))
        await peer.send(OK_FRAME)
        await plain.success()
    hooks = telemetry.hooks(envelope=True, propagate_context=False)
    async with opened(broker, hooks=hooks) as (producer, peer, nursery):
        own = Outcome(nursery, partial(producer.publish, "t", b"x", headers={"a": "1"}))
        await peer.expect(pub("t", otel.ENVELOPE + prefix_of(encode_headers({"a": "1"})) + b"x"))
        await peer.send(OK_FRAME)
        await own.success()


@bounded
async def test_a_propagator_that_fails_changes_no_envelope(
    telemetry: Telemetry, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, nsqd would refuse the message because of its headers."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(propagate, "inject", fail)
    async with opened(broker, hooks=telemetry.hooks(envelope=True)) as (producer, peer, nursery):
        own = Outcome(nursery, partial(producer.publish, "t", b"x", headers={"a": "1"}))
        await peer.expect(pub("t", otel.ENVELOPE + prefix_of(encode_headers({"a": "1"})) + b"x"))
        await peer.send(OK_FRAME)
        await own.success()


@bounded
async def test_failed_publishes(telemetry: Telemetry, broker: FakeBroker) -> None:
    async with opened(broker, hooks=telemetry.hooks()) as (producer, peer, nursery):
        refused = Outcome(nursery, producer.publish, "t", b"x")
        await peer.expect(pub("t", b"x"))
        await peer.send(b"\0\0\0\x10\0\0\0\1E_PUB_FAILED")
        await refused.ended.wait()
        assert isinstance(refused.error, PublishFailed)
    span = telemetry.span("send t")
    assert span.status.status_code == StatusCode.ERROR
    assert attributes_of(span)["error.type"] == "E_PUB_FAILED"
    assert telemetry.metrics()["messaging.client.sent.messages"] == {("send", "t", "E_PUB_FAILED"): 1}
