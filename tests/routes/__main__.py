"""Print the modules that five journeys through the project execute, in order: `make routes [ARGS=pub]`.

Each journey runs once before, so that nothing is imported or created for the first time. A module counts if one of its
functions runs; imports do not count. A return is an entry into a module that was entered before.
"""

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import httpx
import trio

import qcli
import trio_nsq
from broker.support import RawClient, connected, pub, running_broker, threads_done
from interop.peers import Broker, qcli_serve
from qcli.app import run
from trio_nsq.broker import BoundAddresses
from trio_nsq.console.options import ConsoleOptions
from trio_nsq.console.server import serve

ROOTS = {
    f"{Path(package.__file__ or '').parent}/": name for name, package in (("", trio_nsq), ("qcli/", qcli))
}
NAMES = ("PUB", "FIN", "HTTP /pub", "to-parquet", "console")
Route: TypeAlias = list[tuple[str, str]]
"""Calls: the file, relative to the package, and the function."""

_calls: Route = []


def _profile(frame: FrameType, event: str, _: Any) -> None:
    """Note a call of a function of the project."""
    if event == "call" and frame.f_code.co_name != "<module>":
        path = frame.f_code.co_filename
        for root, name in ROOTS.items():
            if path.startswith(root):
                _calls.append((name + path.removeprefix(root), frame.f_code.co_qualname))


@contextmanager
def noted() -> Iterator[Route]:
    """Return the calls inside the block: file and function."""
    _calls.clear()
    found: Route = []
    yield found
    found += _calls


@asynccontextmanager
async def consuming(bound: BoundAddresses) -> AsyncIterator[tuple[RawClient, RawClient]]:
    """Return a publisher and a ready consumer of the topic t, which exists."""
    async with connected(bound.tcp_address) as publisher, connected(bound.tcp_address) as consumer:
        await consumer.subscribe("t", "c", ready_count=10)
        await publisher.publish("t", b"makes the topic")
        await consumer.send(b"FIN %s\n" % (await consumer.message()).id)
        await threads_done()
        yield publisher, consumer


async def over_tcp(bound: BoundAddresses) -> dict[str, Route]:
    """Run one PUB up to the consumer, and one FIN."""
    async with consuming(bound) as (publisher, consumer):
        with noted() as of_pub:
            await publisher.send(pub("t", b"x"))
            message = await consumer.message()
            await publisher.ok()
            await threads_done()
        with noted() as of_fin:
            await consumer.send(b"FIN %s\n" % message.id)
            await threads_done()
    return {"PUB": of_pub, "FIN": of_fin}


async def over_http(bound: BoundAddresses) -> Route:
    """Run one POST /pub up to the consumer."""
    async with consuming(bound) as (_, consumer), httpx.AsyncClient() as client:
        for _ in range(2):
            with noted() as calls:
                await client.post(f"http://{bound.http_address}/pub?topic=t", content=b"x")
                await consumer.message()
                await threads_done()
    return calls


def into_parquet(broker: Broker, folder: Path) -> Route:
    """Run `qcli to-parquet` for one new message, in a folder that has a manifest."""
    command = ("to-parquet", "exported", str(folder), "--nsqd-http-address", broker.http_address)
    for _ in range(2):
        broker.post("/pub", b"x", topic="exported")
        with noted() as calls, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            assert run(command) == 0
    return calls


async def of_console(broker: Broker) -> Route:
    """Get the console's page of a topic; the brokers were polled before."""
    broker.post("/topic/create", b"", topic="shown")
    options = ConsoleOptions(http_address="127.0.0.1:0", nsqd_http_addresses=(broker.http_address,))
    async with trio.open_nursery() as nursery, httpx.AsyncClient() as client:
        addresses = await nursery.start(partial(serve, options))
        for _ in range(3):
            with noted() as calls:
                answer = await client.get(f"http://{addresses.http_address}/topics/shown")
                assert answer.status_code == 200, answer.text
        nursery.cancel_scope.cancel()
    return calls


def collapse(calls: Route) -> Route:
    """Return the first call of each stay in a file."""
    return [
        call
        for before, call in zip([None, *calls], calls, strict=False)
        if before is None or call[0] != before[0]
    ]


def trace(names: Sequence[str], folder: Path, sync: str) -> dict[str, Route]:
    """Run the journeys of these names."""
    found: dict[str, Route] = {}
    if {"PUB", "FIN", "HTTP /pub"} & set(names):

        async def in_this_process() -> None:
            # No checkpoint meanwhile: it belongs to no journey.
            broker = running_broker(folder / "d", sync=sync, checkpoint_interval_ms=3_600_000)
            async with broker as bound:
                found.update(await over_tcp(bound))
                found["HTTP /pub"] = await over_http(bound)

        trio.run(in_this_process)
    if {"to-parquet", "console"} & set(names):
        with qcli_serve(folder / "other") as broker:
            if "to-parquet" in names:
                found["to-parquet"] = into_parquet(broker, folder / "export")
            if "console" in names:
                found["console"] = trio.run(of_console, broker)
    return {name: found[name] for name in names}


def main() -> None:
    """Print the journeys."""
    parser = argparse.ArgumentParser(prog="make routes", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="JOURNEY", help=f"{', '.join(NAMES)}; all without one")
    parser.add_argument("--sync", default="always", help="of the broker (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print every call, for programs")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"there is no journey {', '.join(sorted(unknown))}; there are: {', '.join(NAMES)}")
    threading.setprofile(_profile)
    sys.setprofile(_profile)
    with tempfile.TemporaryDirectory() as scratch:
        found = trace(options.names or NAMES, Path(scratch), options.sync)
    sys.setprofile(None)
    if options.json:
        print(json.dumps(found))
        return
    for name, calls in found.items():
        route = collapse(calls)
        files = list(dict.fromkeys(file for file, _ in route))
        print(f"{name}: {len(files)} modules, {len(route) - len(files)} returns")
        for file, function in route if options.names else ():
            print(f"    {file:<50} {function}")


if __name__ == "__main__":
    main()
