"""Measure how clients affect each other: the latency of a client's PUBs with and without an attack by other clients.

The attack and the measured client, the neighbour, run in separate processes. The neighbour publishes one message after
the other to an unrelated topic. README.md in this folder explains how to add an attack.
"""

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from struct import pack, unpack
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import trio
from bench import record
from bench.contenders import EVERY_OK, IN_MEMORY, INTERVAL, Contender, memory_mib

from interop.peers import Broker

CONTENDERS = {"I": INTERVAL, "F": EVERY_OK, "nsqd": IN_MEMORY.with_flags("--mem-queue-size=100000")}
GOAL_MS = 20.0
"""The default limit of the 99th percentile of the neighbour's requests."""
PACE_S = {"PUB": 0.005, "CREATE": 0.1}
"""The interval between two requests of the neighbour."""
BEGIN_DEADLINE_S = 120.0
TOPIC = "neighbour"
BODY = b"x" * 200
OK_FRAME = pack(">ii", 6, 0) + b"OK"
MIB = 1024**2


# ------------------------------------------------------------------------------------------ for attacks


class Attack:
    """The context of an attack: the broker's addresses, and clients for it.

    Attributes:
        tcp_address, http_address: `host:port`.
        done: The number of requests, for the table: an attack that the broker refuses at once makes few.
    """

    def __init__(self, tcp_address: str, http_address: str) -> None:
        self.tcp_address = tcp_address
        self.http_address = http_address
        self.done = 0
        self._under_way = False

    def under_way(self) -> None:
        """Signal that the preparations are complete and the measurement can start. Further calls do nothing."""
        if not self._under_way:
            self._under_way = True
            print("under way", flush=True)

    async def connect(self) -> "Client":
        """Connect over TCP and send the magic."""
        host, _, port = self.tcp_address.rpartition(":")
        client = Client(await trio.open_tcp_stream(host, int(port)))
        await client.send(b"  V2")
        return client

    async def http(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Make one HTTP request, in a thread; return status and body."""
        return await trio.to_thread.run_sync(request, self.http_address, method, path, body)


class Client:
    """A V2 connection of an attack. All methods raise `GONE` when the broker has closed it."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._buffer = b""

    async def send(self, *parts: bytes) -> None:
        """Send raw bytes."""
        await self.stream.send_all(b"".join(parts))

    async def frame(self) -> tuple[int, bytes]:
        """Wait for the next frame, answering heartbeats; return its type and content."""
        while True:
            size, frame_type = unpack(">ii", await self._take(8))
            content = await self._take(size - 4)
            if content != b"_heartbeat_":
                return frame_type, content
            await self.send(b"NOP\n")

    async def drain(self) -> None:
        """Read and drop all data until cancelled or closed; heartbeats are not answered."""
        while await self.stream.receive_some(256 * 1024):
            pass
        raise trio.ClosedResourceError

    async def aclose(self) -> None:
        """Close the connection."""
        await self.stream.aclose()

    async def _take(self, count: int) -> bytes:
        while len(self._buffer) < count:
            data = await self.stream.receive_some(256 * 1024)
            if not data:
                raise trio.ClosedResourceError
            self._buffer += data
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken


GONE = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)
"""The broker has closed a connection, or refuses connections."""


def with_body(line: str, body: bytes) -> bytes:
    """Encode a command with a body."""
    return line.encode() + b"\n" + pack(">i", len(body)) + body


def request(address: str, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Make one HTTP request."""
    connection = http.client.HTTPConnection(address, timeout=BEGIN_DEADLINE_S)
    try:
        connection.request(method, path, body)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


async def repeat(count: int, work: Callable[[], Awaitable[None]]) -> None:
    """Repeat work in `count` tasks, also after the broker has closed a connection."""

    async def again() -> None:
        while True:
            try:
                await work()
            except GONE:
                await trio.sleep(0.01)

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(again)


# ------------------------------------------------------------------------------------------ attacks


async def large_identify(attack: Attack) -> None:
    """IDENTIFY bodies of the maximum size and nesting, from unauthenticated clients."""
    bodies = []
    for size in (64 * 1024, 5 * MIB):
        keys = ",".join(f'"{n:x}":[]' for n in range(size // 12))
        bodies += [f"{{{keys}}}".encode(), b"[" * size, b'{"a":' * (size // 5)]
    attack.under_way()

    async def one() -> None:
        for body in bodies:
            try:
                client = await attack.connect()
                async with client.stream:
                    await client.send(with_body("IDENTIFY", body))
                    await client.frame()
            finally:
                attack.done += 1

    await repeat(4, one)


async def slow_names(attack: Attack) -> None:
    """Sixty discovery services with unknown host names, whose lookups fail slowly (`bench/slow_names.py`)."""
    names = json.dumps([f"n{n}.slow.invalid:4160" for n in range(60)]).encode()
    status, told = await attack.http("PUT", "/config/nsqlookupd_tcp_addresses", names)
    assert status == 200, told
    attack.under_way()
    attack.done = 60
    await trio.sleep_forever()


async def connections(attack: Attack) -> None:
    """Two thousand idle connections; refused ones reconnect."""

    async def one() -> None:
        client = await attack.connect()
        attack.done += 1
        async with client.stream:
            while True:
                await client.frame()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(repeat, 2000, one)
        await trio.sleep(3)
        attack.under_way()


async def unfinished_bodies(attack: Attack) -> None:
    """A hundred clients send MPUBs of 5 MB without the last bytes, and then wait."""
    message = pack(">i", 1_048_000) + bytes(1_048_000)
    most = with_body("MPUB unfinished", pack(">i", 5) + 5 * message)[:-100]

    async def one() -> None:
        client = await attack.connect()
        async with client.stream:
            await client.send(most)
            attack.done += 1
            while True:
                await client.frame()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(repeat, 100, one)
        await trio.sleep(3)
        attack.under_way()


async def unfinished_requests(attack: Attack) -> None:
    """A hundred clients send 5 MB to /mpub without the last bytes, and then wait."""
    host, _, port = attack.http_address.rpartition(":")
    message = pack(">i", 1_048_000) + bytes(1_048_000)
    body = pack(">i", 5) + 5 * message
    head = "POST /mpub?topic=unfinished&binary=true HTTP/1.1\r\nHost: x\r\n"
    most = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:-100]

    async def one() -> None:
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            await stream.send_all(most)
            attack.done += 1
            await stream.receive_some()  # the broker closes it

    async with trio.open_nursery() as nursery:
        nursery.start_soon(repeat, 100, one)
        await trio.sleep(3)
        attack.under_way()


TINY_MPUB = pack(">i", 1_000_000) + b"\0\0\0\1x" * 1_000_000


async def tiny_messages(attack: Attack) -> None:
    """An MPUB of a million one-byte messages every second, over HTTP, to a topic without consumers."""
    attack.under_way()
    while True:
        status, told = await attack.http("POST", "/mpub?topic=tiny&binary=true", TINY_MPUB)
        assert status == 200, told
        attack.done += 1
        await trio.sleep(1)


async def tiny_redelivered(attack: Attack) -> None:
    """Two MPUBs of a million one-byte messages; three clients each let 2,500 of them time out every second."""
    for path in (
        "topic/create?topic=tiny",
        "channel/create?topic=tiny&channel=c",
        *["mpub?topic=tiny&binary=true"] * 2,
    ):
        status, told = await attack.http("POST", f"/{path}", TINY_MPUB if path.startswith("mpub") else b"")
        assert status == 200, told
    attack.under_way()

    async def one() -> None:
        client = await attack.connect()
        async with client.stream:
            await client.send(with_body("IDENTIFY", b'{"msg_timeout":1000}'), b"SUB tiny c\nRDY 2500\n")
            while True:
                frame_type, _ = await client.frame()
                attack.done += frame_type == 2

    await repeat(3, one)


async def unknown_ids(attack: Attack) -> None:
    """FIN, REQ and TOUCH of unknown messages, while 300 other clients of the channel have 500 in flight each."""
    for path in ("/topic/create?topic=crowd", "/channel/create?topic=crowd&channel=c"):
        status, told = await attack.http("POST", path)
        assert status == 200, told
    for _ in range(300):
        status, told = await attack.http("POST", "/mpub?topic=crowd", b"x\n" * 500)
        assert status == 200, told

    async def consume() -> None:
        client = await attack.connect()
        async with client.stream:
            await client.send(b"SUB crowd c\n", b"RDY 500\n")
            while True:
                await client.frame()

    ids = [b"%016x" % (1 << 60 | number) for number in range(1000)]
    lines = b"".join(
        [b"FIN %s\n" % each for each in ids]
        + [b"REQ %s 0\n" % each for each in ids]
        + [b"TOUCH %s\n" % each for each in ids]
    )

    async def one() -> None:
        client = await attack.connect()
        async with client.stream, trio.open_nursery() as nursery:
            nursery.start_soon(client.drain)
            await client.send(b"SUB crowd c\n")
            while True:
                await client.send(lines)
                attack.done += 3 * len(ids)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(repeat, 300, consume)
        await trio.sleep(3)
        attack.under_way()
        nursery.start_soon(repeat, 1, one)


async def nops(attack: Attack) -> None:
    """NOPs, then NOPs with a carriage return, as fast as the broker reads them."""
    attack.under_way()

    async def one() -> None:
        client = await attack.connect()
        async with client.stream, trio.open_nursery() as nursery:
            nursery.start_soon(client.drain)
            while True:
                await client.send(b"NOP\n" * 16_384, b"NOP\r\n" * 16_384)
                attack.done += 2 * 16_384

    await repeat(1, one)


async def seeks(attack: Attack) -> None:
    """Consecutive seeks of a channel with a million deferred messages, to positions all over its topic."""
    for path in ("/topic/create?topic=later", "/channel/create?topic=later&channel=c"):
        status, told = await attack.http("POST", path)
        assert status == 200, told
    for number in range(20):
        path = f"/mpub?topic=later&producer=p&number={number}&defer=3600000"
        status, told = await attack.http("POST", path, b"x\n" * 50_000)
        assert status == 200, told
    attack.under_way()

    while True:
        for percent in (0, 30, 60):
            path = f"/channel/seek?topic=later&channel=c&to={10_000 * percent}"
            status, told = await attack.http("POST", path + ("&dry_run=true" if percent else ""))
            assert status == 200, told
            attack.done += 1


async def slow_disk(attack: Attack) -> None:
    """A consumer of a backlog on a disk that takes 1 s per read (`bench/slow_disk.py`)."""
    for path in ("topic/create?topic=cold", "channel/create?topic=cold&channel=c"):
        await attack.http("POST", f"/{path}")
    for _ in range(20):
        await attack.http("POST", "/mpub?topic=cold", b"\n".join([BODY] * 1000))
    attack.under_way()

    async def one() -> None:
        client = await attack.connect()
        async with client.stream:
            await client.send(b"SUB cold c\nRDY 2500\n")
            while True:
                frame_type, content = await client.frame()
                if frame_type == 2:
                    await client.send(b"FIN %s\n" % content[10:26])
                    attack.done += 1

    await repeat(1, one)


@dataclass(frozen=True)
class Scenario:
    """One attack.

    Attributes:
        name: The name on the command line.
        attack: Runs in its own process until cancelled; see `Attack`.
        flags: Additional flags of our broker.
        patch: A module of `bench` that our broker's process imports first, to simulate a slow or failing machine.
        request: The neighbour's request: `PUB`, or `CREATE`, a new channel over HTTP, which the broker has to save.
        goal_ms: The limit of the 99th percentile of the neighbour's requests.
    """

    name: str
    attack: Callable[[Attack], Awaitable[None]]
    flags: tuple[str, ...] = ()
    patch: str = ""
    request: str = "PUB"
    goal_ms: float = GOAL_MS

    @property
    def about(self) -> str:
        """The first line of the attack's docstring."""
        return (self.attack.__doc__ or "").partition("\n")[0]


SCENARIOS = [
    Scenario("identify", large_identify),
    Scenario("slow-names", slow_names, patch="slow_names", request="CREATE"),
    Scenario("connections", connections),
    Scenario("unfinished-bodies", unfinished_bodies),
    Scenario("unfinished-requests", unfinished_requests),
    Scenario("unknown-ids", unknown_ids),
    Scenario("nops", nops),
    Scenario("seeks", seeks),
    Scenario("slow-disk", slow_disk, flags=("--mem-queue-size=0", "--cache-bytes=0"), patch="slow_disk"),
    # One POST may pause the broker for this time, once a second, which the 99th percentile includes.
    Scenario("tiny-messages", tiny_messages, goal_ms=50.0),
    Scenario("tiny-redelivered", tiny_redelivered),
]


# ------------------------------------------------------------------------------------------ the neighbour


def publish(address: str) -> Callable[[], None]:
    """Connect; return a function that publishes a message and waits for its OK."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=BEGIN_DEADLINE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(b"  V2")
    command = with_body(f"PUB {TOPIC}", BODY)

    def one() -> None:
        sock.sendall(command)
        # Heartbeats need no answer: this takes less than two intervals.
        while not (told := sock.recv(4096)).endswith(OK_FRAME):
            assert told.endswith(b"_heartbeat_"), told

    return one


def create(address: str) -> Callable[[], None]:
    """Return a function that creates a new channel and waits for the answer."""
    made = iter(range(10**9))

    def one() -> None:
        path = f"/channel/create?topic={TOPIC}&channel=c{os.getpid()}-{next(made)}#ephemeral"
        status, told = request(address, "POST", path.replace("#", "%23"))
        assert status == 200, told

    return one


def measure_requests(scenario: Scenario, broker: Attack, seconds: float) -> list[float]:
    """Make the neighbour's requests, one after the other; return the latency of each since it was due, in ms."""
    one = create(broker.http_address) if scenario.request == "CREATE" else publish(broker.tcp_address)
    one()
    took_ms = []
    began_s = due_s = time.perf_counter()
    while due_s < began_s + seconds and time.perf_counter() < began_s + 4 * seconds:
        time.sleep(max(0.0, due_s - time.perf_counter()))
        one()
        # Measured from the due time, so that requests delayed by a slow one count as slow too.
        took_ms.append((time.perf_counter() - due_s) * 1000)
        due_s += PACE_S[scenario.request]
    return took_ms


# ------------------------------------------------------------------------------------------ processes


def run_attack(scenario: Scenario, attack: Attack) -> None:
    """Attack until stdin ends; then print the number of requests."""

    async def until_told() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scenario.attack, attack)
            stream = trio.lowlevel.FdStream(os.dup(0))
            while await stream.receive_some(1024):
                pass
            nursery.cancel_scope.cancel()

    trio.run(until_told)
    print(attack.done)


def _command(role: str, scenario: Scenario, broker: Broker, options: argparse.Namespace) -> list[str]:
    words = [role, scenario.name, broker.tcp_address, broker.http_address, str(options.seconds)]
    return [sys.executable, __file__, "--as", *words]


def neighbour(scenario: Scenario, broker: Broker, options: argparse.Namespace) -> list[float]:
    """Measure the neighbour in a new process."""
    command = _command("neighbour", scenario, broker, options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=options.seconds + BEGIN_DEADLINE_S)
    if done.returncode:
        raise RuntimeError(f"the neighbour failed: {done.stderr[-2000:]}")
    took_ms: list[float] = json.loads(done.stdout)
    return took_ms


@contextmanager
def attacked(scenario: Scenario, broker: Broker, options: argparse.Namespace) -> Iterator[list[int]]:
    """Attack the broker during the block; at its end, the yielded list has the number of requests."""
    done: list[int] = []
    with tempfile.TemporaryFile("w+") as complaints:
        command = _command("attack", scenario, broker, options)
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, text=True
        )
        try:
            assert process.stdout is not None
            begun = process.stdout.readline()
            if begun:
                yield done
            ended_early = process.poll() is not None
            told = process.communicate(timeout=30)[0]
            if ended_early or process.returncode or not begun:
                complaints.seek(0)
                raise RuntimeError(f"the attack {scenario.name} failed: {complaints.read()[-2000:]}")
            done.append(int(told))
        finally:
            process.kill()
            process.wait()


@contextmanager
def patched(module: str) -> Iterator[None]:
    """Have Python processes that start during the block import a module of `bench` first."""
    with tempfile.TemporaryDirectory() as folder:
        text = f"import sys\nsys.path.append({str(ROOT)!r})\nimport bench.{module}\n"
        Path(folder, "sitecustomize.py").write_text(text)
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = folder if before is None else f"{folder}{os.pathsep}{before}"
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


# ------------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True)
class Result:
    """The figures of one broker in one round. Times in ms: 50th and 99th percentile, and the maximum."""

    round: int
    scenario: str
    broker: str
    flags: Sequence[str]
    alone: dict[str, float]
    attacked: dict[str, float]
    attack_done: int
    peak_mib: float
    """The largest resident memory of the broker's process (sampled before and after)."""


def figures(took_ms: Sequence[float]) -> dict[str, float]:
    """Return the figures of a row of the table."""
    return {
        "p50": statistics.median(took_ms),
        "p99": sorted(took_ms)[int(0.99 * len(took_ms))],
        "max": max(took_ms),
        "requests": len(took_ms),
    }


def measure(scenario: Scenario, contender: Contender, number: int, options: argparse.Namespace) -> Result:
    """Measure one broker, first without, then with the attack."""
    if not contender.is_nsqd:
        contender = contender.with_flags("--log-level=fatal", *scenario.flags)
    with ExitStack() as stack:
        with ExitStack() as meanwhile:
            if scenario.patch and not contender.is_nsqd:
                meanwhile.enter_context(patched(scenario.patch))
            broker = stack.enter_context(contender.running(options.data_path))
        broker.create(TOPIC)
        alone = figures(neighbour(scenario, broker, options))
        with attacked(scenario, broker, options) as done:
            under_attack = figures(neighbour(scenario, broker, options))
            peak_mib = memory_mib(broker)
        return Result(
            number, scenario.name, contender.name, contender.flags, alone, under_attack, done[0], peak_mib
        )


def table(results: Sequence[Result]) -> str:
    """Format the table; README.md explains it."""
    lines = [
        f"{'':<20}{'':<22}{'alone, ms':>24}{'attacked, ms':>26}",
        f"{'attack':<20}{'broker':<22}{'p50':>8}{'p99':>8}{'max':>8}"
        f"{'p50':>10}{'p99':>8}{'max':>8}{'goal':>7}{'':>9}{'MiB':>7}{'attacks':>10}",
    ]
    for scenario, broker in dict.fromkeys((result.scenario, result.broker) for result in results):
        own = [result for result in results if (result.scenario, result.broker) == (scenario, broker)]
        line = f"{scenario:<20}{broker:<22}"
        for phase, width in (("alone", 8), ("attacked", 10)):
            for figure in ("p50", "p99", "max"):
                value = statistics.median(getattr(result, phase)[figure] for result in own)
                line += f"{value:>{width}.1f}"
                width = 8
        p99 = statistics.median(result.attacked["p99"] for result in own)
        goal_ms = next(each.goal_ms for each in SCENARIOS if each.name == scenario)
        verdict = "reached" if p99 <= goal_ms else "MISSED"
        peak = max(result.peak_mib for result in own)
        done = statistics.median(result.attack_done for result in own)
        lines.append(f"{line}{goal_ms:>7.0f} {verdict:<8}{peak:>7.0f}{done:>10.0f}")
    return "\n".join([*lines, "medians over the rounds; MiB: the maximum of all rounds"])


# ------------------------------------------------------------------------------------------ the program


def parse() -> argparse.Namespace:
    """Parse the options."""
    names = [scenario.name for scenario in SCENARIOS]
    parser = record.parser(
        __doc__, rounds=3, only="only these attacks, separated by commas: " + ", ".join(names)
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="how long the neighbour is measured (default: %(default)s)"
    )
    parser.add_argument(
        "--brokers",
        default="I",
        help=f"brokers, separated by commas: {', '.join(CONTENDERS)} (default: %(default)s)",
    )
    parser.add_argument("--as", dest="role", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    wanted = [name for name in options.only.split(",") if name]
    if unknown := set(wanted) - set(names):
        parser.error(f"--only: there is no attack {', '.join(sorted(unknown))}; see --help")
    options.scenarios = [scenario for scenario in SCENARIOS if not wanted or scenario.name in wanted]
    options.contenders = [name for name in options.brokers.split(",") if name]
    if unknown := set(options.contenders) - CONTENDERS.keys():
        parser.error(f"--brokers: there is no {', '.join(sorted(unknown))}; see --help")
    return options


def act(role: str, name: str, tcp_address: str, http_address: str, seconds: str) -> None:
    """Run one of the two child processes."""
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == name)
    target = Attack(tcp_address, http_address)
    if role == "attack":
        run_attack(scenario, target)
    else:
        print(json.dumps(measure_requests(scenario, target, float(seconds))))


def main() -> None:
    """Measure, print, and write the requested results."""
    options = parse()
    if options.role:
        act(*options.role)
        return
    about = record.begin(options, beside_nsqd="nsqd" in options.contenders)
    results: list[Result] = []
    failed: list[str] = []
    for number in range(1, options.rounds + 1):
        for scenario in options.scenarios:
            for name in options.contenders:
                try:
                    result = measure(scenario, CONTENDERS[name], number, options)
                except record.FAILURES as reason:  # keep the earlier measurements
                    failed.append(f"{scenario.name} in round {number} ({name})")
                    print(f"{failed[-1]} failed: {reason}", file=sys.stderr)
                    continue
                results.append(result)
                print(
                    f"round {number}: {scenario.name}: {name}: p99 {result.alone['p99']:.1f} ms, "
                    f"attacked {result.attacked['p99']:.1f} ms, max {result.attacked['max']:.1f} ms",
                    flush=True,
                )
    print("", table(results), sep="\n")
    settings: dict[str, Any] = {"rounds": options.rounds, "seconds": options.seconds}
    record.finish(
        {"machine": about, "settings": settings, "results": [asdict(result) for result in results]},
        options,
        "neighbours",
    )
    if failed:
        sys.exit(f"failed and skipped: {', '.join(failed)}")


if __name__ == "__main__":
    main()
