"""Support for connection tests: a broker behind a proxy, positions of faults, and leak checks."""

import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle, product
from pathlib import Path
from struct import unpack_from
from typing import Any

import trio

from broker.auth_server import answer as auth_answer
from broker.auth_server import authorization, running_auth_server
from broker.certificates import Certificates
from broker.support import running_broker
from faults.proxy import Fault, Kind, Passage, Proxy, Towards, proxy_before
from faults.scenario import stats
from interop.peers import nsqd
from trio_nsq.client import Consumer

SEED = int(os.environ.get("FAULT_SEED", "7"))
COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"

HEARTBEAT_S = 1.0
SILENCE_S = 2 * HEARTBEAT_S
"""Silence after which both client and broker close the connection."""
HANDSHAKE_S = 10.0
FIRST_ANSWER_S = 35.0
"""How long a producer waits for the first answer: a member of a cluster without a leader lets clients wait."""
"""Maximum wait of the client for each answer."""
JUMP_S = HEARTBEAT_S
"""Maximum jump of the mock clock, which happens if a busy machine takes a millisecond to pass data on: a heartbeat."""
RECONNECT_MAX_S = 1.0
CLOSE_TIMEOUT_S = 5.0
FEW = 50 if COMPLETE else 7
"""Positions in one direction of an encrypted or compressed conversation; in the short form, one per kind of fault."""
AT_A_TIME = 25
"""Faults on one stage, which has a time limit by the real clock."""

TOPIC, CHANNEL = "topic", "channel"
MESSAGES = 3
QUIET_S = 2.5 * HEARTBEAT_S
"""Duration of a conversation after the last command; it includes two heartbeats."""
PATIENCE_S = 120.0
"""By the mock clock. A message of a stalled connection is redelivered long before."""
STEPS = 20_000
"""Limit on task steps for one fault: ten times the usual number."""

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "snappy": {"snappy": True},
    "deflate": {"deflate": True},
    "tls": {"tls_v1": True},
    "tls-snappy": {"tls_v1": True, "snappy": True},
    "auth": {"auth_secret": "hush"},
}
"""The forms of a connection, as options of the client."""


@dataclass
class Stage:
    """A broker, a proxy in front of it, and the clients' connection options.

    Attributes:
        tcp_address, http_address: The broker's own.
        slack_s: Additional time for time limits; 0 with a mock clock.
    """

    proxy: Proxy
    tcp_address: str
    http_address: str
    options: dict[str, Any] = field(default_factory=dict)
    slack_s: float = 0.0


@asynccontextmanager
async def stage(folder: Path, form: str, heartbeat_s: float = HEARTBEAT_S) -> AsyncIterator[Stage]:
    """A stage for connections of this form."""
    folder.mkdir(exist_ok=True)
    options: dict[str, Any] = {"heartbeat_interval_s": heartbeat_s, **FORMS[form]}
    settings: dict[str, Any] = {"sync": "interval"}
    if options.get("tls_v1"):
        certificates = Certificates(folder / "certificates")
        settings |= certificates.options
        options["tls_context"] = certificates.client_context()  # made once, because it takes time
    everything = auth_answer(authorization(".*", ".*", "publish", "subscribe", "read", "admin"))
    async with running_auth_server(everything) as auth:
        if options.get("auth_secret"):
            settings["auth_http_addresses"] = (auth.address,)
        async with (
            running_broker(folder / "broker", **settings) as bound,
            proxy_before(str(bound.tcp_address)) as proxy,
        ):
            yield Stage(proxy, str(bound.tcp_address), str(bound.http_address), options)


@asynccontextmanager
async def stage_of_nsqd(folder: Path) -> AsyncIterator[Stage]:
    """Run a stage with nsqd, for plain connections and the real clock."""
    options = {"heartbeat_interval_s": HEARTBEAT_S, "msg_timeout_s": 1}
    with nsqd(folder) as broker:
        async with proxy_before(broker.tcp_address) as proxy:
            yield Stage(proxy, broker.tcp_address, broker.http_address, options, slack_s=2.0)


# ------------------------------------------------------------------------------------------ positions of faults


def frame_points(data: bytearray) -> Iterator[int]:
    """Return positions at and in a broker's frames: begin, size, type, data, end; 0 is before the first."""
    start = 0
    while start + 8 <= len(data):
        end = start + 4 + unpack_from(">i", data, start)[0]
        yield from (start, start + 2, start + 4, start + 8, (start + 8 + end) // 2, end - 1, end)
        start = end


def command_points(data: bytearray) -> Iterator[int]:
    """Return positions at and in a client's commands: the magic, IDENTIFY, PUBs, MPUBs and lines."""
    yield from (0, 2, 4)
    start = 4
    while start < len(data):
        end = data.index(b"\n", start) + 1
        yield from (start, (start + end) // 2, end)
        if data.startswith((b"IDENTIFY", b"AUTH", b"PUB", b"MPUB", b"DPUB"), start):
            body, end = end, end + 4 + unpack_from(">i", data, end)[0]
            yield from (body + 2, body + 4, (body + 4 + end) // 2, end - 1, end)
        start = end


def faults(
    passage: Passage,
    kinds: Sequence[Kind],
    *,
    in_the_clear: bool = False,
    start: dict[Towards, int] | None = None,
) -> list[Fault]:
    """Return faults for a conversation like this one: one at every step. The long form has all kinds at every
    step, and one fault at every byte.

    The steps of an encrypted or compressed conversation are unknown, so evenly spread positions are used.

    Args:
        passage: The data of the conversation.
        kinds: The kinds of faults.
        in_the_clear: Whether the steps are known.
        start: The faults count from here; None: from the beginning.
    """
    found: list[Fault] = []
    chance = random.Random(SEED)
    for towards, said in passage.passed.items():
        first = start[towards] if start else 0
        size = len(said) - first
        if in_the_clear:
            steps = frame_points(said) if towards is Towards.CLIENT else command_points(said)
            places = sorted({step - first for step in steps if first <= step < len(said)})
        else:
            places = [size * number // FEW for number in range(FEW)]
        some = cycle(chance.sample(kinds, len(kinds)))
        if COMPLETE:
            found += [Fault(kind, towards, place) for place, kind in product(places, kinds)]
            found += [Fault(next(some), towards, place) for place in range(size)] if in_the_clear else []
        else:
            found += [Fault(next(some), towards, place) for place in places]
    return found


def longest_absence_s(fault: Fault) -> float:
    """Maximum time from a fault until a consumer is connected again."""
    detected_s = {
        Kind.HANG_UP: 0.0,
        Kind.RESET: 0.0,
        Kind.END: 0.0,
    }.get(fault.kind, HANDSHAKE_S + SILENCE_S + HEARTBEAT_S)
    return detected_s + RECONNECT_MAX_S + JUMP_S


# ------------------------------------------------------------------------------------------ leaks


class Steps(trio.abc.Instrument):
    """Counts task steps. Too many are a busy loop, which a mock clock would never end.

    Args:
        scope: Is cancelled after too many steps.
    """

    def __init__(self, scope: trio.CancelScope) -> None:
        self.count = 0
        self.limit = 0
        self._scope = scope

    def allow(self, count: int) -> None:
        """Set the number of steps from now on."""
        self.limit = self.count + count

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """See `trio.abc.Instrument`."""
        self.count += 1
        if self.limit and self.count > self.limit:
            self._scope.cancel()


@dataclass(frozen=True, slots=True)
class Footprint:
    """The open resources and running tasks of this process."""

    fds: int
    tasks: int

    @staticmethod
    def now() -> "Footprint":
        """Return the current footprint, without the tasks that host sync threads, which stay."""
        return Footprint(len(os.listdir("/proc/self/fd")), _tasks_below(trio.lowlevel.current_root_task()))

    async def returns(self, within_s: float) -> None:
        """Wait until the process has no more than these; fail after a timeout."""
        with trio.move_on_after(within_s):
            while (now := Footprint.now()).fds > self.fds or now.tasks > self.tasks:
                await trio.sleep(HEARTBEAT_S / 4)
            return
        raise AssertionError(f"something leaks: {self} became {now}")


def _tasks_below(task: trio.lowlevel.Task | None) -> int:
    if task is None or "LocalSync" in task.name:
        return 0
    children = [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return 1 + sum(map(_tasks_below, children))


@asynccontextmanager
async def watched(nursery: trio.Nursery) -> AsyncIterator[Steps]:
    """Check that no task runs in a busy loop."""
    steps = Steps(nursery.cancel_scope)
    trio.lowlevel.add_instrument(steps)
    try:
        yield steps
    finally:
        trio.lowlevel.remove_instrument(steps)
        assert not steps.limit or steps.count <= steps.limit, "tasks run in circles"


@asynccontextmanager
async def patience(what: str, seconds: float = PATIENCE_S) -> AsyncIterator[None]:
    """Fail if the block takes longer, and report where."""
    with trio.move_on_after(seconds) as scope:
        yield
    assert not scope.cancelled_caught, what


# ------------------------------------------------------------------------------------------ consumers


class Receiver:
    """A consumer behind the proxy, which finishes all messages.

    Attributes:
        came: How often each message arrived.
        strict: Whether unknown messages are an error.
    """

    def __init__(self, stage: Stage, **options: Any) -> None:
        self.came: Counter[bytes] = Counter()
        self.strict = True
        self._proxy = stage.proxy
        self._options = {
            "nsqd_tcp_addresses": [stage.proxy.address],
            "max_in_flight": 2,
            "reconnect_max_s": RECONNECT_MAX_S,
            "close_timeout_s": 0,
            **stage.options,
            **options,
        }
        self._published_before: dict[bytes, int] = {}
        self._news = trio.Event()

    def expect(self, bodies: list[bytes]) -> None:
        """Expect these messages from now on."""
        self._published_before.update(dict.fromkeys(bodies, len(self._proxy.passages)))

    async def run(self, *, task_status: trio.TaskStatus[Consumer]) -> None:
        """Receive until cancelled."""
        async with Consumer(TOPIC, CHANNEL, **self._options) as consumer:
            task_status.started(consumer)
            async for message in consumer:
                self._note(message.body)
                message.finish()

    def _note(self, body: bytes) -> None:
        self.came[body] += 1
        if self.strict or body in self._published_before:
            connections = len(self._proxy.passages) - self._published_before[body]
            assert self.came[body] <= 1 + connections, f"{body!r} comes again and again"
        self._news.set()
        self._news = trio.Event()

    async def has(self, bodies: list[bytes]) -> None:
        """Wait until all expected messages have arrived."""
        while not all(body in self.came for body in bodies):
            await self._news.wait()


def bodies_of(number: int) -> list[bytes]:
    """Return messages for one fault, all of the same size, so that the positions of faults do not change."""
    return [b"message %d of %06d" % (n, number) for n in range(MESSAGES)]


async def drained(address: str) -> None:
    """Wait until the broker reports that all messages are finished."""
    async with patience("messages stay in the channel"):
        while True:
            channel = (await stats(address))[TOPIC]["channels"][CHANNEL]
            if channel["depth"] == channel["in_flight_count"] == channel["deferred_count"] == 0:
                return
            await trio.sleep(HEARTBEAT_S)
