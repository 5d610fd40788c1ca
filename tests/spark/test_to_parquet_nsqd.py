"""Tests for `to-parquet` from an nsqd: through a spool, at least once.

The command is killed with `kill -9` at random times; at the end all published messages must be in files.
`FAULT_COMPLETE=1` (`make soak`) kills more often, `FAULT_SEED` sets the times.
"""

import io
import logging
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import pytest
import trio

from cli.support import Cli, Result
from interop.peers import Broker, free_ports, nsqd, nsqlookupd
from qcli.app import run
from spark.support import cli_of, column, export, leftovers, numbers, parquet_files, rows, run_in_process
from trio_nsq.client import Consumer
from trio_nsq.spark.spool.collect import CollectLimits, Collector, StopReason, in_flight_for
from trio_nsq.spark.spool.spool import Spool

COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"
SEED = int(os.environ.get("FAULT_SEED", "1"))
DEADLINE_S = 60.0
ARCHIVE = ["--channel", "archive"]
CHANNEL = [*ARCHIVE, "--idle-timeout", "150ms"]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Run an nsqd."""
    with nsqd(tmp_path_factory.mktemp("nsqd")) as broker:
        yield broker


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition on another process holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def left(broker: Broker, topic: str) -> int:
    """Return how many messages the channel still has, in any state."""
    stats = broker.channel_stats(topic, "archive")
    return int(stats["depth"] + stats["in_flight_count"] + stats["deferred_count"])


def in_process(*args: str) -> Result:
    """Run a command in this process, in a tenth of the time of a new process."""
    logger = logging.getLogger("trio_nsq")
    before = logger.handlers[:], logger.level, logger.propagate
    try:
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = run(args)
    finally:
        logger.handlers, logger.level, logger.propagate = before
    return Result(code, out.getvalue().encode(), err.getvalue())


def take(
    broker: Broker, topic: str, folder: Path, *args: str, idle_timeout: str = "150ms"
) -> dict[str, object]:
    """Run the command, check that it succeeds, and return its JSON report."""
    address = ["--nsqd-tcp-address", broker.tcp_address]
    result = in_process(
        "to-parquet",
        topic,
        str(folder),
        *address,
        *ARCHIVE,
        "--idle-timeout",
        idle_timeout,
        "--format",
        "json",
        *args,
    )
    assert result.code == 0, result.err
    assert "at least once" in result.err
    (record,) = result.records
    return record


def spool_messages(folder: Path) -> int:
    """Return the bytes of messages in spools below a folder; each file of a log has a header."""
    total = 0
    for path in folder.rglob("*.log"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size - 52
    return total


async def put_back(broker: Broker, topic: str, count: int) -> list[bytes]:
    """Receive this many messages and requeue them."""
    taken: list[bytes] = []
    async with Consumer(
        topic, "archive", nsqd_tcp_addresses=[broker.tcp_address], output_buffer_size=-1
    ) as consumer:
        async for message in consumer:
            taken.append(message.body)
            if len(taken) == count:
                consumer.max_in_flight = 0  # before the last requeue, so that no further message is sent
            message.requeue(0, backoff=False)
            if len(taken) == count:
                break
    return taken


def test_each_message_once_with_its_attempts(stock: Broker, topic: str, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    bodies = [b"%d-" % number + chance.randbytes(chance.randrange(1, 300)) for number in range(3000)]
    stock.create(topic, "archive")
    cli_of(stock).publish(topic, bodies)
    again = trio.run(put_back, stock, topic, 5)
    said = take(stock, topic, tmp_path)
    assert (said["messages"], said["repeated"], said["engine"]) == (3000, 0, "inline")
    found = rows(tmp_path).to_pylist()
    assert sorted(row["body"] for row in found) == sorted(bodies)
    assert [row["seq"] for row in found] == list(range(3000))
    assert {row["broker"] for row in found} == {stock.tcp_address}
    assert len({row["id"] for row in found}) == 3000
    assert all(abs(row["ts_ns"] / 1e9 - time.time()) < 600 for row in found)
    expected = {body: 1 + again.count(body) for body in bodies}
    assert {row["body"]: row["attempts"] for row in found} == expected
    assert (left(stock, topic), spool_messages(tmp_path), leftovers(tmp_path)) == (0, 0, [])
    cli_of(stock).publish(topic, numbers(10))
    assert take(stock, topic, tmp_path)["messages"] == 10
    assert column(tmp_path, "seq") == list(range(3010))


def test_new_messages_do_not_delay_the_end(stock: Broker, topic: str, tmp_path: Path) -> None:
    """A busy channel is never empty. All messages published before the start are in files at the end."""
    stock.create(topic, "archive")
    cli_of(stock).publish(topic, numbers(1000))
    ended, published = threading.Event(), 1000

    def publish() -> None:
        nonlocal published
        deadline = time.monotonic() + DEADLINE_S
        while not ended.is_set() and time.monotonic() < deadline:
            cli_of(stock).publish(topic, numbers(1, published))
            published += 1

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        # nsqd buffers new messages for up to 250 ms, so the channel is never silent for that long.
        take(stock, topic, tmp_path, idle_timeout="400ms")
        assert publisher.is_alive()
    finally:
        ended.set()
        publisher.join()
    found = column(tmp_path, "body")
    assert set(numbers(1000)) <= set(found)
    assert len(found) + left(stock, topic) == published


@pytest.mark.parametrize("kills", [10 if COMPLETE else 2])
def test_killed_command(tmp_path: Path, kills: int) -> None:
    chance = random.Random(SEED)
    folder, ranges = tmp_path / "a", ["--target-file-size", "64KiB"]
    count = 40_000 if COMPLETE else 2_500
    bodies = [b"%09d" % number + b"x" * 400 for number in range(count)]
    with nsqd(tmp_path / "data", "--msg-timeout=1s") as broker:
        broker.create("t", "archive")
        cli_of(broker).publish("t", bodies)
        address = ["--nsqd-tcp-address", broker.tcp_address]
        for number in range(kills):
            # In turn: kill while it receives (everything is one round), while it exports (most of the time),
            # and in short rounds.
            more = [CHANNEL, [*CHANNEL, *ranges], [*ARCHIVE, "--follow", "--every", "50ms"]][number % 3]
            receiving = number % 3 == 0
            files = len(parquet_files(folder)) + chance.randrange(1, 4)
            received = spool_messages(folder) + chance.randrange(1, 100_000)

            def far_enough(receiving: bool = receiving, files: int = files, received: int = received) -> bool:
                if receiving and spool_messages(folder) >= received:
                    return True
                return left(broker, "t") == 0 or (not receiving and len(parquet_files(folder)) >= files)

            with cli_of(broker).running("to-parquet", "t", str(folder), *address, *more) as running:
                until(far_enough)
                time.sleep(chance.uniform(0, 0.05))
                running.process.kill()
                running.process.wait()
            found = column(folder, "seq") if parquet_files(folder) else []
            assert len(set(found)) == len(found)
        repeated = 0
        while left(broker, "t") or spool_messages(folder):
            repeated += int(str(take(broker, "t", folder, *ranges)["repeated"]))
    found_bodies = column(folder, "body")
    assert set(found_bodies) == set(bodies)
    # Redeliveries of the same nsqd are detected: fewer than 100,000 messages were in between.
    assert len(found_bodies) == len(bodies), f"{repeated} were left out"
    assert leftovers(folder) == []


def test_messages_that_cannot_be_stored_stay_in_the_channel(
    stock: Broker, topic: str, tmp_path: Path
) -> None:
    """A full disk, simulated by a file size limit."""
    stock.create(topic, "archive")
    cli_of(stock).publish(topic, numbers(100))
    address = ["--nsqd-tcp-address", stock.tcp_address]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        result = in_process("to-parquet", topic, str(tmp_path), *address, *CHANNEL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.code == 1
    assert re.search(r"Error: Cannot write .*\.log: File too large\.", result.err), result.err
    until(lambda: left(stock, topic) == 100)
    assert take(stock, topic, tmp_path)["messages"] == 100
    assert sorted(column(tmp_path, "body")) == sorted(numbers(100))


async def test_unreachable_nsqd_among_several(stock: Broker, topic: str, tmp_path: Path) -> None:
    """The messages of the other nsqds are exported; then the failure is reported."""
    stock.create(topic, "archive")
    cli_of(stock).publish(topic, numbers(100))
    addresses = [stock.tcp_address, f"127.0.0.1:{free_ports(1)[0]}"]
    until = CollectLimits(2**30, idle_s=0.05, began_ns=time.time_ns(), connections=2, patience_s=0.2)
    with Spool(tmp_path, topic, "archive", {}) as spool:
        async with Consumer(topic, "archive", nsqd_tcp_addresses=addresses, max_in_flight=2) as consumer:
            assert (
                await Collector(spool, consumer, until, 2500, lambda *_: None).run() is StopReason.UNREACHABLE
            )
        assert spool.messages == 100
    assert left(stock, topic) == 0


@pytest.mark.parametrize(
    ("before", "largest_bytes", "after"),
    [
        (64, 200, 2500),
        (2500, 20_000, 2500),
        (2500, 40_000, 1677),
        (64, 2**20, 64),
        (64, 10 * 2**20, 6),
        (64, 2**28, 2),
    ],
)
def test_fewer_large_messages_are_in_flight(before: int, largest_bytes: int, after: int) -> None:
    assert in_flight_for(largest_bytes, before, max_in_flight=2500, connections=2) == after


def test_unusable_folder_consumes_nothing(stock: Broker, topic: str, tmp_path: Path) -> None:
    stock.create(topic, "archive")
    cli_of(stock).publish(topic, numbers(10))
    take(stock, topic, tmp_path, "--text")
    cli_of(stock).publish(topic, numbers(10))
    address = ["--nsqd-tcp-address", stock.tcp_address]
    result = in_process("to-parquet", topic, str(tmp_path), *address, *CHANNEL)
    assert (result.code, "has files with --text" in result.err) == (1, True)
    until(lambda: left(stock, topic) == 10)  # nsqd moves messages to the channel after its OK


def test_spool_keeps_messages_after_a_failed_export(stock: Broker, topic: str, tmp_path: Path) -> None:
    stock.create(topic, "archive")
    cli_of(stock).publish(topic, numbers(10))
    address = ["--nsqd-tcp-address", stock.tcp_address]
    result = in_process("to-parquet", topic, str(tmp_path), *address, *CHANNEL, "--json")
    assert (result.code, left(stock, topic)) == (1, 0)
    assert "10 messages are in the spool, and no longer in the channel." in result.err
    assert take(stock, topic, tmp_path)["messages"] == 10


def test_rounds_continue_after_a_restart_of_nsqd(tmp_path: Path) -> None:
    folder, port = tmp_path / "a", free_ports(1)[0]
    arguments = [
        "--nsqd-tcp-address",
        f"127.0.0.1:{port}",
        "--channel",
        "archive",
        "--follow",
        "--every",
        "100ms",
    ]
    running = None
    try:
        for life in range(2):
            with nsqd(tmp_path / "data", f"--tcp-address=127.0.0.1:{port}") as broker:
                if life == 0:
                    broker.create("t", "archive")
                    following = cli_of(broker).running("to-parquet", "t", str(folder), *arguments)
                    running = following.__enter__()
                for round_ in range(2):
                    cli_of(broker).publish("t", numbers(200, (2 * life + round_) * 200))
                    until(lambda: left(broker, "t") == 0)
                if life == 1:
                    assert running is not None
                    running.process.send_signal(signal.SIGTERM)
                    result = running.end()
    finally:
        if running is not None:
            following.__exit__(None, None, None)
    assert result.code == 143
    assert f"127.0.0.1:{port}" in result.err
    assert "Traceback" not in result.err
    assert result.err.splitlines()[-1] == "Run the same command again to continue."
    # The messages received before the signal are in files, too.
    assert sorted(column(folder, "body")) == sorted(numbers(800))
    assert (spool_messages(folder), leftovers(folder)) == (0, [])


def test_nsqds_of_a_discovery_service(tmp_path: Path) -> None:
    with (
        nsqlookupd() as lookupd,
        nsqd(tmp_path / "1", f"--lookupd-tcp-address={lookupd.tcp_address}") as one,
        nsqd(tmp_path / "2", f"--lookupd-tcp-address={lookupd.tcp_address}") as two,
    ):
        for broker, start in ((one, 0), (two, 100)):
            broker.create("t", "archive")
            cli_of(broker).publish("t", numbers(100, start))
        until(lambda: lookupd.http("GET", "/lookup", topic="t").count(b'"tcp_port"') == 2)
        given = ["to-parquet", "t", str(tmp_path / "a"), "--format", "json", *CHANNEL]
        result = in_process(*given, "--lookupd-http-address", lookupd.http_address, "--consume")
        assert result.code == 0, result.err
        cli_of(two).publish("t", numbers(1, 200))
        both = ["--nsqd-tcp-address", one.tcp_address, "--nsqd-tcp-address", two.tcp_address]
        assert in_process(*given, *both, "--deflate").records[0]["messages"] == 1
    found = rows(tmp_path / "a", "broker", "seq", "body").to_pylist()
    for broker, expected in ((one, numbers(100)), (two, numbers(101, 100))):
        mine = [row for row in found if row["broker"] == broker.tcp_address]
        assert sorted(row["body"] for row in mine) == sorted(expected)
        assert [row["seq"] for row in mine] == list(range(len(expected)))
    assert len(found) == 201


def test_consume_from_qcli_serve(broker: Broker, qcli: Cli, topic: str, tmp_path: Path) -> None:
    broker.create(topic, "archive")
    qcli.publish(topic, numbers(500))
    assert take(broker, topic, tmp_path / "a")["messages"] == 500
    assert column(tmp_path / "a", "body") == numbers(500)
    assert left(broker, topic) == 0
    # With both addresses in the environment, or both on the command line, the log is read.
    said = export(qcli, topic, tmp_path / "b", "--nsqd-tcp-address", "nobody:1")
    assert (said["messages"], column(tmp_path / "b", "attempts")) == (500, [None] * 500)


TCP = ["--nsqd-tcp-address", "127.0.0.1:1"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (TCP, "take messages out of a channel: give it with --channel"),
        (["--consume"], "take messages out of a channel: give it with --channel"),
        ([*TCP, "--channel", "c#ephemeral"], "is ephemeral: it is deleted with its messages"),
        ([*TCP, "--channel", "c", "--to", "-1h"], "messages of a channel that are left out would be lost"),
        ([*TCP, "--channel", "c", "--follow", "--idle-timeout", "1s"], "exclude each other"),
        ([*TCP, *TCP, "--channel", "c"], "it names 127.0.0.1:1 twice"),
        (["--nsqd-tcp-address", "nonsense", "--channel", "c"], "nonsense"),
        ([*TCP, "--channel", "c", "--lookupd-http-address", "127.0.0.1:1"], "With the latter, use --consume"),
        ([*TCP, "--channel", "c", "--master", "spark://a:7077"], "cannot read the spool"),
        (["--max-in-flight", "7"], "--max-in-flight is for consuming a channel"),
        (["--idle-timeout", "7s", "--channel", "c"], "--idle-timeout is for consuming a channel"),
    ],
)
def test_usage_errors(tmp_path: Path, args: list[str], said: str) -> None:
    result = in_process("to-parquet", "t", str(tmp_path / "a"), *args)
    assert (result.code, said in result.err.replace("\n", " ")) == (2, True), result.err
    assert not (tmp_path / "a").exists()


def test_remote_folder_needs_a_local_spool() -> None:
    result = in_process("to-parquet", "t", "s3://bucket/a", *TCP, "--channel", "c")
    assert (result.code, "with --spool" in result.err) == (2, True)


def test_unreachable_broker(tmp_path: Path) -> None:
    result = in_process("to-parquet", "t", str(tmp_path / "a"), *TCP, "--channel", "c")
    assert (result.code, list(tmp_path.iterdir())) == (3, [])
    assert "No broker answers at 127.0.0.1:1: connection refused." in result.err
    assert "--nsqd-tcp-address" in result.err


@pytest.mark.parametrize("where", ["--nsqd-tcp-address", "--lookupd-http-address"])
def test_signal_while_connecting(tmp_path: Path, where: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "{}:{}".format(*server.getsockname())
        command = [sys.executable, "-m", "qcli", "to-parquet", "t", str(tmp_path / "a"), "--channel", "c"]
        process = subprocess.Popen([*command, "--consume", where, address], stderr=subprocess.PIPE, text=True)
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1)  # connected, so signals are handled
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, "Traceback" in said) == (143, False)
    assert list(tmp_path.iterdir()) == []


def test_second_export_is_refused(stock: Broker, topic: str, tmp_path: Path) -> None:
    stock.create(topic, "archive")
    arguments = ["to-parquet", topic, "--nsqd-tcp-address", stock.tcp_address, "--channel", "archive"]
    spool = ["--spool", str(tmp_path / "spool")]
    with cli_of(stock).running(*arguments, str(tmp_path / "a"), "--follow", *spool) as running:
        until(lambda: (tmp_path / "spool" / "spool.json").exists())
        busy = in_process(*arguments, str(tmp_path / "b"), *spool)
        running.process.send_signal(signal.SIGINT)
        assert running.end().code == 130
    assert busy.code == 1
    assert "is used by another export" in busy.err


def test_log_of_an_nsqd_is_refused_with_a_hint(stock: Broker, topic: str, tmp_path: Path) -> None:
    stock.create(topic)
    result = run_in_process(cli_of(stock), "to-parquet", topic, str(tmp_path))
    assert result.code == 1
    assert "cannot be read by sequence" in result.err
    assert "--nsqd-tcp-address" in result.err
