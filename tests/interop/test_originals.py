"""NSQ's own programs, from nsq_to_file to nsq_stat and to_nsq, work on our broker as on nsqd."""

import gzip
import itertools
import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.support import lookupd_flags, wait_until
from interop.connectors import Call, await_finished, connector, drain, publish, receiving, stop
from interop.peers import CLIENT_DEADLINE_S, Broker, Child, nsq_program, nsqd, qcli_lookupd, qcli_serve

pytestmark = pytest.mark.interop

BODIES = [b"%d \xff\0" % number for number in range(3000)]
HOST = socket.gethostname().partition(".")[0]
_numbers = itertools.count()


@pytest.fixture(scope="module")
def lookupd() -> Iterator[Broker]:
    with qcli_lookupd() as running:
        yield running


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory, lookupd: Broker) -> Iterator[Broker]:
    with qcli_serve(tmp_path_factory.mktemp("ours") / "data", *lookupd_flags([lookupd])) as broker:
        yield broker


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with nsqd(tmp_path_factory.mktemp("nsqd"), "--node-id=1000") as broker:
        yield broker


@pytest.fixture
def topic() -> str:
    return f"original{next(_numbers)}"


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gzip"])
def test_nsq_to_file(ours: Broker, topic: str, tmp_path: Path, compressed: bool) -> None:
    ours.create(topic, "nsq_to_file")
    publish(ours, topic, BODIES)
    flags = [f"--topic={topic}", f"--output-dir={tmp_path}", "--datetime-format=D", "--sync-interval=50ms"]
    with connector("nsq_to_file", ours, *flags, *(["--gzip"] if compressed else [])) as writer:
        await_finished(ours, topic, "nsq_to_file", writer)
        assert stop(writer) == 0
    (file,) = tmp_path.iterdir()
    content = gzip.decompress(file.read_bytes()) if compressed else file.read_bytes()
    assert file.name == (f"{topic}.{HOST}-000000.D.log.gz" if compressed else f"{topic}.{HOST}.D.log")
    assert content == b"".join(b"%s\n" % body for body in BODIES)


def test_nsq_to_http(ours: Broker, topic: str) -> None:
    ours.create(topic, "nsq_to_http")
    publish(ours, topic, BODIES[:300])

    def refuse_once(number: int, call: Call) -> int:
        return 500 if number == 7 else 200

    with receiving(refuse_once) as receiver:
        flags = [
            f"--topic={topic}",
            f"--post={receiver.address}/",
            "--consumer-opt=default_requeue_delay,10ms",
        ]
        with connector("nsq_to_http", ours, *flags, "--consumer-opt=max_backoff_duration,0s") as caller:
            await_finished(ours, topic, "nsq_to_http", caller)
            assert stop(caller) == 0
    assert len(receiver.calls) == 301
    assert sorted({call.body for call in receiver.calls}) == sorted(BODIES[:300])
    assert ours.channel_stats(topic, "nsq_to_http")["requeue_count"] == 1


@pytest.mark.parametrize("from_nsqd", [False, True], ids=["from ours", "to ours"])
def test_nsq_to_nsq(ours: Broker, theirs: Broker, topic: str, from_nsqd: bool) -> None:
    source, target = (theirs, ours) if from_nsqd else (ours, theirs)
    source.create(topic, "nsq_to_nsq")
    target.create(f"{topic}.copy", "c")
    publish(source, topic, BODIES)
    flags = [f"--destination-nsqd-tcp-address={target.tcp_address}", f"--destination-topic={topic}.copy"]
    with connector("nsq_to_nsq", source, f"--topic={topic}", *flags) as mirror:
        await_finished(source, topic, "nsq_to_nsq", mirror)
        assert stop(mirror) == 0
    assert drain(target, f"{topic}.copy", "c", len(BODIES)) == BODIES


def test_nsq_to_file_finds_topics_by_our_discovery_service(
    ours: Broker, lookupd: Broker, topic: str, tmp_path: Path
) -> None:
    topics = [f"{topic}.eu", f"{topic}.us"]
    for one in topics:
        ours.create(one, "nsq_to_file")
        publish(ours, one, [one.encode()])
    argv = [
        *(str(nsq_program("nsq_to_file")), f"--topic-pattern={topic}", "--topic-refresh=50ms"),
        *(
            f"--lookupd-http-address={lookupd.http_address}",
            f"--output-dir={tmp_path}",
            "--datetime-format=D",
        ),
        "--sync-interval=50ms",
    ]
    writer = Child(argv)
    try:
        for one in topics:
            await_finished(ours, one, "nsq_to_file", writer)
        assert stop(writer) == 0
    finally:
        writer.close()
    found = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert found == {f"{one}.{HOST}.D.log": f"{one}\n".encode() for one in topics}


def test_nsq_tail(ours: Broker, topic: str) -> None:
    ours.create(topic)
    argv = [
        str(nsq_program("nsq_tail")),
        f"--topic={topic}",
        f"--nsqd-tcp-address={ours.tcp_address}",
        "-n=3",
    ]
    tail = Child(argv)
    try:
        wait_until(lambda: bool(channels(ours, topic)), "nsq_tail has a channel")
        (name,) = channels(ours, topic)
        assert name.startswith("tail")
        assert name.endswith("#ephemeral")
        publish(ours, topic, [b"a", b"b c", b"d"])
        assert tail.wait(CLIENT_DEADLINE_S) == 0
    finally:
        tail.close()
    assert tail.stdout.seen == ["a", "b c", "d"]


def channels(broker: Broker, topic: str) -> list[str]:
    (about,) = json.loads(broker.http("GET", "/stats", format="json", topic=topic))["topics"]
    return [channel["channel_name"] for channel in about["channels"]]


def test_to_nsq(ours: Broker, topic: str) -> None:
    ours.create(topic, "c")
    subprocess.run(
        [nsq_program("to_nsq"), f"--topic={topic}", f"--nsqd-tcp-address={ours.tcp_address}"],
        input=b"a\n\nb b\r\nlast\n",
        timeout=CLIENT_DEADLINE_S,
        check=True,
        stderr=subprocess.DEVNULL,
    )
    assert drain(ours, topic, "c", 3) == [b"a", b"b b\r", b"last"]
