"""The brokers of a producer: the given ones and those that discovery finds. Chooses the broker of each command."""

import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence

from trio_nsq.protocol import NSQError

from ...event_loop import runtime
from ...lookup.query import lookup_nodes
from ..discovery.discovery import Discovery
from ..errors import AuthRefused, BrokerError, ConnectionFailed, ProducerClosed, ProducerFenced, none_reached
from .broker_link import BrokerLink
from .broker_rotation import BrokerRotation
from .options import ProducerSettings
from .queue import RETRIABLE_CODES, Command, PublishCounts, PublishFuture, accepts_no_publishes
from .receipt import ProducerStats

_logger = logging.getLogger("trio_nsq.client")


class BrokerPool:
    """Keeps a link to each broker, and sends commands over them in turn.

    Args:
        addresses: The given brokers, `host:port` each.
        lookupds: The HTTP addresses of discovery services.
        random: Returns numbers in [0, 1), for the jitter.

    Raises:
        ValueError: The reconnect delays are invalid.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        lookupds: Sequence[str],
        settings: ProducerSettings,
        random: Callable[[], float],
    ) -> None:
        self._addresses = addresses
        self._settings = settings
        self._rotation = BrokerRotation(settings.reconnect_min_s, settings.reconnect_max_s, random)
        self._discovery = Discovery(lookupds, settings, random, lookup_nodes, self._discovered)
        self._nursery: runtime.Nursery | None = None
        self.fenced_topics: dict[str, ProducerFenced] = {}
        self._links: dict[str, BrokerLink] = {}
        self._retiring: set[BrokerLink] = set()
        self._counts = PublishCounts()
        self._tombstones: dict[str, set[str]] = {}  # by topic: the brokers where it is being deleted
        self._opened = False
        self._failing = False  # the last attempts to connect failed, which is logged once for a single broker
        self._trying = 0  # brokers and services whose first attempt is not decided
        self._failures: list[ConnectionFailed] = []  # first failures
        self._settled = runtime.Event()  # one broker is connected, or all have been tried
        self._now: Callable[[], float] = lambda: -math.inf  # until `run`
        self.crash: Exception | None = None  # a defect that ended `run`
        self._deadline = -math.inf  # until then, what fails is tried again before it counts as tried

    # ------------------------------------------------------------------ brokers

    async def run(self) -> None:
        """Connect to the brokers and keep looking for others; runs until cancelled."""
        async with runtime.open_nursery() as nursery:
            self._nursery = nursery
            self._now = runtime.clock()
            self._deadline = runtime.current_time() + self._settings.connect_timeout_s
            self._trying += 1
            for address in self._addresses:
                self._add(address)
            if not self._settings.wait_connected:
                self._opened = True
                self._settled.set()
            nursery.start_soon(self._ask_first)
            await self._settled.wait()
            if self._opened:
                await self._discovery.keep_asking()

    def crashed(self, error: Exception) -> None:
        """Fail all publishes, and what waits for the first connection: a defect ended `run`."""
        self.crash = error
        self._settled.set()
        self.fail_all(ProducerClosed(f"the producer failed: {error!r}"))

    async def _ask_first(self) -> None:
        await self._discovery.ask_until(self._deadline, lambda: bool(self._links))
        self._tried()

    async def wait_opened(self) -> None:
        """Wait until a broker is connected. Raises ConnectionFailed if all have been tried."""
        await self._settled.wait()
        if self.crash is not None:
            raise self.crash
        if self._opened:
            self._failures.clear()
            return
        failures = [*self._failures, *self._discovery.failures_to_connect()]
        if self._discovery.has_answer and not self._links:
            failures.append(ConnectionFailed("any broker", self._why_no_broker()))
        raise none_reached(failures)

    def _why_no_broker(self) -> str:
        where = f"nsqlookupd {', '.join(self._discovery.services)}"
        if self._discovery.found:
            return f"all brokers that are registered at {where} drain"
        if self._settings.lookupd_allowed_hosts:
            return f"no broker on a host of lookupd_allowed_hosts is registered at {where}"
        return f"no broker is registered at {where}; start one with --lookupd-tcp-address"

    def _add(self, address: str) -> None:
        assert self._nursery is not None
        if self._settings.name is not None:
            for link in self._retiring:
                # A second link would be another run of the producer.
                if link.address == address and not link.has_ended:
                    self._links[address] = link
                    self._rotation.add(address)
                    self._retiring.discard(link)
                    link.keep()
                    return
        link = self._links[address] = BrokerLink(address, self._settings, self)
        link.queue.counts = self._counts
        self._rotation.add(address)
        self._trying += 1
        link.wake()
        self._nursery.start_soon(self._run, link)

    async def _run(self, link: BrokerLink) -> None:
        await link.run()
        self._retiring.discard(link)

    def _discovered(self) -> None:
        """Add new brokers, and retire those that no service returns any more or that drain.

        If none is left, keep the old ones: a discovery service that was restarted knows no broker for a moment.
        """
        found = self._discovery.found
        draining = {address for address, nodes in found.items() if any(node.draining for node in nodes)}
        wanted = dict.fromkeys([*self._addresses, *(each for each in found if each not in draining)])
        for address in wanted:
            if address not in self._links:
                _logger.debug("found %s", address)
                self._add(address)
        for address in self._links.keys() - wanted.keys() if wanted else ():
            _logger.info("%s %s", address, "drains" if address in draining else "is not registered any more")
            self._retire(address)
        self._tombstones = {}
        for address, nodes in found.items():
            for topic in frozenset[str]().union(*(node.tombstones for node in nodes)):
                self._tombstones.setdefault(topic, set()).add(address)

    def _retire(self, address: str) -> None:
        self._rotation.remove(address)
        link = self._links.pop(address)
        self._retiring.add(link)
        self._move_waiting(link)
        link.retire()

    def _tried(self) -> None:
        self._trying -= 1
        if not self._trying:
            self._settled.set()

    # ------------------------------------------------------------------ commands

    def next_link(self, topic: str, without: Collection[str] = ()) -> BrokerLink | None:
        """Return the link for the next publish to a topic; None if there is no broker that is not in `without`."""
        now = self._now()  # called per message
        if due := self._rotation.due(now):
            self._try_again(due, now)
        if self._tombstones and (avoided := self._tombstones.get(topic)):
            address = self._rotation.choose(avoided.union(without)) or self._rotation.choose(without)
        else:
            address = self._rotation.choose(without)
        return None if address is None else self._links[address]

    def _try_again(self, due: Sequence[str], now: float) -> None:
        for address in due:
            if (link := self._links[address]).is_connected:
                self._rotation.record_usable(address, now)
            else:
                link.wake()

    def send(self, command: Command) -> bool:
        """Queue a command at the next broker where it has not failed yet; return False if there is none."""
        group = command.group
        link = None
        if group is not None and group.address is not None and group.address not in command.failures:
            link = self._links.get(group.address)
        if link is None:
            link = self.next_link(command.topic, command.failures)
            if link is None:
                return False
            if group is not None:
                group.address = link.address
        link.queue.add(command)
        link.wake()
        return True

    def futures(self) -> Iterator[PublishFuture]:
        for link in (*self._links.values(), *self._retiring):
            yield from link.queue.futures()

    def stats(self) -> ProducerStats:
        links = (*self._links.values(), *self._retiring)
        unsettled = [link.queue.unsettled() for link in links]
        return ProducerStats(
            waiting=sum(waiting for waiting, _ in unsettled),
            sent=sum(sent for _, sent in unsettled),
            stored=self._counts.stored,
            failed=self._counts.failed,
            connections=sum(link.is_connected for link in links),
        )

    def fail_all(self, reason: NSQError) -> None:
        for link in (*self._links.values(), *self._retiring):
            for command in link.queue.clear():
                command.fail(reason, maybe_stored=command.taken)

    def only_link(self) -> BrokerLink | None:
        """Return the link of the only broker; None if there are several, or none."""
        return next(iter(self._links.values())) if len(self._links) == 1 else None

    def _move_waiting(self, link: BrokerLink) -> None:
        """Send the commands that wait for this broker to others, if any is available."""
        if self._rotation.has_available and not self._settings.ordered:
            for command in link.queue.take_waiting():
                if command.group is not None and command.group.address == link.address:
                    command.group.address = None
                if not self.send(command):
                    link.queue.add(command)

    # ------------------------------------------------------------------ what links tell

    def connected(self, link: BrokerLink) -> None:
        if self._is_current(link):
            self._rotation.record_usable(link.address, runtime.current_time())
        self._opened = True
        self._failing = False
        self._settled.set()

    def lost(self, link: BrokerLink, reason: NSQError) -> float:
        now = runtime.current_time()
        until = self._rotation.record_failure(link.address, now) if self._is_current(link) else math.inf
        if not self._opened:
            assert isinstance(reason, ConnectionFailed)  # no connection was open, so none was lost
            if now < self._deadline and not isinstance(reason, AuthRefused):
                assert self._nursery is not None
                self._nursery.start_soon(self._wake_at, min(until, self._deadline), link)
                return until - now
            self._failures.append(reason)
            self._tried()
        if self._is_current(link):
            is_known, self._failing = self._failing, isinstance(reason, ConnectionFailed)
            is_news = len(self._links) > 1 or not (self._failing and is_known)
            self._excluded(f"{reason}; reconnecting", until - now, is_news=is_news)
        return until - now

    async def _wake_at(self, due: float, link: BrokerLink) -> None:
        await runtime.sleep_until(due)
        link.wake()

    def refuses(self, link: BrokerLink, reason: BrokerError) -> None:
        now = runtime.current_time()
        if self._is_current(link) and (until := self._rotation.record_refusal(link.address, now)) is not None:
            self._excluded(f"{reason}; trying it again", until - now)
        self._move_waiting(link)

    def _excluded(self, what: str, excluded_s: float, *, is_news: bool = True) -> None:
        if self._opened and is_news:
            waits = len(self._links) > 1 or self._settings.name is not None
            when = f"after {excluded_s:.1f} s" if waits else "at the next publish"
            _logger.warning("%s %s", what, when)
        if not self._rotation.has_available:
            self._discovery.ask_again()

    def silent(self, link: BrokerLink) -> None:
        if self._is_current(link) and self._rotation.record_silence(link.address):
            if self._rotation.has_available:
                _logger.warning("%s does not answer; others are used until it does", link.address)
            else:
                self._discovery.ask_again()
        now = runtime.current_time()
        self._try_again(self._rotation.due(now), now)
        self._move_waiting(link)

    def move_unsent(self, link: BrokerLink) -> None:
        self._move_waiting(link)

    def fenced(self, reason: ProducerFenced) -> None:
        _logger.error("%s", reason)
        self.fenced_topics[reason.topic] = reason
        for link in (*self._links.values(), *self._retiring):
            link.fail_topic(reason.topic, reason)

    def answers(self, link: BrokerLink) -> None:
        if self._is_current(link):
            self._rotation.record_answer(link.address)

    def failed(self, link: BrokerLink, command: Command, reason: NSQError) -> None:
        """Send an unacknowledged command to another broker if that is allowed; otherwise fail it."""
        command.failures[link.address] = reason
        if not command.taken or (isinstance(reason, BrokerError) and accepts_no_publishes(reason)):
            may_go_on = not self._settings.ordered
        else:
            may_go_on = self._settings.retry and not (
                isinstance(reason, BrokerError) and reason.code not in RETRIABLE_CODES
            )
        if not (may_go_on and self.send(command)):
            command.fail(reason)

    def _is_current(self, link: BrokerLink) -> bool:
        return self._links.get(link.address) is link
