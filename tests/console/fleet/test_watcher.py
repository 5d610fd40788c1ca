"""The watcher polls all brokers once for everybody, and one that misbehaves harms no other."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio

from console.fleet.fake_brokers import FakeBroker, channel, fake_brokers, topic
from trio_nsq.access.secret import Secret
from trio_nsq.client.connection.tls import TLSFiles
from trio_nsq.console.fleet.watcher import Watcher
from trio_nsq.console.options import ConsoleOptions
from trio_nsq.console.upstream.client import Upstream
from trio_nsq.fleet.snapshot import Snapshot

DEADLINE_S = 30.0
OPTIONS = ConsoleOptions(poll_interval_ms=10, connect_timeout_ms=10_000, request_timeout_ms=60_000)
"""A broker that hangs does so for the whole test."""


@asynccontextmanager
async def watching(
    *given: FakeBroker,
    lookupds: tuple[FakeBroker, ...] = (),
    options: ConsoleOptions = OPTIONS,
    remember_s: float = 0.0,
) -> AsyncIterator[Watcher]:
    """Run a watcher of servers, with its first round done."""
    options = replace(
        options,
        nsqd_http_addresses=tuple(broker.address for broker in given),
        lookupd_http_addresses=tuple(lookupd.address for lookupd in lookupds),
    )
    upstream = Upstream(
        TLSFiles(),
        Secret("console-token"),
        connect_timeout_s=options.connect_timeout_ms / 1000,
        request_timeout_s=options.request_timeout_ms / 1000,
    )
    watcher = Watcher(upstream, options, remember_s=remember_s)
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(watcher.run)
            yield watcher
            nursery.cancel_scope.cancel()
    await upstream.aclose()


async def shows(watcher: Watcher, condition: Callable[[Snapshot], bool]) -> Snapshot:
    """Wait until a snapshot meets a condition, and return it."""
    snapshot = watcher.snapshot
    while not condition(snapshot):
        snapshot = await watcher.changed(snapshot.version)
    return snapshot


async def test_snapshot_of_two_brokers() -> None:
    one = FakeBroker(topics=[topic("t", channel("c", depth=1))])
    other = FakeBroker(topics=[topic("t", channel("c", depth=2))], is_nsqd=True)
    async with fake_brokers(one, other), watching(one, other) as watcher:
        found = watcher.snapshot
        assert found.topics["t"].channels["c"].sum.depth == 3
        assert [*found.brokers] == [one.address, other.address]
        assert [broker.is_nsqd for broker in found.brokers.values()] == [False, True]
        assert set(one.authorizations) == {"bearer console-token"}


async def test_refresh_returns_what_was_changed_before() -> None:
    broker = FakeBroker()
    async with fake_brokers(broker), watching(broker) as watcher:
        for number in range(20):
            broker.topics = [topic(f"t{number}")]
            assert [*(await watcher.refresh()).topics] == [f"t{number}"]


async def test_callers_share_a_refresh() -> None:
    broker = FakeBroker()
    slow = replace(OPTIONS, poll_interval_ms=60_000)
    async with fake_brokers(broker), watching(broker, options=slow) as watcher:
        before = broker.asked.count("/stats")
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(watcher.refresh)
        assert broker.asked.count("/stats") - before <= 2


async def test_hung_broker_delays_no_other() -> None:
    good, bad = FakeBroker(), FakeBroker(topics=[topic("t", depth=5)])
    async with fake_brokers(good, bad), watching(good, bad) as watcher:
        bad.hangs = True
        good.topics = [topic("new")]
        await shows(watcher, lambda snapshot: "new" in snapshot.topics)
        asked = bad.asked.count("/info")
        for number in range(10):
            good.topics = [topic(f"t{number}")]
            await shows(watcher, lambda snapshot, number=number: f"t{number}" in snapshot.topics)  # type: ignore[misc]
        assert bad.asked.count("/info") <= asked + 1  # one request waits; no others pile up


async def test_broker_that_does_not_answer_in_time_is_shown_and_found_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log says each change once."""
    caplog.set_level("INFO", "trio_nsq.console")
    broker = FakeBroker(topics=[topic("t")])
    hasty = replace(OPTIONS, request_timeout_ms=200)
    async with fake_brokers(broker), watching(broker, options=hasty) as watcher:
        await shows(watcher, lambda snapshot: "t" in snapshot.topics)
        broker.hangs = True
        found = await shows(watcher, lambda snapshot: bool(snapshot.errors))
        assert found.errors == {broker.address: "no answer within 0.2 s"}
        assert not found.topics
        broker.hangs = False
        await shows(watcher, lambda snapshot: not snapshot.errors and "t" in snapshot.topics)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"the broker at {broker.address} does not answer: no answer within 0.2 s"),
        ("INFO", f"the broker at {broker.address} answers again"),
    ]


async def test_refusal_says_what_the_console_lacks() -> None:
    refusal = b'{"message":"AUTH_REQUIRED"}'
    broker = FakeBroker(
        raw=b"HTTP/1.1 401 Unauthorized\r\nContent-Length: %d\r\n\r\n%s" % (len(refusal), refusal)
    )
    async with fake_brokers(broker), watching(broker) as watcher:
        found = await shows(watcher, lambda snapshot: bool(snapshot.errors))
    assert found.errors == {broker.address: "AUTH_REQUIRED: give the console --auth-secret-file"}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "not JSON"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "not an object"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 200002\r\n\r\n[" + b"[" * 100_000 + b"]" * 100_001, "not JSON"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", "status 500"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", ""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\nConnection: close\r\n\r\n{", ""),
    ],
    ids=["text", "list", "deep", "500", "ssh", "cut off"],
)
async def test_server_that_is_not_a_broker(raw: bytes, reason: str) -> None:
    good, bad = FakeBroker(topics=[topic("t")]), FakeBroker(raw=raw)
    hasty = replace(OPTIONS, request_timeout_ms=1000)
    async with fake_brokers(good, bad), watching(good, bad, options=hasty) as watcher:
        found = await shows(watcher, lambda snapshot: bool(snapshot.errors))
        assert [*found.errors] == [bad.address]
        assert reason in found.errors[bad.address]
        assert "t" in found.topics


async def test_brokers_of_discovery_services() -> None:
    listed, lookupd = FakeBroker(topics=[topic("t")]), FakeBroker()
    async with fake_brokers(listed, lookupd):
        lookupd.nodes = [listed.node()]
        async with watching(lookupds=(lookupd,)) as watcher:
            found = await shows(watcher, lambda snapshot: "t" in snapshot.topics)
            (broker,) = found.brokers.values()
            assert (broker.configured, [*broker.registrations]) == (False, [lookupd.address])
            lookupd.nodes = []
            listed.raw = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"
            await shows(watcher, lambda snapshot: not snapshot.brokers)


async def test_broker_that_dies_is_shown_although_it_is_no_longer_listed() -> None:
    listed, lookupd = FakeBroker(topics=[topic("t")]), FakeBroker()
    async with fake_brokers(listed, lookupd):
        lookupd.nodes = [listed.node()]
        async with watching(lookupds=(lookupd,), remember_s=3600.0) as watcher:
            await shows(watcher, lambda snapshot: "t" in snapshot.topics)
            lookupd.nodes = []
            listed.raw = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"
            found = await shows(watcher, lambda snapshot: bool(snapshot.errors))
            assert [*found.errors] == [listed.address]
            assert (await watcher.refresh()).errors


async def test_broker_that_is_given_and_listed_is_there_once() -> None:
    broker, lookupd = FakeBroker(topics=[topic("t", depth=1)]), FakeBroker()
    async with fake_brokers(broker, lookupd):
        lookupd.nodes = [broker.node(broadcast_address="localhost"), broker.node()]
        async with watching(broker, lookupds=(lookupd,)) as watcher:
            found = await shows(
                watcher, lambda snapshot: any(each.registrations for each in snapshot.brokers.values())
            )
            assert [*found.brokers] == [broker.address]
            assert found.topics["t"].sum.depth == 1


async def test_listed_hosts_that_are_not_allowed_get_no_secret() -> None:
    broker, lookupd = FakeBroker(), FakeBroker()
    async with fake_brokers(broker, lookupd):
        lookupd.nodes = [
            broker.node(),
            broker.node(broadcast_address="a/b?c"),
            broker.node(broadcast_address=""),
        ]
        options = replace(OPTIONS, lookupd_allowed_hosts=("*.example.com",))
        async with watching(lookupds=(lookupd,), options=options) as watcher:
            await watcher.refresh()
            assert not watcher.snapshot.brokers
            assert broker.asked == []


async def test_lookupd_that_hangs_delays_nobody() -> None:
    broker, good, bad = FakeBroker(), FakeBroker(), FakeBroker(hangs=True)
    async with fake_brokers(broker, good, bad):
        good.nodes = [broker.node()]
        async with watching(lookupds=(good, bad)) as watcher:
            await shows(watcher, lambda snapshot: bool(snapshot.reachable))
            for number in range(10):
                broker.topics = [topic(f"t{number}")]
                await shows(watcher, lambda snapshot, number=number: f"t{number}" in snapshot.topics)  # type: ignore[misc]


async def test_restarted_broker_has_no_wrong_rate() -> None:
    broker = FakeBroker(topics=[topic("t", message_count=5)])
    async with fake_brokers(broker), watching(broker) as watcher:
        await shows(watcher, lambda snapshot: snapshot.topics["t"].sum.in_rate == 0)
        broker.start_time, broker.topics = 2, [topic("t", message_count=1_000_000)]
        found = await shows(watcher, lambda snapshot: snapshot.topics["t"].sum.messages == 1_000_000)
        assert found.topics["t"].sum.in_rate is None
