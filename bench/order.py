"""Deliver messages in the order of their keys, while the broker is killed; and what the order costs.

The load and the ledger are those of tests/faults/order_load.py. Without kills, the same backlog is consumed from a
channel with and without `order_by`, in turn.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import record
from bench.contenders import cpu_s

from faults.order_load import CHANNEL, ORDER_BY, TOPIC, batches, consume, consumers, set_order, under_kills
from interop.peers import Broker, qcli_serve

FLAGS = ("--sync=always",)


def rates(options: argparse.Namespace, data_path: Path) -> dict[str, list[dict[str, float]]]:
    """Consume the same backlog with and without an order, in turn; return the rates."""
    found: dict[str, list[dict[str, float]]] = {"": [], ORDER_BY: []}
    with qcli_serve(data_path, *FLAGS) as broker:
        for number in range(options.rounds):
            for order_by in sorted(found, reverse=bool(number % 2)):
                broker.create(TOPIC, CHANNEL)
                set_order(broker, order_by)
                for _, body in batches(options.messages, options.keys, random.Random(number)):
                    broker.post("/mpub", body, topic=TOPIC, binary="true")
                found[order_by].append(rate(broker, options.messages))
                broker.http("POST", "/topic/delete", topic=TOPIC)
    return found


def rate(broker: Broker, messages: int) -> dict[str, float]:
    """Consume a backlog; return messages per second, the broker's processor time for each, and refused answers."""
    before_s, begun_s = cpu_s(broker), time.monotonic()
    with consumers(broker, None, random.Random(1)) as made:
        consume(made, begun_s + 600, lambda: sum(each.count for each in made) >= messages)
        taken_s = time.monotonic() - begun_s - 0.2  # the last wait of `consume`
        refused = sum(each.refused for each in made)
    return {
        "rate": messages / taken_s,
        "cpu_us": 1e6 * (cpu_s(broker) - before_s) / messages,
        "refused": refused,
    }


def parse() -> argparse.Namespace:
    """Return the options of this run."""
    parser = record.parser(__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison (default: 3)")
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the requested results."""
    options = parse()
    about = record.begin(options)
    results: dict[str, Any] = {"machine": about, "messages": options.messages, "keys": options.keys}
    with tempfile.TemporaryDirectory(prefix="order-", dir=options.data_path) as folder:
        if options.kills:
            ledger = under_kills(
                Path(folder) / "kills",
                FLAGS,
                messages=options.messages,
                keys=options.keys,
                kills=options.kills,
                seed=options.seed,
            )
            print(
                f"{options.kills} kills, {sum(ledger.published):,} messages of {options.keys:,} keys: "
                f"{ledger.lost:,} lost, {len(ledger.wrong):,} wrong, {ledger.again:,} of {ledger.deliveries:,} "
                f"deliveries came again, {ledger.refused:,} answers refused"
            )
            print("\n".join(ledger.wrong[:20]))
            kept = {name: value for name, value in asdict(ledger).items() if isinstance(value, int)}
            results["kills"] = kept | {
                "kills": options.kills,
                "lost": ledger.lost,
                "wrong": len(ledger.wrong),
            }
        if options.rounds:
            found = rates(options, Path(folder) / "rates")
            medians = {name: statistics.median(each["rate"] for each in rows) for name, rows in found.items()}
            for name, rows in found.items():
                cpu_us = statistics.median(each["cpu_us"] for each in rows)
                refused = sum(int(each["refused"]) for each in rows)
                print(
                    f"{name or 'without order':<20}{medians[name]:>12,.0f} messages/s{cpu_us:>8.2f} us/message"
                    f"{refused:>8,} answers refused"
                )
            print(f"ratio {medians[ORDER_BY] / medians['']:.2f}")
            results["rates"] = found
    record.finish(results, options, "order")


if __name__ == "__main__":
    main()
