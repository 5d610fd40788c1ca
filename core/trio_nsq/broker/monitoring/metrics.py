"""`/metrics`: metrics for Prometheus, encoded by its client library. docs/reference/metrics.md lists them.

A scrape is generated in pieces of some milliseconds each, and the broker serves clients in between: with ten thousand
channels the whole scrape takes most of a second. So its values are not all of the same instant.
"""

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from itertools import islice
from math import isinf

import trio
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    Sample,
)
from prometheus_client.exposition import choose_encoder

from ...http.messages import Request, Response
from ..server import Server
from ..state.channel import Channel
from ..state.topic import Topic
from .archive_metrics import of_archive
from .cluster_metrics import of_leader, of_member
from .disk import file_system_space
from .exposition import EOF, Encoder, Families, of_build, of_disk, process_metrics
from .histogram import Histogram
from .oldest import OldestMessages

_SAMPLES_PER_PIECE = 400
"""These take about two milliseconds."""
_BYTES_PER_LABELS = 250
_NS_PER_S = 1_000_000_000

Labels = dict[str, str]


# Name, help and value of the metrics of each topic and channel. A name that ends in `_total` is a counter.
TOPIC_METRICS: tuple[tuple[str, str, Callable[[Topic], float]], ...] = (
    (
        "nsq_topic_depth",
        "Messages that wait for a first channel, or for the end of a pause.",
        lambda t: t.depth,
    ),
    (
        "nsq_topic_backend_depth",
        "Messages of nsq_topic_depth that are not in memory.",
        lambda t: t.backend_depth,
    ),
    (
        "nsq_topic_deferred",
        "Deferred messages that wait for a first channel, or for the end of a pause.",
        lambda t: t.deferred_count,
    ),
    ("nsq_topic_messages_total", "Published messages.", lambda t: t.message_count),
    ("nsq_topic_message_bytes_total", "Bytes of published message bodies.", lambda t: t.message_bytes),
    ("nsq_topic_log_bytes", "Size of the log in bytes.", lambda t: t.log.size_bytes),
    ("nsq_topic_channels", "Number of channels.", lambda t: len(t.channels)),
    (
        "nsq_topic_expired_total",
        "Messages dropped because of ttl_ms before a channel received them.",
        lambda t: t.limits.expired_count,
    ),
    (
        "nsq_topic_dropped_total",
        "Messages dropped because of max_messages or max_bytes before a channel received them.",
        lambda t: t.limits.dropped_count,
    ),
    ("nsq_topic_paused", "1 if the topic is paused.", lambda t: t.paused),
)
CHANNEL_METRICS: tuple[tuple[str, str, Callable[[Channel], float]], ...] = (
    ("nsq_channel_depth", "Messages ready for delivery.", lambda c: c.depth),
    (
        "nsq_channel_backend_depth",
        "Messages of nsq_channel_depth that are not in memory.",
        lambda c: c.backend_depth,
    ),
    (
        "nsq_channel_in_flight",
        "Messages sent to consumers, and neither finished nor requeued.",
        lambda c: c.in_flight_count,
    ),
    ("nsq_channel_deferred", "Deferred messages.", lambda c: c.deferred_count),
    (
        "nsq_channel_blocked",
        "Messages of nsq_channel_depth that wait for an earlier message of their key (order_by).",
        lambda c: c.messages.blocked_count,
    ),
    ("nsq_channel_messages_total", "Messages received from the topic.", lambda c: c.message_count),
    ("nsq_channel_finished_total", "Finished messages (FIN).", lambda c: c.finish_count),
    ("nsq_channel_requeues_total", "Requeued messages (REQ).", lambda c: c.requeue_count),
    ("nsq_channel_timeouts_total", "Messages that exceeded the message timeout.", lambda c: c.timeout_count),
    (
        "nsq_channel_expired_total",
        "Messages dropped because of the topic's ttl_ms.",
        lambda c: c.messages.expired_count,
    ),
    (
        "nsq_channel_dropped_total",
        "Messages dropped because of the topic's max_messages or max_bytes.",
        lambda c: c.messages.dropped_count,
    ),
    (
        "nsq_channel_dead_letters_total",
        "Messages moved to the dead-letter topic after their last attempt.",
        lambda c: c.dead_letter_count,
    ),
    (
        "nsq_channel_given_up_total",
        "Messages dropped after their last attempt, without a dead-letter topic.",
        lambda c: c.given_up_count,
    ),
    ("nsq_channel_clients", "Connected consumers.", lambda c: len(c.consumers)),
    ("nsq_channel_paused", "1 if the channel is paused.", lambda c: c.paused),
)
OLDEST_AGE = "nsq_channel_oldest_message_age_seconds"
OLDEST_AGE_HELP = "Age of the oldest message that is ready or in flight; 0 if there is none."
LATENCY = "nsq_channel_e2e_processing_latency_seconds"
LATENCY_HELP = "Recent time from publish to FIN; needs --e2e-processing-latency-percentile."


class MetricsExposition:
    """Generates the scrapes of one broker."""

    def __init__(self, server: Server, oldest: OldestMessages) -> None:
        self._server = server
        self._oldest = oldest
        self._process = process_metrics()

    async def scrape(self, request: Request) -> Response:
        """Return all metrics in the format of the Accept header: OpenMetrics, or Prometheus' text format."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        topics = self._server.broker.topics.values()
        await self._oldest.refresh(channel for topic in topics for channel in topic.channels.values())
        space = await file_system_space(self._server.options.data_path)
        held = _BYTES_PER_LABELS * (len(topics) + sum(len(topic.channels) for topic in topics))
        return Response(200, self._pieces(encode, space), content_type, held_bytes=held)

    async def _pieces(self, encode: Encoder, space: tuple[int, int] | None) -> AsyncGenerator[bytes, None]:
        for text in self._texts(encode, space):
            yield text
            await trio.lowlevel.checkpoint()
        if encode(Families(())):  # OpenMetrics has an end marker
            yield EOF

    def _texts(self, encode: Encoder, space: tuple[int, int] | None) -> Iterator[bytes]:
        """Yield the scrape in pieces. The caller may let other tasks run in between."""
        yield encode(self._process).removesuffix(EOF)
        yield encode(Families(self._of_broker())).removesuffix(EOF)
        yield encode(Families(of_disk(space))).removesuffix(EOF)
        topics = [({"topic": t.name}, t) for _, t in sorted(self._server.broker.topics.items())]
        for name, text, of_topic in TOPIC_METRICS:
            samples = (Sample(name, labels, float(of_topic(topic))) for labels, topic in topics)
            yield from _in_pieces(encode, name, text, samples)
        channels = [
            (labels | {"channel": channel.name}, channel)
            for labels, topic in topics
            for _, channel in sorted(topic.channels.items())
        ]
        for name, text, of_channel in CHANNEL_METRICS:
            samples = (Sample(name, labels, float(of_channel(channel))) for labels, channel in channels)
            yield from _in_pieces(encode, name, text, samples)
        yield from _in_pieces(encode, OLDEST_AGE, OLDEST_AGE_HELP, self._ages(channels))
        if self._server.options.e2e_processing_latency_percentiles:
            yield from _in_pieces(encode, LATENCY, LATENCY_HELP, self._latencies(channels))

    def _of_broker(self) -> Iterator[Metric]:
        server, write_path = self._server, self._server.write_path
        yield of_build()
        yield GaugeMetricFamily(
            "nsq_healthy",
            "1 if the broker is healthy; 0 if the last write to disk failed or a topic is unavailable.",
            server.health == "OK",
        )
        draining = server.broker.draining
        yield GaugeMetricFamily("nsq_draining", "1 if the broker drains: it refuses publishes.", draining)
        unavailable = len(server.broker.unavailable)
        yield GaugeMetricFamily("nsq_unavailable_topics", "Topics whose files cannot be used.", unavailable)
        connections = server.sessions.connected
        producers = sum(1 for connection in connections if connection.pub_counts)
        yield GaugeMetricFamily("nsq_connections", "Connected TCP clients.", len(connections))
        refused = CounterMetricFamily(
            "nsq_refused_connections",
            "Connections refused because of --max-connections.",
            labels=["listener"],
        )
        for name, admission in server.admissions.items():
            refused.add_metric([name], admission.refused_count)
        yield refused
        failed = CounterMetricFamily(
            "nsq_auth_failures",
            "Failed logins: the token is unknown, expired or revoked, or the auth servers refused it.",
            labels=["protocol", "reason"],
        )
        for (protocol, reason), count in sorted(server.authentication.access.failures.totals.items()):
            failed.add_metric([protocol, reason], count)
        yield failed
        yield from self._of_audit_log()
        yield GaugeMetricFamily("nsq_producers", "Connected TCP clients that have published.", producers)
        yield _histogram(
            "nsq_append_duration_seconds",
            "Duration of an append to the log of a topic, including the sync with --sync=always.",
            write_path.append_duration,
        )
        yield _histogram(
            "nsq_sync_duration_seconds",
            "Duration of a scheduled sync of the log of a topic, with --sync=interval.",
            write_path.syncs.duration,
        )
        yield CounterMetricFamily(
            "nsq_syncs", "Syncs of topic logs to stable storage.", write_path.sync_count
        )
        if server.archiving is not None:
            yield from of_archive(server.archiving.status())
        replication = server.replication
        if replication is not None and (control := replication.control) is not None:
            yield from of_member(control.member(), control.times_led)
            yield from of_leader(
                control.status() | {"refuses_because": server.refuses_because},
                left=replication.left_count,
                catch_ups=replication.catch_up_count,
            )

    def _of_audit_log(self) -> Iterator[Metric]:
        audit = self._server.audit
        yield CounterMetricFamily("nsq_audit_lines", "Lines recorded in the audit log.", audit.log.recorded)
        yield CounterMetricFamily(
            "nsq_audit_suppressed",
            "Refusals that the audit log only counts, because there were too many.",
            audit.log.suppressed,
        )
        yield CounterMetricFamily(
            "nsq_audit_dropped",
            "Lines missing in the audit log, because it could not be written or was too slow.",
            audit.log.dropped,
        )
        yield GaugeMetricFamily(
            "nsq_audit_failed", "1 if the last write of the audit log failed.", bool(audit.error)
        )

    def _latencies(self, channels: Iterable[tuple[Labels, Channel]]) -> Iterator[Sample]:
        fractions, now_ns = self._server.options.e2e_processing_latency_percentiles, time.time_ns()
        for labels, channel in channels:
            if channel.e2e_latency is not None and (recent := channel.e2e_latency.recent(now_ns)).count:
                for fraction, value_ns in zip(fractions, recent.quantiles(fractions), strict=True):
                    quantile = labels | {"quantile": str(float(fraction))}
                    yield Sample(LATENCY, quantile, value_ns / _NS_PER_S)

    def _ages(self, channels: Iterable[tuple[Labels, Channel]]) -> Iterator[Sample]:
        now_ns = time.time_ns()
        for labels, channel in channels:
            if (age_ns := self._oldest.age_ns(channel, now_ns)) is not None:
                yield Sample(OLDEST_AGE, labels, age_ns / _NS_PER_S)


def _in_pieces(encode: Encoder, name: str, text: str, samples: Iterable[Sample]) -> Iterator[bytes]:
    """Encode one metric family, a few samples at a time."""
    kind = "counter" if name.endswith("_total") else "gauge"
    rest = iter(samples)
    first = True
    while True:
        family = Metric(name.removesuffix("_total"), text, kind)
        family.samples = list(islice(rest, _SAMPLES_PER_PIECE))
        if not first and not family.samples:
            return
        piece = encode(Families([family])).removesuffix(EOF)
        while not first and piece.startswith(b"#"):
            _, _, piece = piece.partition(b"\n")
        yield piece
        first = False


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    buckets = [("+Inf" if isinf(s) else str(s), float(count)) for s, count in histogram.cumulative()]
    return HistogramMetricFamily(name, text, buckets, sum_value=histogram.sum_s)
