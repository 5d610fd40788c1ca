"""Measure the web console beside nsqadmin: times of answers, page weight, and processor time with many viewers.

The fleet has 5 brokers with 10,000 channels each, in 1,000 topics. The goal is a page within 0.3 s.
"""

import argparse
import http.client
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import record
from bench.contenders import process_cpu_s

from console.viewers import live_viewers, read_until
from interop.peers import Broker, nsqadmin, qcli_admin, qcli_serve

TOPIC = "topic00007"
CHANNEL = "channel3"
REQUEST_S = 60.0
PATIENT = "--http-client-request-timeout=50s"
"""The brokers share the processors with everything else, so their answers may take long."""

API = {
    "list of topics": "/api/topics",
    "one topic": f"/api/topics/{TOPIC}",
    "one channel": f"/api/topics/{TOPIC}/{CHANNEL}",
    "one broker": "/api/nodes/{broker}",
    "counter": "/api/counter",
}
PAGES = {
    "list of topics": "/",
    "filtered": "/?q=7",
    "sorted": "/?sort=depth",
    "one topic": f"/topics/{TOPIC}",
    "one channel": f"/topics/{TOPIC}/{CHANNEL}",
    "nodes": "/nodes",
    "counter": "/counter",
}


@dataclass(frozen=True)
class Result:
    """Figures of one console.

    Attributes:
        contender: `qcli admin` or `nsqadmin`.
        kind: `api`, `page`, `viewers` or `weight`.
        name: What was measured.
        seconds: Each measurement; for `viewers` the processor time for each second.
        size: Bytes, of the answer or of the page with its parts.
    """

    contender: str
    kind: str
    name: str
    seconds: list[float]
    size: int = 0


# ------------------------------------------------------------------------------------------ the fleet


def fill(broker: Broker, topics: int, channels: int) -> None:
    """Create topics with channels, with several connections."""

    def create(part: int) -> None:
        connection = http.client.HTTPConnection(broker.http_address, timeout=REQUEST_S)
        for number in range(part, topics, 8):
            name = f"topic{number:05}"
            paths = [f"/topic/create?topic={name}"]
            paths += [f"/channel/create?topic={name}&channel=channel{each}" for each in range(channels)]
            for path in paths:
                connection.request("POST", path)
                answer = connection.getresponse()
                assert (answer.read(), answer.status) == (b"", 200)
        connection.close()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(create, range(8)))


@contextmanager
def fleet(folder: Path, topics: int, channels: int, brokers: int) -> Iterator[list[Broker]]:
    """Run brokers with the same topics: the data of one is made, the others get a copy."""
    with qcli_serve(folder / "broker0", "--sync=interval") as first:
        fill(first, topics, channels)
    for number in range(1, brokers):
        shutil.copytree(folder / "broker0", folder / f"broker{number}")
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                qcli_serve(folder / f"broker{number}", "--sync=interval", f"--node-id={number}")
            )
            for number in range(brokers)
        ]


# ------------------------------------------------------------------------------------------ measurements


def fetch(address: str, path: str) -> tuple[float, bytes]:
    """Return the time of a request on a new connection, and the answer."""
    began_s = time.perf_counter()
    connection = http.client.HTTPConnection(address, timeout=REQUEST_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{path}: {answer.status} {body[:200]!r}")
    return time.perf_counter() - began_s, body


def times(contender: str, kind: str, address: str, name: str, path: str, count: int) -> Result:
    """Measure an answer several times."""
    answers = [fetch(address, path) for _ in range(count)]
    return Result(contender, kind, name, [seconds for seconds, _ in answers], len(answers[-1][1]))


def weight(contender: str, address: str, path: str) -> Result:
    """Return the uncompressed bytes of a page, with its own style sheets, scripts and pictures."""
    _, page = fetch(address, path)
    parts = set(re.findall(r'(?:src|href)="(/[^"?]*\.(?:js|css|svg|ico|png))[^"]*"', page.decode()))
    return Result(
        contender, "weight", path, [], len(page) + sum(len(fetch(address, part)[1]) for part in parts)
    )


def watched(pid: int, address: str, viewers: int, seconds: float) -> Result:
    """Return the console's processor time for each second with this number of viewers of the list of topics."""
    name = f"{viewers} viewers"
    with live_viewers(address, "/", viewers) as watching:
        read_until(watching, lambda: all(viewer.updates for viewer in watching), "every viewer got the page")
        before_s, began_s = process_cpu_s(pid), time.monotonic()
        until_s = began_s + seconds
        read_until(watching, lambda: time.monotonic() > until_s, "the time is over")
        used_s = process_cpu_s(pid) - before_s
        return Result("qcli admin", "viewers", name, [used_s / (time.monotonic() - began_s)])


def measure_ours(brokers: Sequence[Broker], options: argparse.Namespace) -> list[Result]:
    """Measure the console."""
    flags = [f"--nsqd-http-address={broker.http_address}" for broker in brokers]
    flags.append(PATIENT)
    first: list[float] = []
    for _ in range(options.rounds):
        with qcli_admin(*flags) as console:
            first.append(fetch(console.http_address, "/")[0])
    results = [Result("qcli admin", "page", "first page after the start", first)]
    with qcli_admin(*flags) as console:
        address = console.http_address
        await_all(address, len(brokers))
        for name, path in PAGES.items():
            results.append(times("qcli admin", "page", address, name, path, options.rounds))
        for name, path in API.items():
            path = path.format(broker=brokers[0].http_address)
            results.append(times("qcli admin", "api", address, name, path, options.rounds))
        results += [weight("qcli admin", address, path) for path in ("/", f"/topics/{TOPIC}")]
        for viewers in (1, options.viewers):
            results.append(watched(console.process.pid, address, viewers, options.seconds))
    return results


def await_all(address: str, brokers: int) -> None:
    """Wait until the console has the answers of all brokers."""
    deadline = time.monotonic() + REQUEST_S
    while f"{brokers} <small>of {brokers}" not in fetch(address, "/")[1].decode():
        if time.monotonic() > deadline:
            raise RuntimeError("the console does not show all brokers")
        time.sleep(0.2)


def measure_theirs(brokers: Sequence[Broker], options: argparse.Namespace) -> list[Result]:
    """Measure nsqadmin. Its pages are made in the browser, from its API."""
    flags = [f"--nsqd-http-address={broker.http_address}" for broker in brokers]
    with nsqadmin((), *flags, PATIENT) as address:
        results = [
            times(
                "nsqadmin",
                "api",
                address,
                name,
                path.format(broker=brokers[0].http_address),
                options.rounds,
            )
            for name, path in API.items()
        ]
        results.append(weight("nsqadmin", address, "/"))
    return results


# ------------------------------------------------------------------------------------------ output


def show(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of the tables."""
    theirs = {(each.kind, each.name): each for each in results if each.contender == "nsqadmin"}
    yield f"\n{'':>6}{'':>28}{'median s':>10}{'most s':>10}{'KiB':>9}{'nsqadmin s':>12}{'ratio':>8}"
    for each in results:
        if each.contender == "nsqadmin" or each.kind not in ("page", "api"):
            continue
        middle = median(each.seconds)
        line = (
            f"{each.kind:>6}{each.name:>28}{middle:>10.3f}{max(each.seconds):>10.3f}{each.size / 1024:>9.1f}"
        )
        if other := theirs.get((each.kind, each.name)):
            line += f"{median(other.seconds):>12.3f}{middle / median(other.seconds):>8.2f}"
        yield line
    for each in results:
        if each.kind == "viewers":
            yield f"{each.name}: {100 * each.seconds[0]:.1f} % of a processor"
        if each.kind == "weight":
            yield f"{each.contender}, {each.name} with its parts: {each.size / 1024:.0f} KiB"


def parse() -> argparse.Namespace:
    """Parse the options."""
    parser = record.parser(__doc__, rounds=10)
    parser.add_argument("--brokers", type=int, default=5, help="brokers (default: %(default)s)")
    parser.add_argument("--topics", type=int, default=1000, help="topics of each (default: %(default)s)")
    parser.add_argument(
        "--channels", type=int, default=10, help="channels of each topic (default: %(default)s)"
    )
    parser.add_argument("--viewers", type=int, default=50, help="viewers (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="with these viewers (default: %(default)s)"
    )
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the requested results."""
    options = parse()
    about = record.begin(options)
    results: list[Result] = []
    measures: list[Callable[[Sequence[Broker], argparse.Namespace], list[Result]]] = [
        measure_ours,
        measure_theirs,
    ]
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=options.data_path) as folder,
        fleet(Path(folder), options.topics, options.channels, options.brokers) as brokers,
    ):
        print(f"{options.brokers} brokers with {options.topics} topics of {options.channels} channels each")
        for measure in measures:
            results += measure(brokers, options)
    print(*show(results), sep="\n")
    settings = {"topics": options.topics, "channels": options.channels, "brokers": options.brokers}
    record.finish(
        {"machine": about, "settings": settings, "results": [asdict(each) for each in results]},
        options,
        "console",
    )


if __name__ == "__main__":
    main()
