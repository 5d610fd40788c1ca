"""What `to-nsq` keeps of topics that were deleted, and of connections that it does not use."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from interop.peers import Broker, qcli_serve
from trio_nsq.connectors.source.options import BrokerAddresses, SourceOptions
from trio_nsq.connectors.to_nsq.destination import Destination
from trio_nsq.connectors.to_nsq.options import CopyOptions
from trio_nsq.connectors.to_nsq.progress import Progress
from trio_nsq.connectors.to_nsq.run import copy_topics

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with qcli_serve(tmp_path_factory.mktemp("target") / "data") as broker:
        yield broker


def addresses(broker: Broker) -> BrokerAddresses:
    return BrokerAddresses(broker.tcp_address, (broker.http_address,))


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(PATIENCE_S):
        while not condition():
            await trio.sleep(0.02)  # a broker's statistics send no event


def connections_to(address: str) -> int:
    """Return how many sockets of this machine are connected to an address, or wait to be closed."""
    host, _, port = address.rpartition(":")
    remote = f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{int(port):04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2] == remote and row[3] in ("01", "08") for row in rows)


async def test_deleted_topic_is_not_reported_any_more(target: Broker, tmp_path: Path) -> None:
    progress = Progress()
    with qcli_serve(tmp_path / "data") as broker:
        for topic in ("kept", "gone"):
            broker.post("/pub", b"a", topic=topic)
        source = SourceOptions("copier", topic_pattern=".", topic_refresh_s=0.2, brokers=(addresses(broker),))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(copy_topics, CopyOptions(source, (addresses(target),)), progress)
            await until(lambda: progress.sums.copied == 2)
            broker.http("POST", "/topic/delete", topic="gone")
            await until(lambda: [topic for topic, _ in progress.sources] == ["kept"])
            assert progress.sums.copied == 2
            assert {each.topic: each.messages for each in progress.topics()} == {"kept": 1, "gone": 1}
            broker.post("/pub", b"b", topic="gone")
            await until(lambda: progress.sums.copied == 3)
            (again,) = (each for each in progress.sources.values() if each.topic == "gone")
            assert again.copied == 1
            assert {each.topic: each.messages for each in progress.topics()} == {"kept": 1, "gone": 2}
            nursery.cancel_scope.cancel()


async def test_idle_connections_are_closed(target: Broker) -> None:
    """Otherwise they stay half closed after the broker has closed them."""
    destination = Destination(addresses(target), CopyOptions(SourceOptions("copier"), (addresses(target),)))
    before = connections_to(target.http_address)
    for number in (1, 2):
        for topic in ("a", "b", "c"):
            assert await destination.publish_numbered(topic, "copier", [b"x"], number, number, 0)
        assert connections_to(target.http_address) == before + 3
        destination.close_idle(0.0)
        assert connections_to(target.http_address) == before
    assert await destination.last_number("a", "copier") == 2
    destination.close()
