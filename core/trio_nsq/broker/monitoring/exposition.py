"""What every `/metrics` has: versions, the process, the disk, and how Prometheus' library encodes them."""

import platform
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ..._version import __version__
from ...http.messages import Request, Response
from .disk import file_system_space

Encoder = Callable[[Collector], bytes]
EOF: Final = b"# EOF\n"
"""The end of an answer in OpenMetrics; pieces of an answer are encoded without it."""


class Families(Collector):
    """Wraps metric families as the collector that the library's encoders require."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def process_metrics() -> CollectorRegistry:
    """Return what collects the metrics of this process and of Python's garbage collector."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def of_build() -> Metric:
    about = {"version": __version__, "python_version": platform.python_version()}
    return InfoMetricFamily("nsq_build", "Versions of trio-nsq and of Python.", about)


def of_disk(space: tuple[int, int] | None) -> Iterator[Metric]:
    """Yield the metrics of the data folder's file system, without samples if its space is unknown."""
    for name, text, index in (
        ("nsq_disk_free_bytes", "Free space on the file system of the data folder.", 0),
        ("nsq_disk_size_bytes", "Size of the file system of the data folder.", 1),
    ):
        yield GaugeMetricFamily(name, text, None if space is None else space[index])


async def scrape_without_broker(request: Request, data_path: Path, families: Iterable[Metric]) -> Response:
    """Return what every `/metrics` has, and these few metrics, in the format of the Accept header."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    space = await file_system_space(data_path)
    found = [*process_metrics().collect(), of_build(), *of_disk(space), *families]
    return Response(200, encode(Families(found)), content_type)
