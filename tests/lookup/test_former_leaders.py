"""Tests for brokers that hide a lost one, whose cluster they lead now, at discovery services."""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from trio.testing import MockClock

from broker.certificates import Certificates
from lookup.fake_lookupd import FakeLookupd, fake_lookupd
from lookup.support import (
    Lookupd,
    Runs,
    grant,
    ours,
    producer,
    real,
    token_of,
    until,
    watched_log,
    write_auth_file,
)
from trio_nsq.access.secret import Secret
from trio_nsq.api.lookupd import Node
from trio_nsq.http.messages import Response
from trio_nsq.lookup.former_leaders import FormerLeader
from trio_nsq.lookup.protocol import PeerInfo
from trio_nsq.lookup.query import lookup_topic
from trio_nsq.lookup.registration import HIDE_FOR_S, HIDE_INTERVAL_S, LookupRegistration

INFO = PeerInfo("127.0.0.1", "here", 4151, 4150, "0.1")


class Topic:
    def __init__(self) -> None:
        self.channels: dict[str, object] = {}


@pytest.fixture
def clock() -> MockClock:
    """A clock that moves only while all tasks wait, after data between sockets has arrived."""
    return MockClock(autojump_threshold=0.05)


@asynccontextmanager
async def registered(*addresses: str, topics: tuple[str, ...] = ("t",), **options: Any) -> AsyncIterator[Any]:
    """Run the registration of a broker with these topics."""
    timeouts: dict[str, Any] = {"connect_timeout_s": 2, "request_timeout_s": 5}
    known = {topic: Topic() for topic in topics}
    registration = LookupRegistration(known, INFO, addresses, **(timeouts | options))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(registration.run)
        yield registration
        nursery.cancel_scope.cancel()


def lost(
    *topics: str, host: str = "old", http_port: int = 4151, remote: str = "10.0.0.9:50000"
) -> dict[str, Any]:
    """Return a broker as `/nodes` has it."""
    return {
        "remote_address": remote,
        "hostname": host,
        "broadcast_address": host,
        "tcp_port": 4150,
        "http_port": http_port,
        "version": "1",
        "topics": list(topics),
        "tombstones": [False] * len(topics),
    }


# ------------------------------------------------------------------------------------------------ what is hidden


def node(*topics: str, host: str = "old", http_port: int = 4151, remote: str = "r") -> Node:
    return Node(host, 4150, http_port, topics, remote_address=remote)


@pytest.mark.parametrize(
    ("configured", "listed", "name"),
    [
        ("old", "old", "old:4151"),
        ("OLD.example.", "old.Example", "old.Example:4151"),
        ("::1", "::1", "::1:4151"),
        ("[::1]", "::1", "::1:4151"),
    ],
)
def test_the_service_is_told_the_name_that_it_lists(configured: str, listed: str, name: str) -> None:
    former = FormerLeader(configured, 4151)
    nodes = [node("t", host="other"), node("t", http_port=4152), node("t", "u", host=listed)]
    assert former.tombstones(nodes) == [("t", name), ("u", name)]


def test_a_broker_that_has_registered_again_is_not_hidden() -> None:
    former = FormerLeader("old", 4151)
    assert former.tombstones([node("t", remote="a"), node("u", remote="b")])
    assert former.tombstones([node("t", remote="b")])
    assert not former.tombstones([node("t", remote="b"), node("t", remote="c")])
    assert not former.tombstones([node("t", remote="c")])


def test_a_broker_that_registers_later_is_not_hidden() -> None:
    former = FormerLeader("old", 4151)
    assert not former.tombstones([])
    assert not former.tombstones([node("t")])


# ------------------------------------------------------------------------------------------------ when


def hidden(lookupd: FakeLookupd) -> list[tuple[str, str]]:
    return [(topic, name) for _, topic, name in lookupd.tombstones]


async def test_tombstones_are_renewed_until_the_service_forgets_the_broker(clock: MockClock) -> None:
    async with fake_lookupd() as lookupd, registered(lookupd.tcp_address) as here:
        lookupd.nodes = [lost("t", host="other"), lost("t", "u")]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.retire, "old", 4151)
            for count in (2, 4, 6):
                await lookupd.until(lambda: len(lookupd.tombstones) == count)  # noqa: B023 - awaited at once
            lookupd.nodes.pop()
        assert set(hidden(lookupd)) == {("t", "old:4151"), ("u", "old:4151")}
        times = sorted(time for time, _, _ in lookupd.tombstones)[::2]
        assert [time - times[0] for time in times] == pytest.approx(
            [0, HIDE_INTERVAL_S, 2 * HIDE_INTERVAL_S], abs=1
        )


async def test_the_new_broker_is_registered_first(clock: MockClock) -> None:
    async with fake_lookupd() as lookupd:
        lookupd.nodes = [lost("t")]
        lookupd.replies["REGISTER"] = None
        async with registered(lookupd.tcp_address) as here, trio.open_nursery() as nursery:
            nursery.start_soon(here.retire, "old", 4151)
            conversation = await lookupd.heard(0, "REGISTER t")
            await trio.testing.wait_all_tasks_blocked(0.02)
            assert not lookupd.tombstones
            await conversation.say(b"\0\0\0\2OK")
            await lookupd.until(lambda: lookupd.tombstones)
            assert len(lookupd.conversations) == 1
            nursery.cancel_scope.cancel()


async def test_a_service_that_refuses_the_registration_is_asked_as_well(clock: MockClock) -> None:
    async with fake_lookupd() as lookupd:
        lookupd.nodes = [lost("t")]
        lookupd.replies["REGISTER"] = b"E_INVALID"
        async with registered(lookupd.tcp_address) as here, trio.open_nursery() as nursery:
            nursery.start_soon(here.retire, "old", 4151)
            await lookupd.until(lambda: lookupd.tombstones)
            nursery.cancel_scope.cancel()


async def test_a_broker_that_registers_again_ends_it(clock: MockClock) -> None:
    async with fake_lookupd() as lookupd, registered(lookupd.tcp_address) as here:
        lookupd.nodes = [lost("t")]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.retire, "old", 4151)
            await lookupd.until(lambda: lookupd.tombstones)
            lookupd.nodes.append(lost("t", remote="10.0.0.9:50001"))
        assert hidden(lookupd) == [("t", "old:4151")]


async def test_it_ends_in_time(clock: MockClock) -> None:
    async with fake_lookupd() as lookupd, registered(lookupd.tcp_address) as here:
        lookupd.nodes = [lost("t")]
        began = trio.current_time()
        await here.retire("old", 4151)
        assert trio.current_time() - began == pytest.approx(HIDE_FOR_S, abs=1)
        assert len(lookupd.tombstones) == 11


@pytest.mark.parametrize("own", ["127.0.0.1", "127.0.0.1."])
async def test_it_never_hides_itself(clock: MockClock, own: str) -> None:
    async with fake_lookupd() as lookupd, registered(lookupd.tcp_address) as here:
        lookupd.nodes = [lost("t", host="127.0.0.1")]
        await here.retire(own, 4151)
        assert not lookupd.tombstones


async def test_another_port_of_its_own_host_is_another_broker(clock: MockClock) -> None:
    async with fake_lookupd() as lookupd, registered(lookupd.tcp_address) as here:
        lookupd.nodes = [lost("t", host="127.0.0.1", http_port=4161), lost("t", host="127.0.0.1")]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.retire, "127.0.0.1", 4161)
            await lookupd.until(lambda: lookupd.tombstones)
            nursery.cancel_scope.cancel()
        assert hidden(lookupd) == [("t", "127.0.0.1:4161")]


async def test_each_service_is_told(clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    """Also if another one cannot be reached, has not listed it, or is removed meanwhile."""
    async with AsyncExitStack() as stack:
        one, two, unaware, removed = [await stack.enter_async_context(fake_lookupd()) for _ in range(4)]
        async with fake_lookupd() as gone:
            pass
        for lookupd in (one, two, removed):
            lookupd.nodes = [lost("t")]
        every = [each.tcp_address for each in (one, two, unaware, removed, gone)]
        async with registered(*every) as here, trio.open_nursery() as nursery:
            nursery.start_soon(here.retire, "old", 4151)
            await removed.until(lambda: removed.tombstones)
            here.set_addresses(every[:3])
            await one.until(lambda: len(one.tombstones) == 2)
            await two.until(lambda: len(two.tombstones) == 2)
            nursery.cancel_scope.cancel()
        assert not unaware.tombstones
        assert len(removed.tombstones) == 1
    assert not any("former leader" in line for line in caplog.messages)


async def test_a_service_with_an_error_is_asked_again(
    clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with fake_lookupd() as lookupd, registered(lookupd.tcp_address) as here:
        lookupd.nodes = [lost("t")]
        lookupd.refusals[""] = Response.text("no", 500)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.retire, "old", 4151)
            await trio.sleep(HIDE_INTERVAL_S / 2)
            del lookupd.refusals[""]
            await lookupd.until(lambda: lookupd.tombstones)
            nursery.cancel_scope.cancel()
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    address = lookupd.tcp_address
    assert errors == [f"LOOKUPD({address}): cannot hide the former leader old:4151: got response 500"]


async def test_a_refused_topic_leaves_the_others(clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    topics = [f"t{number}" for number in range(30)]
    async with fake_lookupd() as lookupd, registered(lookupd.tcp_address) as here:
        lookupd.nodes = [lost(*topics)]
        lookupd.refusals["t0"] = Response.text("no", 403)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.retire, "old", 4151)
            await lookupd.until(lambda: len(lookupd.tombstones) == 60)
            nursery.cancel_scope.cancel()
        assert {topic for topic, _ in hidden(lookupd)} == {*topics}
    reason = "got response 403: its token needs the role manage"
    assert len([line for line in caplog.messages if line.endswith(f": {reason}")]) == 1


# ------------------------------------------------------------------------------------------------ real services


async def found(lookupd: Lookupd, topic: str = "t") -> set[int]:
    """Return the ports of the brokers that consumers of a topic find."""
    return {each.tcp_port for each in await lookup_topic(lookupd.http_address, topic, timeout_s=30)}


@pytest.mark.interop
@pytest.mark.parametrize("lookupds", [real, ours], ids=["nsqlookupd", "ours"])
@pytest.mark.parametrize("host", ["127.0.0.1", "Old.example", "::1"])
async def test_consumers_find_only_the_new_broker(lookupds: Runs, host: str) -> None:
    """The connection of the old one stays open, as that of a machine without power."""
    async with lookupds() as lookupd, AsyncExitStack() as stack:
        for port in (5150, 6150):
            old = await stack.enter_async_context(
                producer(lookupd, broadcast_address=host, tcp_port=port, http_port=port + 1)
            )
            await old.register("REGISTER t c", "REGISTER u")
        async with registered(lookupd.tcp_address, topics=("t", "u")) as here:
            for topic in ("t", "u"):
                await until(partial(finds, lookupd, topic, {4150, 5150, 6150}))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(here.retire, host.lower(), 5151)
                for topic in ("t", "u"):
                    await until(partial(finds, lookupd, topic, {4150, 6150}))
                nursery.cancel_scope.cancel()


async def finds(lookupd: Lookupd, topic: str, ports: set[int]) -> bool:
    return await found(lookupd, topic) == ports


@pytest.mark.interop
async def test_nsqlookupd_forgets_a_tombstone_of_a_broker_that_registers_again() -> None:
    """So the former leader is found at once when it leads again, from another connection."""
    async with real() as lookupd, producer(lookupd, tcp_port=5150) as old:
        await old.register("REGISTER t")
        async with httpx.AsyncClient() as client:
            url = f"http://{lookupd.http_address}/topic/tombstone?topic=t&node=b:4151"
            (await client.post(url)).raise_for_status()
        assert await found(lookupd) == set()
        async with producer(lookupd, tcp_port=5150) as again:
            await again.register("REGISTER t")
            assert await found(lookupd) == {5150}


async def test_over_tls_with_a_token(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    tls = certificates.client_context()
    grants = {"broker": grant("register", "manage"), "limited": grant("register"), "reader": grant("consume")}
    auth_file = write_auth_file(tmp_path / "auth.toml", grants)
    options: dict[str, Any] = {"auth_file": auth_file, "tls_required": True, **certificates.options}

    async def sees(*ports: int) -> bool:
        url, token = f"https://{lookupd.http_address}", token_of("reader").decode()
        brokers = await lookup_topic(url, "t", timeout_s=30, tls=tls, token=token)
        return {each.tcp_port for each in brokers} == {*ports}

    async with ours(**options) as lookupd, producer(lookupd, token=token_of("broker"), tls=tls) as old:
        await old.register("REGISTER t c")
        with watched_log() as log:
            secret = Secret(token_of("limited").decode())
            async with registered(lookupd.tcp_address, tls=tls, secret=secret) as here:
                await until(partial(sees, 4150, 4150))
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(here.retire, "b", 4151)
                    await log.until("cannot hide the former leader b:4151: got response 403: its token needs")
                    nursery.cancel_scope.cancel()
            secret = Secret(token_of("broker").decode())
            async with registered(lookupd.tcp_address, tls=tls, secret=secret) as here:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(here.retire, "b", 4151)
                    await log.until('setting tombstone for producer@"b:4151" of topic(t)')
                    nursery.cancel_scope.cancel()
