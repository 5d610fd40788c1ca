"""Follow topics and brokers, and run a task for each source."""

import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import trio

from ...client.consuming.consumer import Consumer
from ...client.consuming.options import ConsumerSettings
from ...client.discovery.discovery import Discovery
from ...client.errors import (
    AuthRefused,
    BrokerUnreachable,
    ConnectionFailed,
    ConnectionLost,
    RequestRefused,
    none_reached,
)
from ...client.reading.broker_log import BrokerLog
from ...client.reading.topic_reader import TopicReader
from ...event_loop.retries import Delays
from ...log.raw import RawStreamError
from ...lookup.query import lookup_nodes
from ...protocol.errors import leaves_of
from ...protocol.names import is_ephemeral
from .batch import Position, Source
from .broker_http import BrokerFinder, FoundBroker
from .channel_source import ChannelSource
from .log_source import FoundLog, LogChanged, LogIdentified, LogRequests, open_log_source
from .open_logs import LogTaken, OpenLogs
from .options import BrokerAddresses, SourceOptions
from .topic_choice import TopicChoice, topics_of

logger: logging.Logger = logging.getLogger("trio_nsq.connectors")

_FIRST_PAUSE_S = 1.0
_ALL = BrokerAddresses("", ())
"""For a channel that is consumed from all brokers."""

Start = Callable[[FoundLog], Awaitable[Position | None]]
Handle = Callable[[Source], Awaitable[None]]
Gone = Callable[[Source], None]


async def run_sources(
    options: SourceOptions, start: Start, handle: Handle, gone: Gone = lambda source: None
) -> None:
    """Read the topics from all brokers, also those that appear later; runs until cancelled.

    There is a source for each topic and broker: the log, or the channel if the log cannot be read. With
    `at_least_once`, there is one source for each topic: its channel on all brokers. After an error, a source is opened
    and `handle` is called again. If `handle` returns, its source is closed for good; when all are closed and none can
    appear, this returns.

    Args:
        start: Returns up to where the messages of a log are stored; None: begin at the channel's position. Called each
            time before a log is opened. A log that is found at several addresses is read at one of them.
        handle: Receives batches from a source. It lets the errors of `receive` pass.
        gone: Called with a source whose topic was deleted. It may be created again, and is then a new source.

    Raises:
        ConnectionFailed: No broker and no discovery service can be reached at the start.
        AuthRefused, RequestRefused: A broker refuses the secret.
        re2.error: The pattern is invalid.
        CopyDiffers: A log is at two addresses, one is a copy, and both have got messages since.
        ValueError: There are neither brokers nor discovery services.
    """
    if not options.brokers and not options.lookupd_http_addresses:
        raise ValueError("there are neither brokers nor discovery services")
    await _Sources(options, start, handle, gone).run()


class _Sources:
    def __init__(self, options: SourceOptions, start: Start, handle: Handle, gone: Gone) -> None:
        self._options = options
        self._start = start
        self._handle = handle
        self._gone = gone
        self._settings = replace(
            ConsumerSettings(**options.consumer), lookupd_poll_interval_s=options.topic_refresh_s
        )
        self._finder = BrokerFinder(options, options.brokers, self._settings)
        self._choice = TopicChoice(options.topics, options.topic_pattern, options.left_out)
        self._discovery = Discovery(
            options.lookupd_http_addresses, self._settings, random.random, lookup_nodes, self._open_new
        )
        self._topics_of: dict[BrokerAddresses, list[str]] = {}  # of the brokers that the user names
        self._sources: set[tuple[str, str]] = set()  # topic and TCP address of those that run
        self._nursery: trio.Nursery
        self._failures: list[ConnectionFailed] = []  # of the brokers that the user names, at the start
        self._reached = trio.Event()
        self._logs = OpenLogs()

    async def run(self) -> None:
        decided = trio.Event()
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._try_all, decided)
            await decided.wait()
            reached = self._reached.is_set()
            if reached:
                self._follow(self._nursery)
        if not reached:
            raise none_reached([*self._failures, *self._discovery.failures_to_connect()])

    async def _try_all(self, decided: trio.Event) -> None:
        """Query all brokers and services. Sources of those that answer are opened without waiting for the others."""

        async def decide() -> None:
            await self._reached.wait()
            decided.set()

        async with trio.open_nursery() as watching:
            if self._options.looks_again:
                watching.start_soon(decide)
            async with trio.open_nursery() as trying:
                trying.start_soon(self._discovery.ask)
                for broker in self._options.brokers:
                    trying.start_soon(self._try_first, broker)
            watching.cancel_scope.cancel()
        decided.set()

    async def _try_first(self, broker: BrokerAddresses) -> None:
        try:
            await self._refresh(broker)
        except ConnectionFailed as failure:
            self._failures.append(failure)
        else:
            self._open_new()

    def _follow(self, nursery: trio.Nursery) -> None:
        """Look for new topics and brokers."""
        if not self._options.looks_again:
            self._find_missing(nursery)
            return
        nursery.start_soon(self._discovery.keep_asking)
        if self._options.lookupd_http_addresses:
            nursery.start_soon(self._ask_while_missing)
        if self._options.topic_pattern is not None:
            for broker in self._options.brokers:
                nursery.start_soon(self._keep_refreshing, broker)

    # ------------------------------------------------------------------ topics and brokers

    def _wanted(self) -> dict[tuple[str, str], BrokerAddresses]:
        """Return the broker of each source, by topic and TCP address."""
        options = self._options
        listed: dict[tuple[str, str], BrokerAddresses] = {}
        for address, nodes in self._discovery.found.items():
            for topic in topics_of(nodes):
                if topic in self._choice:
                    http = tuple(each for each in (node.http_address for node in nodes) if each)
                    listed[topic, address] = BrokerAddresses(address, http[:1])
        given: dict[tuple[str, str], BrokerAddresses] = {}
        for broker in options.brokers:
            for topic in (
                *options.topics,
                *filter(self._choice.__contains__, self._topics_of.get(broker, ())),
            ):
                given[topic, broker.tcp or broker.http[0]] = broker
        if options.at_least_once:
            topics = dict.fromkeys([*options.topics, *(topic for topic, _ in (*given, *listed))])
            return {(topic, ""): _ALL for topic in topics}
        return listed | given

    def _open_new(self) -> None:
        """Start a task for each source that does not run yet."""
        self._reached.set()
        for key, broker in self._wanted().items():
            if key not in self._sources:
                self._sources.add(key)
                self._nursery.start_soon(self._keep_open, key, broker)

    async def _keep_refreshing(self, broker: BrokerAddresses) -> None:
        """Look for new topics of a broker that the user names."""
        while True:
            await trio.sleep(self._options.topic_refresh_s)
            try:
                await self._refresh(broker)
            except ConnectionFailed:
                continue  # its sources report it
            self._open_new()

    def _find_missing(self, nursery: trio.Nursery) -> None:
        """Wait for the topics of brokers that did not answer; name discovery services that did not."""
        for failure in self._discovery.failures_to_connect():
            logger.warning("%s; brokers and topics that only this service knows are left out", failure)
        if self._options.topic_pattern is not None:
            for broker in self._options.brokers:
                if broker not in self._topics_of:
                    nursery.start_soon(self._refresh_patiently, broker)

    async def _refresh_patiently(self, broker: BrokerAddresses) -> None:
        warned = False
        while True:
            try:
                await self._refresh(broker)
                break
            except ConnectionFailed as failure:
                if not warned:
                    logger.warning("%s; waiting for its topics", failure)
                warned = True
            await trio.sleep(_FIRST_PAUSE_S)
        self._open_new()

    async def _refresh(self, broker: BrokerAddresses) -> None:
        """Check that a broker can be reached; with a pattern, look for its topics. Raises ConnectionFailed."""
        found = await self._finder.find(broker)
        if self._options.topic_pattern is None:
            return
        if not found.http:
            logger.warning(
                "the topics of the broker at %s are unknown, as its HTTP API was not found: %s",
                *(found.tcp, found.why_no_http),
            )
            return
        try:
            self._topics_of[broker] = await self._finder.topics(found.http)
        except BrokerUnreachable as exc:
            raise ConnectionFailed(exc.address, exc.reason) from exc

    async def _ask_while_missing(self) -> None:
        """Ask discovery services more often while a topic has no broker: it is often about to be created."""
        refresh_s = self._options.topic_refresh_s
        pauses = Delays(_FIRST_PAUSE_S, max(_FIRST_PAUSE_S, refresh_s))
        while True:
            missing = set(self._options.topics) - {topic for topic, _ in self._wanted()}
            if self._options.topic_pattern is not None and not self._sources:
                missing.add("")
            if not missing:
                pauses.reset()
            await trio.sleep(min(pauses.next_s(), refresh_s))
            if missing:
                self._discovery.ask_again()

    def _is_named(self, topic: str, broker: BrokerAddresses) -> bool:
        """Return whether the user named both; a topic that was found instead is not created again."""
        return topic in self._options.topics and broker in self._options.brokers

    # ------------------------------------------------------------------ one source

    async def _keep_open(self, key: tuple[str, str], broker: BrokerAddresses) -> None:
        """Open a source, and again after each error, until the handler returns."""
        topic, _ = key
        delays = Delays(self._settings.reconnect_min_s, self._settings.reconnect_max_s, random.random)
        warned = False
        last: Source | None = None

        @asynccontextmanager
        async def opened() -> AsyncIterator[Source]:
            nonlocal warned, last
            async with self._open(topic, broker) as source:
                if warned:
                    logger.info("topic %s: connected to %s again", topic, source.broker)
                warned = False
                last = source
                delays.reset()
                yield source

        while True:
            errors: list[Exception] = []
            taken: LogTaken | None = None
            is_identified = False
            try:
                async with opened() as source:
                    await self._handle(source)
            except* LogTaken as group:
                taken = next(each for each in leaves_of(group) if isinstance(each, LogTaken))
            except* LogIdentified:
                is_identified = True
            except* (
                ConnectionFailed,
                ConnectionLost,
                BrokerUnreachable,
                RequestRefused,
                LogChanged,
                RawStreamError,
            ) as group:
                errors += leaves_of(group)
            if taken is not None:
                try:
                    if await taken.can_be_read(waits=self._options.looks_again):
                        continue
                except (BrokerUnreachable, RequestRefused) as exc:
                    errors.append(exc)
            if not errors:
                if is_identified:
                    continue
                return  # the key stays: the source is closed for good
            error = errors[0]
            if isinstance(error, AuthRefused) or (
                isinstance(error, RequestRefused) and error.is_about_secret
            ):
                raise error
            if (
                not self._is_named(topic, broker)
                and isinstance(error, RequestRefused)
                and error.status == 404
            ):
                self._sources.discard(key)  # the topic was deleted; it may be found again
                if topic in (found := self._topics_of.get(broker, [])):
                    found.remove(topic)
                self._logs.forget(topic)
                if last is not None:
                    self._gone(last)
                return
            if not warned:
                logger.warning("topic %s: %s; retrying", topic, error)
            warned = True
            await trio.sleep(delays.next_s())

    @asynccontextmanager
    async def _open(self, topic: str, broker: BrokerAddresses) -> AsyncIterator[Source]:
        options = self._options
        if broker is _ALL:
            named = [each.tcp or (await self._finder.find(each)).tcp for each in options.brokers]
            async with self._consumer(topic, named, list(options.lookupd_http_addresses)) as consumer:
                yield ChannelSource(topic, "", consumer)
            return
        tcp, found, creates_topic = broker.tcp, None, self._is_named(topic, broker)
        if not is_ephemeral(topic) and not is_ephemeral(options.channel):
            tcp, found = await self._find_log(topic, broker)
        if found is None:
            async with self._consumer(topic, [tcp], []) as consumer:
                yield ChannelSource(topic, tcp, consumer)
            return
        async with (
            self._logs.hold(found, await self._finder.identity(found.broker)),
            self._opened_log(found, creates_topic=creates_topic) as source,
        ):
            yield source

    @asynccontextmanager
    async def _opened_log(self, found: FoundLog, *, creates_topic: bool) -> AsyncIterator[Source]:
        stored = await self._start(found)
        secret = self._settings.secret

        def reader_at(sequence: int) -> TopicReader:
            return TopicReader(
                found.broker,
                found.topic,
                start=sequence,
                follow=True,
                tls=self._finder.tls if found.broker.startswith("https://") else None,
                auth_secret=secret.text,
                auth_secret_file=secret.file,
            )

        async with open_log_source(
            *(found, self._options, stored, reader_at),
            creates_topic=creates_topic,
            ask_again=lambda: self._start(found),
        ) as source:
            yield source

    async def _find_log(self, topic: str, broker: BrokerAddresses) -> tuple[str, FoundLog | None]:
        """Return the broker's TCP address, and its log; None: it cannot be read."""
        if broker in self._options.brokers:
            found = await self._finder.find(broker)
        else:
            secured = [
                await trio.to_thread.run_sync(self._options.https_address, each, limiter=self._finder.threads)
                for each in broker.http
            ]
            found = FoundBroker(broker.tcp, next(filter(None, secured), ""), "no discovery service names it")
        address = found.http
        if not address:
            logger.warning(
                "the HTTP API of the broker at %s was not found: %s; its channel is consumed, at least once",
                *(found.tcp, found.why_no_http),
            )
            return found.tcp, None
        log = BrokerLog(address, topic, self._finder.tls, secret=self._settings.secret)
        readable = await LogRequests(log, address, topic, self._finder.threads).find()
        if readable is None:
            logger.info("the broker at %s cannot read logs; its channel is consumed, at least once", address)
        return found.tcp, readable

    def _consumer(self, topic: str, brokers: list[str], lookupds: list[str]) -> Consumer:
        return Consumer(
            topic,
            self._options.channel,
            nsqd_tcp_addresses=brokers,
            lookupd_http_addresses=lookupds,
            max_in_flight=self._options.max_in_flight,
            **self._options.consumer,
        )
