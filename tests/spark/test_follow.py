"""Tests for `to-parquet` with --channel and --follow."""

import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cli.support import Cli, Running
from interop.peers import Broker, free_address, qcli_serve
from spark.support import (
    cli_of,
    column,
    export,
    leftovers,
    numbers,
    parquet_files,
    rows,
    run_in_process,
    until,
)
from trio_nsq.client.reading.broker_log import BrokerLog
from trio_nsq.spark.export.job import open_export
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.logs import BrokerPlace
from trio_nsq.spark.runtime.engine import Advance, Done, Task, run_inline


def depth(broker: Broker, topic: str, channel: str = "archive") -> int:
    """Return how many messages of a channel wait."""
    found: int = broker.channel_stats(topic, channel)["depth"]
    return found


def test_channel_moves_past_exported_messages(broker: Broker, qcli: Cli, topic: str, tmp_path: Path) -> None:
    broker.create(topic, "archive", "other")
    qcli.publish(topic, numbers(50))
    assert export(qcli, topic, tmp_path, "--channel", "archive")["messages"] == 50
    assert (depth(broker, topic), depth(broker, topic, "other")) == (0, 50)
    qcli.publish(topic, numbers(10, 50))
    assert depth(broker, topic) == 10
    assert export(qcli, topic, tmp_path, "--channel", "archive", "--to", "55")["messages"] == 5
    assert depth(broker, topic) == 5
    assert export(qcli, topic, tmp_path, "--channel", "archive")["messages"] == 5
    assert export(qcli, topic, tmp_path, "--channel", "archive")["messages"] == 0
    assert depth(broker, topic) == 0
    assert column(tmp_path, "seq") == list(range(60))


def test_missing_channel_is_created(broker: Broker, qcli: Cli, topic: str, tmp_path: Path) -> None:
    result = run_in_process(qcli, "to-parquet", topic, str(tmp_path), "--channel", "archive")
    assert (result.code, "does not exist" in result.err) == (1, True)
    broker.create(topic)
    qcli.publish(topic, numbers(20))
    assert export(qcli, topic, tmp_path, "--channel", "archive")["messages"] == 20
    assert depth(broker, topic) == 0


def test_new_channel_after_the_messages_is_noted(
    broker: Broker, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    def exported(channel: str) -> tuple[int, bool]:
        result = run_in_process(
            qcli, "to-parquet", topic, str(tmp_path), "--channel", channel, "--format", "json"
        )
        assert result.code == 0, result.err
        note = f"Note: channel {topic}/{channel} is new on {qcli.http_address} and begins after the newest message."
        return result.records[0]["messages"], note in result.err

    broker.create(topic)
    qcli.publish(topic, numbers(20))
    assert exported("first") == (20, False)
    assert exported("second") == (0, True)
    assert exported("second") == (0, False)
    assert qcli("channel", "seek", f"{topic}/second", "--to", "earliest").code == 0
    assert exported("second") == (0, False)  # the files have them


@pytest.mark.parametrize(("fails", "left"), [(0, 40), (1, 30), (3, 10)])
def test_channel_does_not_move_past_missing_ranges(
    broker: Broker, qcli: Cli, topic: str, tmp_path: Path, fails: int, left: int
) -> None:
    """One of four ranges fails, the others complete: the channel stops before the failed one."""
    broker.create(topic, "archive")
    qcli.publish(topic, numbers(40))
    request = ExportRequest(topic, str(tmp_path), channel="archive", min_ranges=4)

    def all_but_one(tasks: Sequence[Task[Done]], finish: Callable[[Done], None], advance: Advance) -> None:
        run_inline([task for index, task in enumerate(tasks) if index != fails], finish, advance)

    place = BrokerPlace(qcli.http_address, topic)
    with open_export(request, [place]) as job:
        job.run(all_but_one, job.plan([place]), lambda *_: None)
    assert depth(broker, topic) == left
    said = export(qcli, topic, tmp_path, "--channel", "archive")
    assert (said["messages"], depth(broker, topic)) == (10, 0)
    assert column(tmp_path, "seq") == list(range(40))


def test_rounds_continue_after_restarts_of_broker_and_export(tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "a"
    arguments = ["to-parquet", "t", str(folder), "--channel", "archive", "--follow", "--every", "100ms"]
    published = 0
    port = "0"
    for life in range(3):
        with qcli_serve(data, f"--http-address=127.0.0.1:{port}") as broker:
            port = broker.http_address.rpartition(":")[2]
            qcli = cli_of(broker)
            if life == 0:
                broker.create("t", "archive")
                following = qcli.running(*arguments)
                running = following.__enter__()
            elif life == 1:
                assert running.process.poll() is None, running.end()  # it was without a broker for a while
            else:
                running.process.kill()
                following.__exit__(None, None, None)
                following = qcli.running(*arguments)
                running = following.__enter__()
            for _ in range(3):
                qcli.publish("t", numbers(500, published))
                published += 500
                until(lambda: depth(broker, "t") == 0)
            qcli.publish("t", numbers(300, published))
            published += 300
            if life < 2:
                broker.process.kill()
                broker.process.wait()
            else:
                until(lambda: depth(broker, "t") == 0)
                running.process.send_signal(signal.SIGINT)
                result = running.end()
    following.__exit__(None, None, None)
    assert result.code == 130
    summary, advice = result.err.splitlines()[-2:]
    assert advice == "Run the same command again to continue."
    assert re.match(r"(Total: )?[\d,]+ messages \(.*\) of t written to \d+ files ", summary)
    assert rows(folder)["body"].to_pylist() == numbers(published)
    assert column(folder, "seq") == list(range(published))
    assert leftovers(folder) == []


def test_follow_waits_for_a_broker_that_is_down_at_the_start(tmp_path: Path) -> None:
    """And for a discovery service."""
    address, folder = free_address(), tmp_path / "a"
    with Cli("", address).running("to-parquet", "t", str(folder), "--follow", "--every", "50ms") as running:
        assert running.hear_line().startswith("Warning: ")
        with qcli_serve(tmp_path / "data", f"--http-address={address}") as broker:
            cli_of(broker).publish("t", numbers(5))
            until(lambda: parquet_files(folder) != [])
    words = ["--follow", "--lookupd-http-address", free_address()]
    with Cli("", address).running("to-parquet", "t", str(folder), *words) as running:
        line = running.hear_line()
        assert line.startswith("Warning: No nsqlookupd answers")
        assert line.endswith("Waiting for one.\n")


def test_follow_without_a_channel_continues(broker: Broker, qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(10))
    request = ExportRequest(topic, str(tmp_path), first="-1h")
    place = BrokerPlace(qcli.http_address, topic)
    with open_export(request, [place]) as job:
        for end in (10, 10, 25):
            qcli.publish(topic, numbers(end - bounds_end(job.result.messages), job.result.messages))
            tasks = job.plan([place])
            job.run(run_inline, tasks, lambda *_: None)
            assert job.result.messages == end
    assert len(parquet_files(tmp_path)) == 2
    assert job.result.skipped_messages == 0
    assert column(tmp_path, "seq") == list(range(25))


def bounds_end(messages: int) -> int:
    return max(messages, 10)


def test_missing_messages_are_reported(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data", "--max-bytes-per-file=100000") as broker:
        qcli = cli_of(broker)
        broker.create("t", "c")
        request = ExportRequest("t", str(tmp_path / "a"))
        place = BrokerPlace(qcli.http_address, "t")
        with open_export(request, [place]) as job:
            qcli.publish("t", numbers(10))
            job.run(run_inline, job.plan([place]), lambda *_: None)
            for start in range(10, 1010, 100):
                qcli.publish("t", [b"%d" % n + b"x" * 1000 for n in range(start, start + 100)])
            broker.http("POST", "/channel/empty", topic="t", channel="c")
            log = BrokerLog(qcli.http_address, "t")
            until(lambda: log.bounds().first > 10)
            kept = log.bounds().first
            job.run(run_inline, job.plan([place]), lambda *_: None)
        assert (job.result.missing, job.result.damaged) == (kept - 10, False)
        assert job.result.gaps == [(broker.http_address, 10, kept, "discarded")]
        assert column(tmp_path / "a", "seq") == [*range(10), *range(kept, 1010)]


@pytest.mark.parametrize("form", ["text", "json"])
def test_total_report_does_not_repeat_rounds(qcli: Cli, topic: str, tmp_path: Path, form: str) -> None:
    qcli.publish(topic, numbers(3))
    arguments = ["to-parquet", topic, str(tmp_path / "a"), "--follow", "--every", "50ms", "--format", form]
    for rounds in (1, 2):
        with qcli.running(*arguments) as running:
            told = [running.read_line().decode() if form == "json" else heard_summary(running)]
            if rounds == 2:
                qcli.publish(topic, numbers(2, 3))
                told.append(running.read_line().decode() if form == "json" else heard_summary(running))
            running.process.send_signal(signal.SIGINT)
            result = running.end()
        assert result.code == 130
        assert result.out == b""
        *summary, advice = [line for line in result.err.splitlines() if not line.startswith("Note: ")]
        assert advice == "Run the same command again to continue."
        assert [line.partition("(")[0] for line in summary] == (
            ["Total: 2 messages "] if (form, rounds) == ("text", 2) else []
        )


def test_recreated_topic_ends_follow(broker: Broker, qcli: Cli, topic: str, tmp_path: Path) -> None:
    """The first rounds have written files; the new topic must not continue them."""
    qcli.publish(topic, numbers(3))
    with qcli.running("to-parquet", topic, str(tmp_path / "a"), "--follow", "--every", "50ms") as running:
        heard_summary(running)
        broker.http("POST", "/topic/delete", topic=topic)
        qcli.publish(topic, numbers(2))
        result = running.end()
    assert result.code == 4
    assert result.err.endswith(
        "it was deleted and recreated, or lost its last messages, or another "
        "broker has this address now. Choose another folder.\n"
    )


@pytest.mark.parametrize("command", ["to-parquet", "replay"])
def test_interrupt_works_if_the_shell_ignored_it(
    broker: Broker, qcli: Cli, topic: str, tmp_path: Path, command: str
) -> None:
    """A background process of a script starts with SIGINT ignored."""
    qcli.publish(topic, numbers(3))
    arguments = [topic, str(tmp_path / "a"), "--follow"]
    if command == "replay":
        export(qcli, topic, tmp_path / "a")
        arguments = [str(tmp_path / "a"), f"{topic}.again", "--rate", "0.01", "--jobs-folder", str(tmp_path)]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with qcli.running(command, *arguments) as running:
            if command == "replay":
                while not running.hear_line().startswith("Note: job"):
                    pass
            else:
                heard_summary(running)
            running.process.send_signal(signal.SIGINT)
            result = running.end()
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.code == 130


def heard_summary(running: Running) -> str:
    """Return the next line on stderr that is not a note."""
    while (line := running.hear_line()).startswith("Note: "):
        pass
    return line
