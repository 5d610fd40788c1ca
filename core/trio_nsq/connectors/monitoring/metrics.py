"""`/metrics` of a job, encoded by Prometheus' library. docs/reference/metrics.md lists the names."""

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from ...broker.monitoring.exposition import Families, of_build, process_metrics
from ...http.messages import Request, Response
from .status import JobStatus, TopicStatus

TOPIC_METRICS: Final[tuple[tuple[str, str, Callable[[TopicStatus], float | None]], ...]] = (
    ("nsq_job_messages_total", "Messages that are stored.", lambda t: t.messages),
    ("nsq_job_message_bytes_total", "Bytes of their bodies.", lambda t: t.body_bytes),
    ("nsq_job_files_total", "Files written.", lambda t: t.files),
    ("nsq_job_file_bytes_total", "Size of these files in bytes.", lambda t: t.file_bytes),
    ("nsq_job_unparsed_total", "Messages whose body is in the column unparsed.", lambda t: t.unparsed),
    ("nsq_job_misfits_total", "Values that did not fit their column.", lambda t: t.misfits),
    (
        "nsq_job_left_out_total",
        "Messages not stored: copies for one channel, repetitions, or filtered.",
        lambda t: t.left_out,
    ),
    ("nsq_job_missing_total", "Messages deleted or damaged before they were read.", lambda t: t.missing),
    ("nsq_job_dead_letters_total", "Messages published to a dead-letter topic.", lambda t: t.dead_letters),
    (
        "nsq_job_failures_total",
        "Rounds, requests of to-http or to-nsq, or writes of to-file that failed.",
        lambda t: t.failures,
    ),
    (
        "nsq_job_failing",
        "1 if the last round, request of to-http or to-nsq, or write of to-file failed.",
        lambda t: bool(t.error),
    ),
    ("nsq_job_lag_messages", "Known messages that are not stored yet.", lambda t: t.lag),
    ("nsq_job_lag_seconds", "All messages published before this time are stored.", lambda t: t.lag_s),
    (
        "nsq_job_last_round_timestamp_seconds",
        "When the last complete round of the topic ended, Unix time.",
        lambda t: t.last_round_at,
    ),
)
"""Name, help and value of the metrics of each topic. A name that ends in `_total` is a counter; None has no sample."""


def scrape(request: Request, status: JobStatus) -> Response:
    """Return the metrics in the format of the Accept header."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    families = [*process_metrics().collect(), of_build(), *_of_job(status), *_of_topics(status)]
    return Response(200, encode(Families(families)), content_type)


def _of_job(status: JobStatus) -> Iterator[Metric]:
    yield InfoMetricFamily("nsq_job", "The job.", {"kind": status.kind, "name": status.name})
    yield GaugeMetricFamily("nsq_job_healthy", "1 if /healthz answers OK.", int(not status.problems))
    yield GaugeMetricFamily("nsq_job_start_time_seconds", "When the job began, Unix time.", status.started_at)
    yield GaugeMetricFamily("nsq_job_topics", "Number of topics.", len(status.topics))
    yield GaugeMetricFamily(
        "nsq_job_written_messages", "Messages written, also to incomplete files.", status.written
    )
    if status.rounds is not None:
        yield CounterMetricFamily("nsq_job_rounds_total", "Complete rounds.", status.rounds)


def _of_topics(status: JobStatus) -> Iterator[Metric]:
    for name, text, value in TOPIC_METRICS:
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(name, text, labels=["topic"])
        for topic in status.topics:
            if (found := value(topic)) is not None:
                family.add_metric([topic.topic], float(found))
        yield family
