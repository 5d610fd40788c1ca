"""Count lost and repeated messages when a broker is killed repeatedly (SIGKILL) under load, compared with nsqd.

The load and the ledger are those of tests/faults: publishers (PUB, MPUB, DPUB), and consumers that finish, requeue,
touch and abandon messages, on three topics with two channels each. A broker is killed after 1 to 5 s of load; one time
in five shortly after SIGTERM. After the last kill every channel is drained.
"""

import argparse
import random
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

import trio
from bench import record
from bench.contenders import EVERY_OK, INTERVAL, NSQD, ON_DISK, SYNCED, Contender

from faults.ledger import MS, Ledger, Verdict
from faults.load import MSG_TIMEOUT_MS, run_and_kill

CONTENDERS = [NSQD, ON_DISK, SYNCED, INTERVAL, EVERY_OK]
CHECKPOINT_INTERVAL_MS = 2000  # our default


def life_s(chance: random.Random) -> float:
    """Return the seconds of load until a broker is killed."""
    return chance.uniform(1, 5)


def measure(contender: Contender, kills: int, seed: int, data_path: Path) -> Verdict:
    """Kill one broker repeatedly, starting with an empty data folder."""
    ledger = Ledger(CHECKPOINT_INTERVAL_MS * MS, MSG_TIMEOUT_MS * MS)
    with tempfile.TemporaryDirectory(prefix="kills-", dir=data_path) as folder:
        start = partial(contender.start, Path(folder) / "data", *contender.flags)
        chance = random.Random(seed)
        run = partial(run_and_kill, start, ledger, kills, chance, operators=False, life_s=life_s)
        trio.run(run)
    return ledger.judge(ids_unique=not contender.is_nsqd)


def row(name: str, verdict: Verdict) -> str:
    """Format a line of the table."""
    share = 100 * verdict.lost / verdict.copies
    return (
        f"{name:<36}{verdict.kills:>6}{verdict.acknowledged:>14,}{verdict.copies:>12,}"
        f"{verdict.lost:>10,}{share:>8.2f}%{verdict.again:>10,}{verdict.early:>8,}"
    )


HEADER = f"{'':<36}{'kills':>6}{'acknowledged':>14}{'copies':>12}{'lost':>10}{'':>9}{'again':>10}{'early':>8}"
LEGEND = """
copies: of acknowledged messages, one for each channel. lost: never delivered, or not redelivered after a consumer
died. again: delivered again after their FIN. early: deferred or requeued, and delivered before they were due."""


def parse() -> argparse.Namespace:
    """Return the options of this run."""
    parser = record.parser(__doc__, only="the brokers whose names contain this")
    parser.add_argument("--kills", type=int, default=20, help="how often each is killed (default: 20)")
    parser.add_argument("--seed", type=int, default=7, help="seed of the load; its timing still varies")
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the requested results."""
    options = parse()
    about = record.begin(options)
    print("", HEADER, sep="\n", flush=True)
    results = []
    for contender in CONTENDERS:
        if options.only in contender.name:
            verdict = measure(contender, options.kills, options.seed, options.data_path)
            print(row(contender.name, verdict), flush=True)
            numbers = {name: value for name, value in asdict(verdict).items() if name != "wrong"}
            results.append({"broker": contender.name, "flags": contender.flags, **numbers})
    print(LEGEND)
    record.finish({"machine": about, "seed": options.seed, "results": results}, options, "kills")


if __name__ == "__main__":
    main()
