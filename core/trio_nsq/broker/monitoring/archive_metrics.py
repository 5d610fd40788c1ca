"""The metrics of a broker's archive."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...archive.writer import ArchiveStatus


def of_archive(status: ArchiveStatus) -> Iterator[Metric]:
    """Yield what is known of the archive. Counters start at 0 when the broker starts."""
    yield GaugeMetricFamily(
        "nsq_archive_lag_seconds",
        "Age of the oldest change that is not archived; 0 if all are.",
        status.lag_s,
    )
    yield GaugeMetricFamily(
        "nsq_archive_lag_bytes", "Bytes of the changes that are not archived.", status.lag_bytes
    )
    yield GaugeMetricFamily(
        "nsq_archive_up",
        "1 if the archive is written; 0 if it is not reached, or the data folder is being copied to it.",
        status.state == "archiving" and not status.error,
    )
    yield GaugeMetricFamily(
        "nsq_archive_checkpoint_timestamp_seconds",
        "When the last checkpoint of this run was finished, Unix seconds; 0: none yet.",
        status.checkpoint_time_ms / 1000,
    )
    yield CounterMetricFamily(
        "nsq_archive_checkpoints", "Copies of the data folder written to the archive.", status.checkpoints
    )
    yield CounterMetricFamily(
        "nsq_archive_objects", "Objects with changes written to the archive.", status.objects
    )
    yield CounterMetricFamily("nsq_archive_bytes", "Bytes of these objects, compressed.", status.object_bytes)
