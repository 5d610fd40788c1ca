"""The fuzzer: mutates valid inputs, and checks the results of a reader.

Every input has a number. It depends only on the seed and its number, so these two reproduce it in any run and
process.
"""

import multiprocessing
import os
import signal
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from struct import pack
from typing import Protocol

MEASURED_EVERY = 512
"""One of this many inputs is read with tracemalloc, which makes reading several times slower."""
SINGLE_BYTES = 250
"""Longer inputs are not read byte by byte: that is slow and finds no more."""
LONGEST_S = 20
"""An input that takes longer than this fails."""
JOB_INPUTS = 1024
"""The number of inputs in a task of a process."""


class Target(Protocol):
    """A reader to fuzz."""

    name: str
    memory_per_byte: int
    """The memory limit of a read, in bytes per byte of input, ..."""
    memory_bytes: int
    """... plus this constant."""

    def valid(self, rng: Random) -> list[bytes]:
        """Return a valid input, in the pieces that its grammar has: commands, frames, chunks, lines."""

    def check(self, data: bytes, rng: Random) -> None:
        """Read the input in several ways. Raises AssertionError if a check fails; any other exception is a
        failure, too.
        """

    def read(self, data: bytes) -> None:
        """Read the input once and keep nothing; the memory of this call is measured."""


@dataclass(frozen=True)
class Failure:
    """A failed input."""

    target: str
    number: int
    data: bytes
    reason: str


# ------------------------------------------------------------------------------------------------ inputs

NUMBERS = (
    0,
    1,
    2,
    3,
    4,
    15,
    16,
    63,
    64,
    65,
    127,
    128,
    255,
    256,
    1000,
    65535,
    65536,
    2**20,
    2**24,
    2**31 - 1,
    2**31,
)
HUGE = (b"-1", b"00", b"+5", b"99999999", b"18446744073709551616", b"9" * 400, b"0x10", b"1e9", b"\xd9\xa1")


def make(target: Target, seed: int, number: int) -> tuple[bytes, Random]:
    """Return the input of this number, and the random generator for further decisions about it."""
    rng = Random(seed << 40 | number)
    pieces = target.valid(rng)
    if rng.random() < 0.1:
        return b"".join(pieces), rng  # unchanged
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        _mutate_pieces(pieces, rng, target)
    data = bytearray(b"".join(pieces))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4, 8))):
        _mutate_bytes(data, rng)
    return bytes(data), rng


def _mutate_pieces(pieces: list[bytes], rng: Random, target: Target) -> None:
    """Remove, repeat, exchange or move whole parts, or insert some of another input."""
    if not pieces:
        return
    at = rng.randrange(len(pieces))
    match rng.randrange(5):
        case 0:
            del pieces[at]
        case 1:
            pieces[at:at] = [pieces[at]] * rng.choice((1, 1, 1, 2, 2, 9))
        case 2:
            other = rng.randrange(len(pieces))
            pieces[at], pieces[other] = pieces[other], pieces[at]
        case 3:
            others = target.valid(rng)
            start = rng.randrange(len(others) + 1)
            pieces[at:] = others[start:]
        case 4:
            pieces[at] = pieces[at][: rng.randrange(len(pieces[at]) + 1)]


def _mutate_bytes(data: bytearray, rng: Random) -> None:
    """Change some bytes: flip, overwrite, remove, insert, truncate, or change a number."""
    at = rng.randrange(len(data) + 1)
    match rng.randrange(10):
        case 0 | 1:
            if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
        case 2:
            if at < len(data):
                data[at] = rng.choice(b"\0\xff\n\r :/%0A\x7f\x80")
        case 3:
            del data[at : at + rng.choice((1, 1, 2, 4, 16))]
        case 4:
            data[at:at] = rng.choice((b"\n", b"\r\n", b" ", b"\0", rng.randbytes(3), b"\0\0\0\0"))
        case 5 | 6:
            number = rng.choice(NUMBERS) + rng.choice((-1, 0, 0, 0, 1))
            if rng.random() < 0.2:
                number = -number
            size = (
                pack(">I", number & 0xFFFFFFFF) if rng.random() < 0.8 else pack("<I", number & 0xFFFFFFFF)[:3]
            )
            data[at : at + len(size)] = size
        case 7:
            digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
            if digits:
                at = rng.choice(digits)
                data[at : at + 1] = rng.choice(HUGE)
        case 8:
            del data[at:]
        case 9:
            start = rng.randrange(len(data) + 1)
            data[at:at] = data[start : start + rng.choice((1, 4, 21, 100))]


def ways(data: bytes, rng: Random) -> Iterator[list[bytes]]:
    """Return the input split byte by byte, unless it is long, and into a few pieces, some of which may be
    empty.
    """
    if len(data) <= SINGLE_BYTES:
        yield [data[i : i + 1] for i in range(len(data))]
    places = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(1, 5)))
    yield [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


# ------------------------------------------------------------------------------------------------ runs


def _stuck(_number: int, _frame: object) -> None:
    raise AssertionError(f"not done within {LONGEST_S} s")


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise AssertionError in the running code if it takes too long. For the main thread only."""
    before = signal.signal(signal.SIGALRM, _stuck)
    signal.alarm(LONGEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def try_input(target: Target, seed: int, number: int, *, measured: bool) -> Failure | None:
    """Make one input and check it."""
    data, rng = make(target, seed, number)
    try:
        with _time_limit():
            target.check(data, rng)
        if measured:
            _check_memory(target, data)
    except Exception as error:
        return Failure(target.name, number, data, f"{type(error).__name__}: {error}")
    return None


def _check_memory(target: Target, data: bytes) -> None:
    allowed = target.memory_bytes + target.memory_per_byte * len(data)
    tracemalloc.start()
    try:
        target.read(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= allowed, f"{peak} bytes of memory for {len(data)} bytes of input; {allowed} are allowed"


def run(target: Target, seed: int, numbers: Iterator[int] | range) -> Failure | None:
    """Check these inputs; stop at the first that fails."""
    for number in numbers:
        if failure := try_input(target, seed, number, measured=number % MEASURED_EVERY == 0):
            return failure
    return None


def _number(failure: Failure) -> int:
    return failure.number


def run_in_processes(
    targets: Sequence[Target], seed: int, *, inputs: int | None, seconds: float | None, processes: int = 0
) -> tuple[dict[str, int], list[Failure]]:
    """Check this many inputs in total, or as many as the time allows; targets take turns.

    Args:
        targets: The targets; must be picklable.
        seed: The seed.
        inputs: The total number; None: no limit.
        seconds: The time limit; None: no limit.
        processes: The number of processes; 0: one for each processor.

    Returns:
        The number of checked inputs of each target, and the first failure of each; a target that failed is
        not continued.
    """
    deadline = time.monotonic() + seconds if seconds is not None else float("inf")
    counts = dict.fromkeys((target.name for target in targets), 0)
    first: dict[str, Failure] = {}
    processes = processes or os.cpu_count() or 1

    def jobs() -> Iterator[tuple[Target, range]]:
        left = inputs if inputs is not None else 2**40
        at = 0
        while left > 0:
            for target in targets:
                size = min(JOB_INPUTS, left)
                left -= size
                if size:
                    yield target, range(at, at + size)
            at += JOB_INPUTS

    remaining = jobs()
    under_way: dict[Future[Failure | None], tuple[Target, range]] = {}
    # The module of a target may not be importable in a new process.
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, mp_context=fork) as pool:
        while True:
            while len(under_way) < processes and time.monotonic() < deadline:
                job = next(((t, r) for t, r in remaining if t.name not in first), None)
                if job is None:
                    break
                under_way[pool.submit(run, job[0], seed, job[1])] = job
            if not under_way:
                return counts, [*first.values()]
            for done in wait(under_way, return_when=FIRST_COMPLETED).done:
                target, numbers = under_way.pop(done)
                failure = done.result()
                counts[target.name] += len(numbers) if failure is None else failure.number - numbers.start + 1
                if failure is not None:
                    first[target.name] = min(first.get(target.name, failure), failure, key=_number)
