"""Connectors read a log once, at whatever addresses its broker is found, now and later."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cli.support import Cli, Run, lines, only_ours
from cli.to_file import to_file
from interop.peers import Broker, free_address, qcli_serve
from trio_nsq.client.http.idempotent_producer import IdempotentProducer
from trio_nsq.connectors.to_file.checkpoint import Checkpoint
from trio_nsq.connectors.to_nsq.numbers import number_of, producer_name

pytestmark = only_ours
HOSTS = ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with qcli_serve(tmp_path_factory.mktemp("target") / "data") as broker:
        yield broker


def at(broker: Broker, *hosts: str) -> Cli:
    """Return a `Cli` that knows a broker by these names of this machine."""
    tcp, http = (
        ",".join(f"{host}:{address.rpartition(':')[2]}" for host in hosts)
        for address in (broker.tcp_address, broker.http_address)
    )
    return Cli(tcp, http)


def numbers(count: int, start: int = 0) -> list[bytes]:
    return [b"%06d" % number for number in range(start, start + count)]


def messages(broker: Broker, topic: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in broker.http("GET", "/topic/read", topic=topic).splitlines()]


def bodies(broker: Broker, topic: str) -> list[bytes]:
    return [each["body"].encode() for each in messages(broker, topic)]


def copy(run_here: Run, cli: Cli, topic: str, target: Broker) -> None:
    destination = f"--destination-nsqd-http-address={target.http_address}"
    result = run_here(cli, "to-nsq", topic, destination, "--no-follow", "--format", "json")
    assert result.code == 0, result.err
    assert all(each["exactly_once"] for each in result.records)


def rewind(broker: Broker, topic: str, channel: str) -> None:
    """Move a channel to the beginning: the position of the copies is elsewhere."""
    broker.http("POST", "/channel/seek", topic=topic, channel=channel, to="earliest")


def test_to_nsq_copies_a_broker_of_several_spellings_once(
    run_here: Run, qcli: Cli, broker: Broker, target: Broker, topic: str
) -> None:
    qcli.publish(topic, numbers(500))
    copy(run_here, at(broker, *HOSTS), topic, target)
    assert bodies(target, topic) == numbers(500)
    for host in HOSTS:
        rewind(broker, topic, "nsq_to_nsq")
        copy(run_here, at(broker, host), topic, target)
    assert bodies(target, topic) == numbers(500)


def test_to_nsq_continues_the_copies_of_an_older_version(
    run_here: Run, qcli: Cli, broker: Broker, target: Broker, topic: str
) -> None:
    """It knew a log by the address of its broker."""
    qcli.publish(topic, numbers(5))
    broker.create(topic, "nsq_to_nsq")
    third = messages(broker, topic)[2]
    older = producer_name(broker.http_address, topic, "nsq_to_nsq", 0)
    with IdempotentProducer(target.http_address, topic, older) as producer:
        producer.publish(numbers(3), number_of(2, third["id"].encode()))
    rewind(broker, topic, "nsq_to_nsq")
    copy(run_here, qcli, topic, target)
    rewind(broker, topic, "nsq_to_nsq")
    copy(run_here, at(broker, "localhost"), topic, target)
    assert bodies(target, topic) == numbers(5)


@pytest.mark.parametrize("older", [False, True], ids=["", "of an older version"])
def test_to_file_writes_each_message_once(
    qcli: Cli, broker: Broker, topic: str, tmp_path: Path, older: bool
) -> None:
    qcli.publish(topic, numbers(1000))
    names = HOSTS[:1] if older else HOSTS
    with to_file(at(broker, *names), topic, tmp_path) as writing:
        writing.until_lines(1000)
        assert writing.end()[0] == 143
    if older:
        path = tmp_path / ".qcli-to-file" / f"{topic}@nsq_to_file.checkpoint"
        saved = Checkpoint.decode(path.read_bytes())
        (position,) = saved.positions.values()
        by_address = Checkpoint({broker.http_address: position}, saved.file)
        path.write_bytes(by_address.encode(topic, "nsq_to_file"))
    rewind(broker, topic, "nsq_to_file")
    qcli.publish(topic, numbers(500, 1000))
    with to_file(at(broker, "localhost"), topic, tmp_path) as writing:
        writing.until_lines(1500)
        assert writing.end()[0] == 143
    assert (tmp_path / f"{topic}.log").read_bytes() == lines(numbers(1500))


def test_to_file_goes_on_at_the_new_address(tmp_path: Path) -> None:
    """The broker restarts at the other one of its addresses while the command runs."""
    data, out = tmp_path / "data", tmp_path / "out"
    addresses = [(free_address(), free_address()) for _ in range(2)]
    tcp_addresses, http_addresses = zip(*addresses, strict=True)
    both = Cli(",".join(tcp_addresses), ",".join(http_addresses))
    count = 0
    with ExitStack() as stack:
        writing = None
        for tcp, http in addresses:
            with qcli_serve(data, f"--tcp-address={tcp}", f"--http-address={http}"):
                writing = writing or stack.enter_context(to_file(both, "t", out))
                Cli(tcp, http).publish("t", numbers(100, count))
                count += 100
                writing.until_lines(count)
        assert writing is not None
        assert writing.end()[0] == 143
    assert (out / "t.log").read_bytes() == lines(numbers(count))
