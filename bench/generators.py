"""Compare the load generators, ours and NSQ's, in processor time per message.

Both do the same: publish with MPUB of 200 over 2 connections, then publish and consume.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import record
from bench.contenders import IN_MEMORY, INTERVAL
from bench.loads import BATCH, CHANNEL, TOPIC, fill, goload, reading, writing

BROKERS = {"ours": INTERVAL, "nsqd": IN_MEMORY}


Costs = dict[str, tuple[float, float]]
"""Messages per second, and microseconds of processor time per message, by job."""


def measure(options: argparse.Namespace) -> Costs:
    """Measure one round."""
    seconds = options.seconds
    with BROKERS[options.broker].running(options.data_path) as broker:
        broker.create(TOPIC, CHANNEL)
        writer = writing(broker, seconds).finish()
        fill(broker, round(600_000 * seconds))
        reader = reading(broker, seconds / 2).finish()
        alone = goload("pub", broker.tcp_address, topic="alone", batch=BATCH, runfor=f"{seconds}s")
        count = round(200_000 * seconds)
        both = goload("through", broker.tcp_address, topic="both", batch=BATCH, count=count)
    cpu_us = 1e6 / writer.cpu_rate
    return {
        "bench_writer": (writer.rate, cpu_us),
        "goload pub": _costs(alone),
        "bench_writer, then bench_reader": (
            1 / (1 / writer.rate + 1 / reader.rate),
            cpu_us + 1e6 / reader.cpu_rate,
        ),
        "goload through": _costs(both),
    }


def _costs(told: dict[str, float]) -> tuple[float, float]:
    return told["messages"] / told["seconds"], 1e6 * told["cpu_seconds"] / told["messages"]


def main() -> None:
    """Measure, print, and write the requested results."""
    parser = record.parser(__doc__, rounds=3)
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="length of one measurement (default: %(default)s)"
    )
    parser.add_argument("--broker", choices=BROKERS, default="nsqd", help="which one (default: %(default)s)")
    options = parser.parse_args()
    about = record.begin(options)
    rounds = [measure(options) for _ in range(options.rounds)]
    print(f"\n{'':<34}{'msg/s':>12}{'CPU us/msg':>12}")
    for name in rounds[0]:
        rate, cpu_us = (statistics.median(one[name][place] for one in rounds) for place in range(2))
        print(f"{name:<34}{rate:>12,.0f}{cpu_us:>12.3f}")
    record.finish({"machine": about, "broker": options.broker, "rounds": rounds}, options, "generators")


if __name__ == "__main__":
    main()
