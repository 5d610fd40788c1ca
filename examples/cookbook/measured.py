"""Count and time the messages of a worker with OpenTelemetry: python measured.py

`instrument` gives the metrics of the client: rates, durations, failures, connections. The program adds its own: the
age of a message when it is handled, which shows whether the workers keep up.
"""

import asyncio
import signal
import sys
import time

from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, MetricsData, PeriodicExportingMetricReader

import trio_nsq
import trio_nsq.otel


def lines(data: MetricsData) -> str:
    """Return a line for each metric: its name, and how many it counts."""
    found = []
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                points = [
                    getattr(point, "value", getattr(point, "count", 0)) for point in metric.data.data_points
                ]
                found.append(f"{metric.name}: {sum(points)}\n")
    return "".join(sorted(found))


async def main() -> None:
    """Handle orders until SIGTERM."""
    age = metrics.get_meter("shop").create_histogram("shop.message.age", "s")

    async def handle(message: trio_nsq.Message) -> None:
        age.record(time.time() - message.timestamp_ns / 1e9, {"topic": "orders"})
        if message.body == b"bad":
            raise ValueError("this order cannot be handled")

    async with trio_nsq.Consumer("orders", "billing", nsqd_tcp_addresses="127.0.0.1:4150") as consumer:
        await consumer.run(
            handle,
            concurrency=10,
            max_attempts=1,
            dead_letter_topic="orders.failed",
            stop_on=(signal.SIGTERM,),
        )


if __name__ == "__main__":
    exporter = ConsoleMetricExporter(out=sys.stdout, formatter=lines)  # a real program: OTLPMetricExporter()
    provider = MeterProvider([PeriodicExportingMetricReader(exporter, export_interval_millis=60_000)])
    metrics.set_meter_provider(provider)
    trio_nsq.otel.instrument()
    asyncio.run(main())
    provider.shutdown()  # writes the last metrics
