"""What is lost and what comes twice when a broker is killed (SIGKILL) again and again under load: ours beside nsqd.

The load and the ledger are those of the tests in tests/faults: publishers (PUB, MPUB, DPUB), consumers that finish,
requeue, touch and forget messages, three topics with two channels each. A broker is killed after one to five seconds
of that, one time in five a moment after it was asked to stop. After the last kill every channel is drained.
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
    """Seconds of load until a broker is killed."""
    return chance.uniform(1, 5)


def measure(contender: Contender, kills: int, seed: int, data_path: Path) -> Verdict:
    """Kill one broker so many times; its data begins empty."""
    ledger = Ledger(CHECKPOINT_INTERVAL_MS * MS, MSG_TIMEOUT_MS * MS)
    with tempfile.TemporaryDirectory(prefix="kills-", dir=data_path) as folder:
        start = partial(contender.start, Path(folder) / "data", *contender.flags)
        chance = random.Random(seed)
        run = partial(run_and_kill, start, ledger, kills, chance, operators=False, life_s=life_s)
        trio.run(run)
    return ledger.judge(ids_unique=not contender.is_nsqd)


def row(name: str, verdict: Verdict) -> str:
    """A line of the table."""
    share = 100 * verdict.lost / verdict.copies
    return (
        f"{name:<36}{verdict.kills:>6}{verdict.acknowledged:>14,}{verdict.copies:>12,}"
        f"{verdict.lost:>10,}{share:>8.2f}%{verdict.again:>10,}{verdict.early:>8,}"
    )


HEADER = f"{'':<36}{'kills':>6}{'acknowledged':>14}{'copies':>12}{'lost':>10}{'':>9}{'again':>10}{'early':>8}"
LEGEND = """
copies: of acknowledged messages, one for each channel. lost: never delivered, or not again after a consumer had died
with it. again: delivered once more after their FIN. early: deferred or requeued, and delivered before their time."""


def parse() -> argparse.Namespace:
    """Return the options of this run."""
    parser = record.parser(__doc__, only="the brokers whose names contain this")
    parser.add_argument("--kills", type=int, default=20, help="how often each is killed (default: 20)")
    parser.add_argument("--seed", type=int, default=7, help="of what is done, though not of when exactly")
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write what was asked for."""
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
