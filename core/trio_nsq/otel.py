"""Spans and metrics of the client for OpenTelemetry, by its conventions for messaging. Needs the extra `otel`.

    trio_nsq.otel.instrument()

Then every `Producer` and `Consumer` that is created later, also those of `trio_nsq.sync`, makes

- a span `send TOPIC` for each publish, whose context goes into the headers of the messages;
- a span `process TOPIC` for each call of a handler of `Consumer.run`, and for each block
  `with consumer.processing(message_or_batch)`, with links to the spans that sent the messages;
- the metrics `messaging.client.sent.messages`, `messaging.client.consumed.messages`,
  `messaging.client.operation.duration` and `messaging.process.duration`;
- the metrics `nsq.client.connections` (open ones) and `nsq.client.connection.failures`.
"""

from collections.abc import Mapping, MutableMapping
from contextvars import Token
from time import perf_counter
from typing import NamedTuple, TypeAlias

from ._version import __version__
from .client.consuming.message import MessageBatch
from .client.errors import BrokerError, ConnectionFailed
from .client.hooks import Hooks, ProcessCall, PublishCall, installed_hooks
from .platform.extras import install_hint
from .protocol.address import parse_address
from .protocol.errors import NSQError
from .protocol.headers import checked_text, encode_headers, prefix_of, split_prefix
from .protocol.names import is_ephemeral

try:
    from opentelemetry import propagate
    from opentelemetry.context import Context, attach, detach, get_current
    from opentelemetry.metrics import MeterProvider, get_meter
    from opentelemetry.propagators.textmap import Setter
    from opentelemetry.trace import (
        Link,
        Span,
        SpanKind,
        Status,
        StatusCode,
        TracerProvider,
        get_current_span,
        get_tracer,
        set_span_in_context,
    )
except ImportError as error:
    raise ImportError(f"trio_nsq.otel needs the extra 'otel': {install_hint('otel')}") from error

__all__ = ["OpenTelemetryHooks", "instrument", "uninstrument"]

ENVELOPE = b"\x00nsq-headers:1\x00"
"""What an envelope begins with; then the headers and the body, as in an HPUB."""

_NAME = "trio_nsq"
_SYSTEM = "nsq"
_DURATIONS_S = [0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
"""The buckets that the conventions want."""
_TOKEN: TypeAlias = Token[Context]
_Attributes: TypeAlias = dict[str, str | int | bool]


class _Running(NamedTuple):
    """A span, with the attributes of its metrics."""

    span: Span
    attributes: _Attributes
    started_s: float
    token: _TOKEN | None = None


class OpenTelemetryHooks(Hooks):
    """Hooks that make spans and metrics. `instrument` installs them for all producers and consumers.

    Args:
        tracer_provider: Makes the spans; None: the global one.
        meter_provider: Makes the metrics; None: the global one.
        propagate_context: Add the context of the span to the headers of messages, by the global propagator:
            `traceparent`, `tracestate` and `baggage`. A broker that knows no headers, as nsqd, gets the messages
            without. False: publish them as they are.
        envelope: For nsqd: put all headers into the bodies, and take them out of the bodies that are received. Other
            programs see the envelope, so both sides need this. Messages without an envelope are received as they are,
            and messages of `publish_set` are sent as they are.
        continue_traces: The span of a single message belongs to the trace of its sender, as its child. False: it begins
            a trace. The link is there in both cases, and for batches.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        propagate_context: bool = True,
        envelope: bool = False,
        continue_traces: bool = True,
    ) -> None:
        self._tracer = get_tracer(_NAME, __version__, tracer_provider)
        self._propagates = propagate_context
        self._envelope = envelope
        self._continues = continue_traces
        meter = get_meter(_NAME, __version__, meter_provider)
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Messages that a producer attempted to send."
        )
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages that brokers have delivered."
        )
        self._send_duration = meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "Duration of a publish, until its acknowledgement.",
            explicit_bucket_boundaries_advisory=_DURATIONS_S,
        )
        self._process_duration = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "Duration of a handler.",
            explicit_bucket_boundaries_advisory=_DURATIONS_S,
        )
        self._connections = meter.create_up_down_counter(
            "nsq.client.connections", "{connection}", "Open connections to brokers."
        )
        self._failures = meter.create_counter(
            "nsq.client.connection.failures",
            "{attempt}",
            "Attempts to connect to a broker that have failed, and connections that were lost.",
        )

    def publish_started(self, call: PublishCall) -> None:
        try:
            self._start_sending(call)
        finally:  # if a sampler or propagator raises, nsqd would refuse the headers of the program
            if self._envelope and not call.is_packed:
                pairs = zip(call.bodies, call.headers, strict=True)
                call.bodies = [_enveloped(body, headers) for body, headers in pairs]
                call.headers = [{}] * len(call.bodies)

    def _start_sending(self, call: PublishCall) -> None:
        """Start a span, and add its context to the headers."""
        attributes = _attributes("send", call.topic)
        of_span: _Attributes = {**attributes, "messaging.operation.type": "send"}
        if call.is_list:
            of_span["messaging.batch.message_count"] = call.count
        else:
            of_span["messaging.message.body.size"] = len(call.bodies[0])
        context = get_current()
        if not call.is_list and not get_current_span(context).get_span_context().is_valid:
            context = propagate.extract(
                call.headers[0], context
            )  # a message that is passed on keeps its trace
        span = self._tracer.start_span(
            f"send {call.topic}",
            context,
            SpanKind.CLIENT if call.is_packed else SpanKind.PRODUCER,
            of_span,
        )
        call.state = _Running(span, attributes, perf_counter())
        if self._propagates and not call.is_packed:
            carrier: dict[str, str] = {}
            propagate.inject(carrier, set_span_in_context(span, context), _SETTER)
            call.add_headers(carrier)

    def publish_ended(self, call: PublishCall, error: BaseException | None) -> None:
        if call.state is None:
            return
        if call.nsqd_address is not None:
            call.state.span.set_attributes(_server(call.nsqd_address))
        duration_s = _end(call.state, error)
        self._sent.add(call.count, call.state.attributes)
        self._send_duration.record(duration_s, call.state.attributes)

    def received(self, topic: str, channel: str, batch: MessageBatch) -> None:
        if self._envelope:
            _open(batch)
        attributes = _attributes("receive", topic) | {"messaging.consumer.group.name": channel}
        self._consumed.add(len(batch), attributes)

    def process_started(self, call: ProcessCall) -> None:
        attributes = _attributes("process", call.topic)
        attributes["messaging.consumer.group.name"] = call.channel
        of_span: _Attributes = {
            **attributes,
            **_server(call.nsqd_address),
            "messaging.operation.type": "process",
        }
        context = get_current()
        senders = [propagate.extract(headers, Context()) for headers in call.headers if headers]
        links = [
            Link(sent) for each in senders if (sent := get_current_span(each).get_span_context()).is_valid
        ]
        if call.is_batch:
            of_span["messaging.batch.message_count"] = len(call.ids)
        else:
            of_span["messaging.message.id"] = call.ids[0].decode("ascii", "replace")
            of_span["messaging.message.body.size"] = len(call.bodies[0])
            of_span["messaging.nsq.message.delivery_attempt"] = call.attempts[0]
            if links:
                context = propagate.extract(call.headers[0], context)  # also its baggage
        parent = context
        if links and not call.is_batch and not self._continues:
            parent = set_span_in_context(_NO_SPAN, context)
        span = self._tracer.start_span(
            f"process {call.topic}", parent, SpanKind.CONSUMER, of_span, links=links
        )
        token = attach(set_span_in_context(span, context))
        call.state = _Running(span, attributes, perf_counter(), token)

    def process_ended(self, call: ProcessCall, error: BaseException | None) -> None:
        if call.state is None:
            return
        detach(call.state.token)
        duration_s = _end(call.state, error)
        self._process_duration.record(duration_s, call.state.attributes)

    def connected(self, nsqd_address: str) -> None:
        self._connections.add(1, _of_connection(nsqd_address))

    def disconnected(self, nsqd_address: str, error: NSQError | None) -> None:
        self._connections.add(-1, _of_connection(nsqd_address))
        if error is not None:
            self._failures.add(1, _of_connection(nsqd_address) | {"error.type": _error_type(error)})

    def connection_failed(self, nsqd_address: str, error: ConnectionFailed) -> None:
        self._failures.add(1, _of_connection(nsqd_address) | {"error.type": _error_type(error)})


def instrument(
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    propagate_context: bool = True,
    envelope: bool = False,
    continue_traces: bool = True,
) -> OpenTelemetryHooks:
    """Make spans and metrics for all producers and consumers that are created later.

    Those with the option `hooks` use that instead.

    Args:
        tracer_provider, meter_provider, propagate_context, envelope, continue_traces: See `OpenTelemetryHooks`.

    Returns:
        The hooks that are installed.
    """
    hooks = OpenTelemetryHooks(
        tracer_provider=tracer_provider,
        meter_provider=meter_provider,
        propagate_context=propagate_context,
        envelope=envelope,
        continue_traces=continue_traces,
    )
    hooks.install()
    return hooks


def uninstrument() -> None:
    """Undo `instrument`, for producers and consumers that are created later."""
    hooks = installed_hooks()
    if isinstance(hooks, OpenTelemetryHooks):
        hooks.uninstall()


class _LowerCase(Setter[MutableMapping[str, str]]):
    """Sets headers, whose names are lower case."""

    def set(self, carrier: MutableMapping[str, str], key: str, value: str) -> None:
        carrier[key.lower()] = value


_SETTER = _LowerCase()
_NO_SPAN = get_current_span(Context())


def _attributes(operation: str, topic: str) -> _Attributes:
    """Return the attributes of a span, and of its metrics."""
    attributes: _Attributes = {
        "messaging.system": _SYSTEM,
        "messaging.operation.name": operation,
        "messaging.destination.name": topic,
    }
    if is_ephemeral(topic):
        attributes["messaging.destination.temporary"] = True
    return attributes


def _server(nsqd_address: str) -> _Attributes:
    if "," in nsqd_address:  # of a batch from several brokers
        return {}
    host, port = parse_address(nsqd_address)
    return {"server.address": host, "server.port": port}


def _of_connection(nsqd_address: str) -> _Attributes:
    return {"messaging.system": _SYSTEM, **_server(nsqd_address)}


def _end(running: _Running, error: BaseException | None) -> float:
    """End a span; return its duration."""
    span, attributes, started_s, _ = running
    duration_s = perf_counter() - started_s
    if error is not None:
        attributes["error.type"] = _error_type(error)
        span.set_attribute("error.type", attributes["error.type"])
        span.set_status(Status(StatusCode.ERROR, str(error)))
        if isinstance(error, Exception):
            span.record_exception(error)
    span.end()
    return duration_s


def _error_type(error: BaseException) -> str:
    """Return the answer of the broker, or the class of what was raised."""
    cause = error.__cause__ if isinstance(error, NSQError) and error.__cause__ is not None else error
    return cause.code if isinstance(cause, BrokerError) else type(cause).__name__


def _enveloped(body: bytes, headers: Mapping[str, str]) -> bytes:
    if not headers and not body.startswith(ENVELOPE):
        return body
    return ENVELOPE + prefix_of(encode_headers(headers)) + body


def _open(batch: MessageBatch) -> None:
    """Take the headers out of the bodies that have an envelope."""
    texts: dict[int, str] = {}
    for index, body in enumerate(batch.bodies):
        if body.startswith(ENVELOPE):
            try:
                encoded, start = split_prefix(body, len(ENVELOPE), len(body))
                texts[index] = checked_text(encoded)
            except ValueError:
                continue  # it only looks like one
            batch.bodies[index] = body[start:]
    if texts:
        batch._replace_headers(texts)
