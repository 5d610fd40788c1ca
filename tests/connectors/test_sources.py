"""Tests for the sources of connectors, on real brokers."""

import json
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trio

from connectors.mapped_ports import mapped
from interop.peers import Broker, nsqd, qcli_lookupd, qcli_serve
from trio_nsq.access.policy import token_digest
from trio_nsq.client import ConnectionFailed, Consumer, ConsumerOptions, Producer, RequestRefused
from trio_nsq.connectors.source.batch import Position, Source, SourceBatch
from trio_nsq.connectors.source.log_source import FoundLog
from trio_nsq.connectors.source.options import BrokerAddresses, SourceOptions
from trio_nsq.connectors.source.run import run_sources
from trio_nsq.fleet.log_identity import CopyDiffers

PATIENCE_S = 60.0
CHANNEL = "archive"
DIFFERS = r"the log at \S+ is a copy of the one at \S+, and has other messages since: give one of them"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with qcli_serve(tmp_path_factory.mktemp("ours") / "data") as broker:
        yield broker


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with nsqd(tmp_path_factory.mktemp("theirs") / "data") as broker:
        yield broker


@pytest.fixture(params=["ours", pytest.param("theirs", marks=pytest.mark.interop)])
def either(request: pytest.FixtureRequest) -> Broker:
    found: Broker = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses."""
    return "t" + format(abs(hash(request.node.nodeid)), "x")


def addresses(broker: Broker) -> BrokerAddresses:
    return BrokerAddresses(broker.tcp_address, (broker.http_address,))


def publish(broker: Broker, topic: str, *bodies: bytes) -> None:
    for body in bodies:
        broker.post("/pub", body, topic=topic)


class Received:
    """The sources that were opened and the batches that arrived, in order."""

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self._send, self._batches = trio.open_memory_channel[SourceBatch](1000)

    async def handle(self, source: Source) -> None:
        self.sources.append(source)
        while True:
            self._send.send_nowait(await source.receive())

    async def batches(self, count: int) -> list[SourceBatch]:
        """Return the next batches, up to the one that completes so many messages."""
        found: list[SourceBatch] = []
        with trio.fail_after(PATIENCE_S):
            while sum(len(batch.bodies) for batch in found) < count:
                found.append(await self._batches.receive())
        return found

    async def bodies(self, count: int) -> list[bytes]:
        return [body for batch in await self.batches(count) for body in batch.bodies]


@asynccontextmanager
async def running(
    options: SourceOptions, stored: Callable[[str, str], Position | None] = lambda topic, broker: None
) -> AsyncIterator[Received]:
    """Run sources until the block ends."""
    received = Received()

    async def start(found: FoundLog) -> Position | None:
        return stored(found.topic, found.broker)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_sources, options, start, received.handle)
        yield received
        nursery.cancel_scope.cancel()


def options(brokers: Sequence[Broker], *topics: str, **more: object) -> SourceOptions:
    return SourceOptions(CHANNEL, topics, brokers=tuple(map(addresses, brokers)), **more)  # type: ignore[arg-type]


def channel(broker: Broker, topic: str) -> dict[str, object]:
    (found,) = json.loads(broker.http("GET", "/stats", format="json", topic=topic))["topics"]
    channels: dict[str, dict[str, object]] = {each["channel_name"]: each for each in found["channels"]}
    return channels[CHANNEL]


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(PATIENCE_S):
        while not condition():
            await trio.sleep(0.02)  # a broker's statistics send no event


# ------------------------------------------------------------------------------------------------ logs


async def test_log_is_read_from_the_channels_position(ours: Broker, topic: str) -> None:
    publish(ours, topic, b"before")
    ours.http("POST", "/channel/create", topic=topic, channel="first")
    ours.http("POST", "/channel/create", topic=topic, channel=CHANNEL)
    publish(ours, topic, b"a", b"b")
    async with running(options([ours], topic)) as received:
        batches = await received.batches(2)
    assert [body for batch in batches for body in batch.bodies] == [b"a", b"b"]
    last = batches[-1]
    assert last.sequences is not None
    assert (last.topic, last.broker, last.sequences[-1]) == (topic, ours.http_address, 2)
    assert last.position == Position(3, bytes(last.ids[-1]).decode())
    assert list(last.attempts) == [0] * len(last.bodies)
    assert channel(ours, topic)["depth"] == 2  # nothing was committed


async def test_new_channel_gets_the_backlog_if_it_is_the_first(ours: Broker, topic: str) -> None:
    publish(ours, topic, b"a")
    async with running(options([ours], topic)) as received:
        assert await received.bodies(1) == [b"a"]


async def test_missing_topic_is_created(ours: Broker, topic: str) -> None:
    async with running(options([ours], topic)) as received:
        await until(lambda: received.sources)
        publish(ours, topic, b"a")
        assert await received.bodies(1) == [b"a"]


async def test_log_that_was_empty_is_known_by_its_identity(ours: Broker, topic: str) -> None:
    """Nothing is kept under the address, which another broker may have later."""
    async with running(options([ours], topic)) as received:
        await until(lambda: received.sources)
        publish(ours, topic, b"a")
        (batch,) = await received.batches(1)
        bounds = json.loads(ours.http("GET", "/topic/bounds", topic=topic))
        assert batch.log == bounds["incarnation"]
        assert [source.log == batch.log for source in received.sources] == [False, True]


async def test_another_log_of_the_same_length_is_noticed(tmp_path: Path, topic: str) -> None:
    with qcli_serve(tmp_path / "other") as other:
        publish(other, topic, b"d", b"e")
    with qcli_serve(tmp_path / "data") as broker:
        flags = [f"--tcp-address={broker.tcp_address}", f"--http-address={broker.http_address}"]
        publish(broker, topic, b"a", b"b")
        async with running(options([broker], topic)) as received:
            assert await received.bodies(2) == [b"a", b"b"]
            broker.process.kill()
            broker.process.wait()
            with qcli_serve(tmp_path / "other", *flags):
                assert await received.bodies(2) == [b"d", b"e"]


async def test_commit_moves_the_channel(ours: Broker, topic: str) -> None:
    publish(ours, topic, b"a", b"b", b"c")
    async with running(options([ours], topic)) as received:
        batches = await received.batches(3)
        position = batches[-1].position
        assert position is not None
        received.sources[0].commit(Position(2, None))
        await until(lambda: channel(ours, topic)["depth"] == 1)
        received.sources[0].commit(position)
    assert channel(ours, topic)["depth"] == 0  # the end of the source waits for the last commit


async def test_position_that_was_not_read_does_not_move_the_channel(ours: Broker, topic: str) -> None:
    publish(ours, topic, b"a", b"b", b"c")
    async with running(options([ours], topic)) as received:
        await received.batches(3)
        received.sources[0].commit(Position(1000, None))  # of a log that was here before
        received.sources[0].commit(Position(2, None))
        await until(lambda: channel(ours, topic)["depth"] == 1)


async def test_stored_position_wins(ours: Broker, topic: str) -> None:
    publish(ours, topic, b"a", b"b", b"c")
    async with running(options([ours], topic), lambda topic, broker: Position(2, None)) as received:
        assert await received.bodies(1) == [b"c"]


async def test_channel_that_was_moved_ahead_is_followed(
    ours: Broker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish(ours, topic, b"a", b"b", b"c")
    ours.http("POST", "/channel/create", topic=topic, channel=CHANNEL)
    ours.http("POST", "/channel/seek", topic=topic, channel=CHANNEL, to="2")
    async with running(options([ours], topic), lambda topic, broker: Position(1, None)) as received:
        assert await received.bodies(1) == [b"c"]
    assert "is ahead of what is stored: sequences 1 to 1 are left out" in caplog.text


async def test_messages_that_were_passed_and_deleted_are_named(
    tmp_path: Path, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a restored backup of what was stored: nobody else would tell."""
    with qcli_serve(tmp_path / "data", "--max-bytes-per-file=1") as broker:
        broker.http("POST", "/topic/create", topic=topic)
        broker.http("POST", "/channel/create", topic=topic, channel=CHANNEL)
        for body in (b"a", b"b", b"c", b"d", b"e"):
            publish(broker, topic, body)
        broker.http("POST", "/channel/seek", topic=topic, channel=CHANNEL, to="4")
        await until(
            lambda: json.loads(broker.http("GET", "/topic/bounds", topic=topic))["first_sequence"] == 4
        )
        async with running(options([broker], topic), lambda topic, broker: Position(1, None)) as received:
            assert await received.bodies(1) == [b"e"]
        assert "has passed sequences 1 to 3, retention has deleted them" in caplog.text
        caplog.clear()
        async with running(options([broker], topic), lambda topic, broker: Position(4, None)) as received:
            assert await received.bodies(1) == [b"e"]
        assert caplog.text == ""


@pytest.mark.parametrize("stored", [Position(2, "0123456789abcdef"), Position(50, None)])
async def test_other_log_is_read_from_the_channels_position(
    ours: Broker, topic: str, caplog: pytest.LogCaptureFixture, stored: Position
) -> None:
    publish(ours, topic, b"a", b"b", b"c")
    async with running(options([ours], topic), lambda topic, broker: stored) as received:
        assert await received.bodies(3) == [b"a", b"b", b"c"]
    assert "was recreated, or lost its last messages" in caplog.text


async def test_unfinished_messages_of_a_channel_are_taken_over(ours: Broker, topic: str) -> None:
    """A consumer that was killed leaves messages in flight before the channel's position."""
    publish(ours, topic, *(b"%d" % number for number in range(20)))
    async with Consumer(topic, CHANNEL, nsqd_tcp_addresses=[ours.tcp_address], max_in_flight=20) as consumer:
        number = 0
        async for message in consumer:
            if number == 7:
                message.requeue(delay_s=3600, backoff=False)
            else:
                message.finish()
            number += 1
            if number == 15:
                break
    assert channel(ours, topic)["depth"] != 0
    async with running(options([ours], topic)) as received:
        assert await received.bodies(13) == [b"%d" % number for number in range(7, 20)]


async def test_messages_for_another_channel_are_left_out(ours: Broker, topic: str) -> None:
    ours.http("POST", "/topic/create", topic=topic)
    for name in (CHANNEL, "other"):
        ours.http("POST", "/channel/create", topic=topic, channel=name)
        ours.post("/channel/pub", b"for " + name.encode(), topic=topic, channel=name)
    publish(ours, topic, b"for all")
    async with running(options([ours], topic)) as received:
        assert await received.bodies(2) == [b"for archive", b"for all"]


@pytest.mark.parametrize("what", ["topic", "channel"])
async def test_pause(ours: Broker, topic: str, what: str) -> None:
    publish(ours, topic, b"a")
    names = {"topic": topic} if what == "topic" else {"topic": topic, "channel": CHANNEL}
    ours.http("POST", "/channel/create", topic=topic, channel=CHANNEL)
    ours.http("POST", f"/{what}/pause", **names)
    async with running(options([ours], topic)) as received:
        await until(lambda: received.sources)
        ours.http("POST", f"/{what}/unpause", **names)
        assert await received.bodies(1) == [b"a"]


async def test_paused_channel_is_not_read_at_the_start(
    ours: Broker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish(ours, topic, b"a")
    ours.http("POST", "/channel/create", topic=topic, channel=CHANNEL)
    ours.http("POST", "/channel/pause", topic=topic, channel=CHANNEL)
    with caplog.at_level("INFO"):
        async with running(options([ours], topic)) as received:
            await until(lambda: received.sources)
            publish(ours, topic, b"b")
            ours.http("POST", "/channel/unpause", topic=topic, channel=CHANNEL)
            assert await received.bodies(2) == [b"a", b"b"]
    assert f"{topic}/{CHANNEL} at {ours.http_address} is paused" in caplog.text


async def test_sources_end_if_nothing_new_is_looked_for(ours: Broker, topic: str) -> None:
    publish(ours, topic, b"a")
    opened: list[str] = []

    async def start(found: FoundLog) -> Position | None:
        return None

    async def handle(source: Source) -> None:
        opened.append(source.topic)

    for pattern, found in ((f"^{topic}$", [topic]), (f"^{topic}-nothing", [])):
        opened.clear()
        with trio.fail_after(PATIENCE_S):
            await run_sources(options([ours], topic_pattern=pattern, looks_again=False), start, handle)
        assert opened == found


async def test_restarted_broker(tmp_path: Path, topic: str) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        flags = [f"--tcp-address={broker.tcp_address}", f"--http-address={broker.http_address}"]
        publish(broker, topic, b"a")
        async with running(options([broker], topic)) as received:
            assert await received.bodies(1) == [b"a"]
            broker.process.kill()
            broker.process.wait()
            with qcli_serve(tmp_path / "data", *flags) as again:
                publish(again, topic, b"b")
                assert await received.bodies(1) == [b"b"]


async def test_channel_of_another_broker_at_the_address_stays(tmp_path: Path, topic: str) -> None:
    """What is committed was read from the broker that had the address before."""
    with qcli_serve(tmp_path / "other") as other:
        other.create(topic, CHANNEL)
        publish(other, topic, b"d", b"e", b"f")
    with qcli_serve(tmp_path / "data") as broker:
        flags = [f"--tcp-address={broker.tcp_address}", f"--http-address={broker.http_address}"]
        publish(broker, topic, b"a", b"b", b"c")
        async with AsyncExitStack() as stack:
            received = await stack.enter_async_context(running(options([broker], topic)))
            assert await received.bodies(3) == [b"a", b"b", b"c"]
            broker.process.kill()
            broker.process.wait()
            received.sources[0].commit(Position(3, None))
            with qcli_serve(tmp_path / "other", *flags) as other:
                await stack.aclose()  # the end of the source waits for the last commit
                assert channel(other, topic)["depth"] == 3


async def test_deleted_topic_is_created_again(ours: Broker, topic: str) -> None:
    publish(ours, topic, b"a")
    async with running(options([ours], topic)) as received:
        assert await received.bodies(1) == [b"a"]
        ours.http("POST", "/topic/delete", topic=topic)
        await until(lambda: len(received.sources) == 2)
        publish(ours, topic, b"b")
        assert await received.bodies(1) == [b"b"]


# ------------------------------------------------------------------------------------------------ channels


async def test_channel_is_consumed(either: Broker, topic: str) -> None:
    publish(either, topic, b"a", b"b")
    async with running(options([either], topic, at_least_once=True)) as received:
        batches = await received.batches(2)
        for batch in batches:
            assert (batch.position, list(batch.attempts)) == (None, [1] * len(batch.bodies))
            batch.finish()
        await until(lambda: channel(either, topic)["depth"] == 0)
    assert [source.is_log for source in received.sources] == [False]


@pytest.mark.interop
async def test_log_and_channel_side_by_side(ours: Broker, theirs: Broker, topic: str) -> None:
    publish(ours, topic, b"ours")
    publish(theirs, topic, b"theirs")
    async with running(options([ours, theirs], topic)) as received:
        assert sorted(await received.bodies(2)) == [b"ours", b"theirs"]
    assert sorted(source.is_log for source in received.sources) == [False, True]


async def test_ephemeral_topic_has_no_log(ours: Broker, topic: str) -> None:
    async with running(options([ours], topic + "#ephemeral")) as received:
        await until(lambda: received.sources)
        publish(ours, topic + "#ephemeral", b"a")
        assert await received.bodies(1) == [b"a"]
    assert not received.sources[0].is_log


# ------------------------------------------------------------------------------------------------ brokers and topics


async def test_http_address_alone(either: Broker, topic: str) -> None:
    publish(either, topic, b"a")
    only = SourceOptions(CHANNEL, (topic,), brokers=(BrokerAddresses("", (either.http_address,)),))
    async with running(only) as received:
        assert await received.bodies(1) == [b"a"]


async def test_unknown_http_address(ours: Broker, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    publish(ours, topic, b"a")
    only = SourceOptions(CHANNEL, (topic,), brokers=(BrokerAddresses(ours.tcp_address, ("127.0.0.1:1",)),))
    async with running(only) as received:
        assert await received.bodies(1) == [b"a"]
    assert not received.sources[0].is_log
    assert "its channel is consumed, at least once" in caplog.text


async def test_addresses_of_mapped_ports(ours: Broker, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    """The broker names the port that it knows; both addresses were given, so they are used."""
    publish(ours, topic, b"a")
    with mapped(ours.tcp_address) as tcp, mapped(ours.http_address) as http:
        named = BrokerAddresses(tcp, ("127.0.0.1:1", http), paired_http=http)
        async with running(SourceOptions(CHANNEL, (topic,), brokers=(named,))) as received:
            assert await received.bodies(1) == [b"a"]
    assert [source.broker for source in received.sources] == [http]
    assert f"names {ours.tcp_address} as its TCP address, not {tcp}" in caplog.text


async def test_guessed_address_of_mapped_ports(
    ours: Broker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be another broker's, so its log is not read; the reason is the true one."""
    publish(ours, topic, b"a")
    with mapped(ours.tcp_address) as tcp:
        guess = BrokerAddresses(tcp, (ours.http_address,))
        async with running(SourceOptions(CHANNEL, (topic,), brokers=(guess,))) as received:
            assert await received.bodies(1) == [b"a"]
    assert not received.sources[0].is_log
    assert (
        f"{ours.http_address} names {ours.tcp_address} as its TCP address; if ports are mapped" in caplog.text
    )


async def test_http_address_of_another_broker_that_was_named(
    ours: Broker, topic: str, tmp_path: Path
) -> None:
    """The addresses are in another order: the one that answers is not taken for the one that is down."""
    with qcli_serve(tmp_path / "other") as other:
        for broker in (ours, other):
            publish(broker, topic, b"a")
        swapped = (
            BrokerAddresses(ours.tcp_address, ("127.0.0.1:1", other.http_address), other.http_address),
            BrokerAddresses(other.tcp_address, ("127.0.0.1:1", other.http_address), "127.0.0.1:1"),
        )
        async with running(SourceOptions(CHANNEL, (topic,), brokers=swapped)) as received:
            await received.bodies(2)
    assert sorted((each.broker, each.is_log) for each in received.sources) == sorted(
        [(ours.tcp_address, False), (other.http_address, True)]
    )


@pytest.mark.parametrize("at_least_once", [False, True])
async def test_pattern_finds_topics_at_once_and_later(
    either: Broker, topic: str, at_least_once: bool
) -> None:
    publish(either, f"{topic}.1", b"a")
    more = {"topic_pattern": f"^{topic}[.]", "topic_refresh_s": 0.1, "at_least_once": at_least_once}
    async with running(options([either], **more)) as received:
        assert await received.bodies(1) == [b"a"]
        publish(either, f"{topic}.2", b"b")
        publish(either, f"no-{topic}.2", b"c")
        assert await received.bodies(1) == [b"b"]


async def test_deleted_topic_of_a_pattern_stays_deleted(ours: Broker, topic: str) -> None:
    publish(ours, f"{topic}-0", b"0")
    pattern = f"^{topic}-"
    async with running(options([ours], topic_pattern=pattern, topic_refresh_s=0.2)) as received:
        assert await received.bodies(1) == [b"0"]
        ours.http("POST", "/topic/delete", topic=f"{topic}-0")
        for number in range(1, 6):
            publish(ours, f"{topic}-{number}", b"%d" % number)
            assert await received.bodies(1) == [b"%d" % number]
        assert not json.loads(ours.http("GET", "/stats", format="json", topic=f"{topic}-0"))["topics"]
        publish(ours, f"{topic}-0", b"again")
        assert await received.bodies(1) == [b"again"]


async def test_discovered_brokers(tmp_path: Path, topic: str) -> None:
    with qcli_lookupd() as service:
        flags = [f"--lookupd-tcp-address={service.tcp_address}", "--broadcast-address=127.0.0.1"]
        wanted = SourceOptions(
            CHANNEL, (topic,), topic_refresh_s=0.2, lookupd_http_addresses=(service.http_address,)
        )
        async with running(wanted) as received:
            with qcli_serve(tmp_path / "one", *flags) as one, qcli_serve(tmp_path / "two", *flags) as two:
                publish(one, topic, b"one")
                assert await received.bodies(1) == [b"one"]
                publish(two, topic, b"two")
                assert await received.bodies(1) == [b"two"]
        assert all(source.is_log for source in received.sources)


async def test_service_that_does_not_answer_delays_nothing(tmp_path: Path, topic: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, qcli_lookupd() as lookupd:
        with qcli_serve(tmp_path / "data", f"--lookupd-tcp-address={lookupd.tcp_address}") as broker:
            publish(broker, topic, b"a")
            lookupds = (f"127.0.0.1:{silent.getsockname()[1]}", lookupd.http_address)
            wanted = SourceOptions(
                CHANNEL, topic_pattern=f"^{topic}$", topic_refresh_s=0.2, lookupd_http_addresses=lookupds
            )
            with trio.fail_after(PATIENCE_S):  # the service is given 60 s
                async with running(wanted) as received:
                    assert await received.bodies(1) == [b"a"]


async def test_no_broker() -> None:
    wanted = SourceOptions(CHANNEL, ("t",), brokers=(BrokerAddresses("127.0.0.1:1", ("127.0.0.1:2",)),))
    with pytest.raises(ExceptionGroup) as caught:
        async with running(wanted):
            await trio.sleep_forever()
    assert caught.group_contains(ConnectionFailed, match=r"127\.0\.0\.1:1")


async def test_missing_secret(tmp_path: Path, topic: str) -> None:
    (tmp_path / "auth.toml").write_text(
        f'[[token]]\nname = "app"\nhash = "sha256:{"0" * 64}"\ngrants = [{{ roles = ["read"] }}]\n'
    )
    with qcli_serve(tmp_path / "data", f"--auth-file={tmp_path / 'auth.toml'}") as broker:
        with pytest.raises(ExceptionGroup) as caught:
            async with running(options([broker], topic)):
                await trio.sleep_forever()
    assert caught.group_contains(RequestRefused) or caught.group_contains(ConnectionFailed)


async def test_a_token_that_may_read_the_topic_and_manage_the_channel_is_enough(
    tmp_path: Path, topic: str
) -> None:
    secret = "of-a-test"
    grant = f'{{ roles = ["read", "manage"], topics = ["{topic}"], channels = ["{CHANNEL}"] }}'
    publisher = '{ roles = ["publish"] }'
    (tmp_path / "auth.toml").write_text(
        f'[[token]]\nname = "app"\nhash = "{token_digest(secret.encode())}"\ngrants = [{grant}, {publisher}]\n'
    )
    with qcli_serve(tmp_path / "data", f"--auth-file={tmp_path / 'auth.toml'}") as broker:
        async with Producer(broker.tcp_address, auth_secret=secret) as producer:
            await producer.publish(topic, b"one")
        consumer = ConsumerOptions(auth_secret=secret)
        async with running(options([broker], topic, consumer=consumer)) as received:
            assert await received.bodies(1) == [b"one"]


async def test_broker_that_lost_its_last_messages(
    tmp_path: Path, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a power cut with --sync=interval: new messages get the sequences of the lost ones."""
    with qcli_serve(tmp_path / "data") as broker:
        flags = [f"--tcp-address={broker.tcp_address}", f"--http-address={broker.http_address}"]
        publish(broker, topic, b"kept")
        (log,) = (tmp_path / "data" / "topics" / f"{topic}.topic").glob("*.log")
        size = log.stat().st_size
        publish(broker, topic, b"lost", b"lost too")
        stored: list[Position | None] = [None]
        async with running(options([broker], topic), lambda topic, broker: stored[0]) as received:
            batches = await received.batches(3)
            stored[0] = batches[-1].position
            assert stored[0] is not None
            received.sources[0].commit(stored[0])
            await until(lambda: channel(broker, topic)["depth"] == 0)
            broker.process.kill()
            broker.process.wait()
            os.truncate(log, size)
            with qcli_serve(tmp_path / "data", *flags) as again:
                publish(again, topic, b"new")
                assert await received.bodies(1) == [b"new"]


@contextmanager
def copied(tmp_path: Path, topic: str, *bodies: bytes) -> Iterator[tuple[Broker, Broker]]:
    """Run two brokers of which one has a copy of the other's data folder, with these messages."""
    with qcli_serve(tmp_path / "one") as broker:
        publish(broker, topic, *bodies)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with qcli_serve(tmp_path / "one") as one, qcli_serve(tmp_path / "two") as two:
        yield one, two


async def ended(wanted: SourceOptions) -> list[bytes]:
    """Run sources until each has no more messages; return the bodies."""
    position: list[Position | None] = [None]
    bodies: list[bytes] = []

    async def start(found: FoundLog) -> Position | None:
        return position[0]

    async def handle(source: Source) -> None:
        while source.lag():
            batch = await source.receive()
            bodies.extend(batch.bodies)
            position[0] = batch.position

    with trio.fail_after(PATIENCE_S):
        await run_sources(wanted, start, handle)
    return bodies


@pytest.mark.parametrize("looks_again", [True, False])
async def test_copies_of_a_log_that_both_got_messages_are_refused(
    tmp_path: Path, topic: str, looks_again: bool
) -> None:
    with copied(tmp_path, topic, b"old") as (one, two):
        publish(one, topic, b"of one")
        publish(two, topic, b"of two", b"of two, too")
        with pytest.raises(ExceptionGroup) as caught:
            await ended(options([one, two], topic, looks_again=looks_again))
    assert caught.group_contains(CopyDiffers, match=DIFFERS)


async def test_a_copy_that_gets_messages_later_is_noticed(tmp_path: Path, topic: str) -> None:
    async def diverge(one: Broker, two: Broker) -> None:
        async with running(options([one, two], topic)) as received:
            assert await received.bodies(1) == [b"old"]
            publish(one, topic, b"of one")
            publish(two, topic, b"of two")
            with trio.fail_after(PATIENCE_S):
                await trio.sleep_forever()

    with copied(tmp_path, topic, b"old") as (one, two), pytest.raises(ExceptionGroup) as caught:
        await diverge(one, two)
    assert caught.group_contains(CopyDiffers, match=DIFFERS)


@pytest.mark.parametrize("written", [0, 1])
@pytest.mark.parametrize("looks_again", [True, False])
async def test_of_copies_the_one_with_more_messages_is_read(
    tmp_path: Path, topic: str, looks_again: bool, written: int
) -> None:
    with copied(tmp_path, topic, b"old") as brokers:
        publish(brokers[written], topic, b"new")
        wanted = options(brokers, topic, looks_again=looks_again)
        if not looks_again:
            assert await ended(wanted) == [b"old", b"new"]
            return
        position: list[Position | None] = [None]
        async with running(wanted, lambda topic, broker: position[0]) as received:
            batches: list[SourceBatch] = []
            while not batches or b"new" not in batches[-1].bodies:
                batches += await received.batches(1)
                position[0] = batches[-1].position
    assert [body for batch in batches for body in batch.bodies] == [b"old", b"new"]
