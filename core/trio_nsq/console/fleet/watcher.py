"""Polls every broker and discovery service once for all viewers."""

import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import trio

from ...api import lookupd
from ...api.broker import bounds, unchecked_info, unchecked_stats
from ...api.lookupd import Node
from ...fleet.snapshot import BrokerState, LookupdState, Snapshot, combine, merged
from ...fleet.stats import TopicStats, add_rates, parse_topics
from ...lookup.hosts import host_filter
from ...protocol.address import without_secrets
from ..options import ConsoleOptions
from ..upstream.client import Answer, Upstream, UpstreamError
from ..upstream.discovery import MAX_LISTED

logger: logging.Logger = logging.getLogger("trio_nsq.console")

_T = TypeVar("_T")

_IDLE_INTERVAL_S = 10.0
"""Between polls without viewers: the charts need the numbers."""
_VIEWED_S = 30.0
"""A viewer counts for this long after a request for a page."""
_GRACE_S = 1.0
"""A round waits for this long. A server that has not answered then is not waited for until it answers again."""
_BUSY_PART = 10
"""A round begins after this many times the processor time of the one before, so that a huge fleet leaves time."""
_LARGE_ANSWER_BYTES = 256 * 1024
_MANY_QUEUES = 2_000
"""What is larger takes more than about 10 ms."""
_MAX_IDENTITIES = 10_000
_STATS = unchecked_stats(disk=True)
_REMEDIES = {
    "AUTH_REQUIRED": "give the console --auth-secret-file",
    "INVALID_TOKEN": "the console's token is unknown, expired or revoked",
    "TLS_REQUIRED": "give the console the https address of the broker",
}
"""What an operator can do about the code of an answer to the console's own requests."""


class Watcher:
    """Polls a fleet, and keeps the newest snapshot.

    Each server has its own request, so a server that hangs delays no other, and is not asked again meanwhile.

    Args:
        upstream: Makes the requests.
        options: The addresses and the interval.
        on_snapshot: Called with every snapshot; must be quick.
        remember_s: A broker that dies is no longer listed at once. It is shown for this long after its last answer, so
            that operators see which one it was.

    Attributes:
        snapshot: The newest; at first empty, with version 0.
        lookupds: The addresses of the discovery services; may be replaced.
    """

    def __init__(
        self,
        upstream: Upstream,
        options: ConsoleOptions,
        on_snapshot: Callable[[Snapshot], None] = lambda snapshot: None,
        *,
        remember_s: float = 300.0,
    ) -> None:
        self.snapshot: Snapshot = Snapshot()
        self.lookupds: tuple[str, ...] = options.lookupd_http_addresses
        self._upstream = upstream
        self._options = options
        self._allows_host = host_filter(options.lookupd_allowed_hosts)
        self._on_snapshot = on_snapshot
        self._remember_s = remember_s
        self._brokers: dict[str, BrokerState] = {
            address: BrokerState(address) for address in options.nsqd_http_addresses
        }
        self._lookupd_states: dict[str, LookupdState] = {}
        self._is_ours: dict[tuple[object, ...], bool] = {}
        self._running: dict[str, float] = {}  # servers with a request, and when it began
        self._viewers = 0
        self._viewed_at_s = trio.current_time()
        self._threads = trio.CapacityLimiter(1)  # they compute, and share one processor
        self._wake = trio.Event()
        self._new = trio.Event()
        self._rounds = 0
        self._in_round = False

    # ------------------------------------------------------------------ viewers

    def touch(self) -> None:
        """Note that there is a viewer: polls become frequent for some time."""
        was_idle = not self._is_viewed()
        self._viewed_at_s = trio.current_time()
        if was_idle:
            self._wake.set()

    @contextmanager
    def viewing(self) -> Iterator[None]:
        """Note that there is a viewer as long as the block runs."""
        self.touch()
        self._viewers += 1
        try:
            yield
        finally:
            self._viewers -= 1
            self._viewed_at_s = trio.current_time()

    async def changed(self, version: int) -> Snapshot:
        """Wait until the snapshot is newer than this version, and return it."""
        while self.snapshot.version <= version:
            await self._new.wait()
        return self.snapshot

    async def refresh(self) -> Snapshot:
        """Poll now, and return a snapshot of answers to requests that began after this call.

        A server that does not answer within a second is left as it was.
        """
        wanted = self._rounds + (2 if self._in_round else 1)
        while self._rounds < wanted:
            self._wake.set()
            await self._new.wait()
        return self.snapshot

    def _is_viewed(self) -> bool:
        return self._viewers > 0 or trio.current_time() < self._viewed_at_s + _VIEWED_S

    # ------------------------------------------------------------------- rounds

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Poll until cancelled; started after the first round."""
        async with trio.open_nursery() as nursery:
            while True:
                self._in_round = True
                busy_s = await self._round(nursery)
                self._in_round = False
                if self._rounds == 1:
                    task_status.started()
                await self._wait(max(self._options.poll_interval_ms / 1000, _BUSY_PART * busy_s))

    async def _wait(self, interval_s: float) -> None:
        began_s = trio.current_time()
        while not self._wake.is_set():
            deadline_s = began_s + (interval_s if self._is_viewed() else max(interval_s, _IDLE_INTERVAL_S))
            if trio.current_time() >= deadline_s:
                break
            with trio.move_on_at(deadline_s):
                await self._wake.wait()
        self._wake = trio.Event()

    async def _round(self, nursery: trio.Nursery) -> float:
        """Poll all servers, publish a snapshot, and return the processor time that it took."""
        busy_before_s = time.process_time()
        failed = {address for address, state in self._lookupd_states.items() if state.error}
        await self._ask(nursery, dict.fromkeys(self.lookupds, self._poll_lookupd), failed)
        self._add_listed()
        failed = {address for address, state in self._brokers.items() if state.error}
        await self._ask(nursery, dict.fromkeys(self._brokers, self._poll_broker), failed)
        brokers = merged(self._brokers.values())
        queues = sum(1 + len(each.channels) for broker in brokers.values() for each in broker.topics.values())
        topics = await self._compute(queues > _MANY_QUEUES, combine, brokers)
        lookupds = {
            address: self._lookupd_states[address]
            for address in map(without_secrets, self.lookupds)
            if address in self._lookupd_states
        }
        self.snapshot = Snapshot(self.snapshot.version + 1, time.time(), brokers, lookupds, topics)
        self._rounds += 1
        self._on_snapshot(self.snapshot)
        self._new.set()
        self._new = trio.Event()
        return time.process_time() - busy_before_s

    async def _ask(
        self, nursery: trio.Nursery, polls: Mapping[str, Callable[[str], Awaitable[None]]], failed: set[str]
    ) -> None:
        """Start the requests that do not run yet, and wait for a moment until those to servers that work have ended."""
        done = trio.Event()
        waiting = set[str]()

        async def one(address: str) -> None:
            try:
                await polls[address](address)
            finally:
                del self._running[address]
                waiting.discard(address)
                if not waiting:
                    done.set()

        for address in polls:
            if address not in self._running:
                self._running[address] = trio.current_time()
                if without_secrets(address) not in failed:
                    waiting.add(address)
                nursery.start_soon(one, address)
        if waiting:
            with trio.move_on_after(_GRACE_S):
                await done.wait()

    def _add_listed(self) -> None:
        """Add the brokers that discovery services list; remove those that are gone for some time."""
        registrations: dict[str, dict[str, Node]] = {}
        for service in self._lookupd_states.values():
            for node in service.nodes:
                if node.http_address and node.has_usable_host and self._allows_host(node.broadcast_address):
                    registrations.setdefault(node.http_address, {})[service.address] = node
        for address in registrations:
            if address not in self._brokers and len(self._brokers) < MAX_LISTED:
                self._brokers[address] = BrokerState(address, configured=False)
        for address, state in list(self._brokers.items()):
            is_listed = state.configured or address in registrations
            if not is_listed and time.time() - state.answered_at_s > self._remember_s:
                if address not in self._running:
                    del self._brokers[address]
            else:
                self._brokers[address] = replace(state, registrations=registrations.get(address, {}))

    # -------------------------------------------------------------------- polls

    async def _poll_lookupd(self, address: str) -> None:
        name = without_secrets(address)
        try:
            nodes = (await self._upstream.ask(address, lookupd.nodes()))[:MAX_LISTED]
            version = await self._upstream.ask(address, lookupd.version())
            state = LookupdState(name, version=version[:100], nodes=nodes)
        except UpstreamError as exc:
            state = LookupdState(name, error=exc.reason)
        before = self._lookupd_states.get(name)
        _log_change("discovery service", name, before.error if before is not None else "", state.error)
        self._lookupd_states[name] = state

    async def _poll_broker(self, address: str) -> None:
        began_s = trio.current_time()
        try:
            info = await self._upstream.ask(address, unchecked_info())
            answer = await self._upstream.fetch(address, _STATS)
            stats, topics = await self._compute(len(answer.body) > _LARGE_ANSWER_BYTES, _parsed, answer)
            is_ours = await self._find_kind(address, info)
        except (UpstreamError, ValueError) as exc:
            reason = exc.reason if isinstance(exc, UpstreamError) else str(exc)
            if remedy := _REMEDIES.get(reason):
                reason = f"{reason}: {remedy}"
            if (state := self._brokers.get(address)) is not None:
                _log_change("broker", state.address, state.error, reason)
                self._brokers[address] = replace(state, error=reason)
            return
        if (before := self._brokers.get(address)) is None:
            return
        _log_change("broker", before.address, before.error, "")
        now_s = time.time()
        if before.reachable and before.info.get("start_time") == info.get("start_time"):
            add_rates(topics, before.topics, now_s - before.answered_at_s)
        self._brokers[address] = replace(
            before,
            error="",
            answered_at_s=now_s,
            latency_s=trio.current_time() - began_s,
            info=info,
            is_nsqd=not is_ours,
            stats={key: value for key, value in stats.items() if key != "topics"},
            topics=topics,
        )

    async def _compute(self, is_long: bool, work: Callable[..., _T], *args: object) -> _T:
        """Compute something; in a thread if it takes long, so that pages are served meanwhile."""
        if not is_long:
            return work(*args)
        return await trio.to_thread.run_sync(work, *args, limiter=self._threads)

    async def _find_kind(self, address: str, info: Mapping[str, object]) -> bool:
        """Return whether a broker is of this project: nsqd does not know the request."""
        key = (address, str(info.get("version")), str(info.get("start_time")))
        if key not in self._is_ours:
            if len(self._is_ours) >= _MAX_IDENTITIES:
                self._is_ours.clear()
            try:
                await self._upstream.ask(address, bounds())
                self._is_ours[key] = True
            except UpstreamError as exc:
                if not exc.status:
                    raise
                self._is_ours[key] = exc.status != 404
        return self._is_ours[key]


def _log_change(kind: str, address: str, before: str, now: str) -> None:
    """Log that a server no longer answers, or answers again; `before` and `now` are reasons, empty if it answers."""
    if now and not before:
        logger.warning("the %s at %s does not answer: %s", kind, address, now)
    elif before and not now:
        logger.info("the %s at %s answers again", kind, address)


def _parsed(answer: Answer) -> tuple[dict[str, Any], dict[str, TopicStats]]:
    """Decode an answer to `/stats`: the object, and its topics. Raises UpstreamError, ValueError."""
    stats = answer.decode(answer.body)
    return stats, parse_topics(stats)
