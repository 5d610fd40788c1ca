"""Fuzzes the readers of untrusted data, without sockets:

    python -m fuzz.protocol --inputs 1000000
    python -m fuzz.protocol --seconds 60 --target commands
    python -m fuzz.protocol --seed 7 --target http --input 4711    (repeats one input)

Only documented errors may be raised, the result must not depend on how the input is split, memory must stay
within the limit of the target, and no input may expand beyond its limit. A failure prints how to reproduce
it, and the exit code is 1.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from fuzz.codecs import DeflateStream, SnappyStream
from fuzz.commands import Commands, Identities
from fuzz.engine import Failure, Target, make, run_in_processes, try_input
from fuzz.frames import Frames
from fuzz.lookupd import Lookupd
from fuzz.records import Payloads
from fuzz.requests import Requests

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Commands(),
        Identities(),
        Frames(),
        SnappyStream(),
        DeflateStream(),
        Requests(),
        Lookupd(),
        Payloads(),
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m fuzz.protocol",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--inputs", type=int, help="so many inputs in all")
    parser.add_argument("--seconds", type=float, help="for so long; 10, if --inputs is not given either")
    parser.add_argument("--seed", type=int, default=1, help="another seed makes other inputs (default: 1)")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this one; may be repeated")
    parser.add_argument("--input", type=int, metavar="N", help="only the Nth input of --target, and show it")
    given = parser.parse_args(arguments)
    targets = [TARGETS[name] for name in given.target or TARGETS]
    if given.input is not None:
        return show(targets, given.seed, given.input)
    seconds = 10.0 if given.inputs is None and given.seconds is None else given.seconds
    began = time.monotonic()
    counts, failures = run_in_processes(targets, given.seed, inputs=given.inputs, seconds=seconds)
    took_s = time.monotonic() - began
    for name, count in counts.items():
        print(f"{name:10}{count:>12,} inputs")
    print(f"{'all':10}{sum(counts.values()):>12,} inputs with seed {given.seed} in {took_s:.0f} s")
    for failure in failures:
        report(failure, given.seed)
    return 1 if failures else 0


def show(targets: Sequence[Target], seed: int, number: int) -> int:
    """Check one input of each target, and print it."""
    failures = [try_input(target, seed, number, measured=True) for target in targets]
    for target, failure in zip(targets, failures, strict=True):
        if failure is None:
            print(f"{target.name}: input {number} of seed {seed} is fine: {make(target, seed, number)[0]!r}")
        else:
            report(failure, seed)
    return 1 if any(failures) else 0


def report(failure: Failure, seed: int) -> None:
    """Print the failure, and how to reproduce it."""
    print(
        f"\n{failure.target}: input {failure.number} of seed {seed} failed: {failure.reason[:2000]}\n"
        f"the input: {failure.data!r}\n"
        f"again: python -m fuzz.protocol --seed {seed} --target {failure.target} --input {failure.number}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
