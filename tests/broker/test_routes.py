"""ARCHITECTURE.md tells which way a PUB and a FIN take through the broker. They do."""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import trio_nsq
from broker.support import connected, pub, running_broker, threads_done

SOURCES = Path(trio_nsq.__file__).parent
DOCUMENT = Path(__file__).parents[2] / "ARCHITECTURE.md"
SYNCS = range(9, 14)
"""The steps of a PUB that are missing with `--sync=interval`."""


def steps(title: str) -> list[tuple[str, str]]:
    """The file and the function of each step of a route."""
    section = DOCUMENT.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| \d+ \| `([^`]+)` \| `([^`]+)` \|", section, re.MULTILINE)


def files_and_returns(route: list[tuple[str, str]]) -> tuple[int, int]:
    """How many files a route enters, and how often it comes back to one that it has left."""
    files = [file for file, _ in route]
    entered = [file for before, file in zip([None, *files], files, strict=False) if file != before]
    return len(set(entered)), len(entered) - len(set(entered))


@contextmanager
def traced(calls: list[tuple[str, str]]) -> Iterator[None]:
    """Have all calls of functions of the library noted, in all threads that run already."""

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{SOURCES}/"):
            calls.append((frame.f_code.co_filename.removeprefix(f"{SOURCES}/"), frame.f_code.co_qualname))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def assert_taken(route: list[tuple[str, str]], calls: list[tuple[str, str]]) -> None:
    at = iter(calls)
    for step in route:
        assert step in at, f"{step} is not called, or not behind the steps before it"


@pytest.mark.parametrize(("sync", "limit"), [("always", (12, 7)), ("interval", (11, 4))])
async def test_routes(tmp_path: Path, sync: str, limit: tuple[int, int]) -> None:
    route = [
        step
        for number, step in enumerate(steps("Life of a PUB"), start=1)
        if sync == "always" or number not in SYNCS
    ]
    fin = steps("Life of a FIN")
    assert files_and_returns(route) == limit
    assert files_and_returns(fin) == (5, 1)
    calls: list[tuple[str, str]] = []
    with traced(calls):  # from the beginning: a thread that syncs stays
        async with running_broker(tmp_path / "d", sync=sync) as bound:
            async with connected(bound.tcp_address) as publisher, connected(bound.tcp_address) as consumer:
                await consumer.subscribe("t", "c", ready_count=10)
                await publisher.publish("t", b"makes the topic")
                await consumer.message()
                await threads_done()
                calls.clear()
                await publisher.send(pub("t", b"x"))
                message = await consumer.message()
                await publisher.ok()
                await threads_done()
                assert_taken(route, calls)
                calls.clear()
                await consumer.send(b"FIN %s\n" % message.id)
                await threads_done()
                assert_taken(fin, calls)
