"""Tests for exports from several brokers, of which some are down, stopped, without the topic, or come later."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cli.support import Cli, Running
from interop.peers import Broker, free_address, qcli_lookupd, qcli_serve
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
from trio_nsq.client.errors import BrokerUnreachable
from trio_nsq.client.http import broker_http
from trio_nsq.spark.export.job import open_export
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.logs import BrokerPlace
from trio_nsq.spark.runtime.engine import Engine, run_inline


@contextmanager
def restarted(data: Path, address: str) -> Iterator[Broker]:
    """Run a broker at the HTTP address of one that has ended."""
    with qcli_serve(data, f"--http-address={address}") as broker:
        yield broker


def kill(broker: Broker) -> None:
    broker.process.kill()
    broker.process.wait()


def named(*brokers: Broker) -> list[str]:
    return ["--nsqd-http-address", ",".join(broker.http_address for broker in brokers)]


def counts(folder: Path) -> dict[str, int]:
    """Return the number of rows of each broker, and check that each row is there once."""
    found = rows(folder, "broker", "seq").to_pylist()
    keys = [(row["broker"], row["seq"]) for row in found]
    assert len(set(keys)) == len(keys)
    return {broker: sum(each == broker for each, _ in keys) for broker in {each for each, _ in keys}}


def rows_in(folder: Path) -> int:
    return sum(pq.read_metadata(folder / name).num_rows for name in parquet_files(folder))


def test_fleet_of_three_with_one_dead(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    with qcli_serve(tmp_path / "1") as one, qcli_serve(tmp_path / "2") as two:
        with qcli_serve(tmp_path / "3") as three:
            for broker, count in ((one, 30), (two, 20), (three, 40)):
                cli_of(broker).publish("t", numbers(count))
            kill(three)
        arguments = ["to-parquet", "t", str(folder), "--quiet", *named(one, two, three)]
        result = run_in_process(cli_of(one), *arguments)
        assert result.code == 4
        assert result.err.count(three.http_address) == 1
        assert f"No broker answers at {three.http_address}: connection refused. " in result.err
        assert result.err.endswith(
            "The other brokers are exported. Run the same command again to continue.\n"
        )
        assert counts(folder) == {one.http_address: 30, two.http_address: 20}
        result = run_in_process(cli_of(one), *arguments, "--format", "json")
        assert result.code == 4  # nothing new, and still not everything
        assert (result.records[0]["messages"], result.records[0]["unavailable"]) == (0, [three.http_address])
        with restarted(tmp_path / "3", three.http_address):
            assert run_in_process(cli_of(one), *arguments).code == 0
    assert counts(folder) == {one.http_address: 30, two.http_address: 20, three.http_address: 40}


def test_broker_with_planned_messages_is_not_forgotten(
    broker: Broker, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    """It was down when its ranges were to be exported, and the next run does not name it."""
    with qcli_serve(tmp_path / "data") as mortal:
        for each in (broker, mortal):
            cli_of(each).publish(topic, numbers(10))
        places = [BrokerPlace(each.http_address, topic, patience_s=0) for each in (broker, mortal)]
        with open_export(ExportRequest(topic, str(tmp_path / "a")), places) as job:
            tasks = job.plan(places)
            kill(mortal)
            job.run(run_inline, tasks, lambda *_: None)
    result = run_in_process(qcli, "to-parquet", topic, str(tmp_path / "a"))
    assert result.code == 0
    warning = (
        f"Warning: an earlier run planned 10 messages of {mortal.http_address}, which are not in files yet."
    )
    assert warning in result.err


def test_all_brokers_dead(tmp_path: Path) -> None:
    dead = [free_address(), free_address()]
    result = run_in_process(
        Cli("", ""), "to-parquet", "t", str(tmp_path / "a"), "--nsqd-http-address", ",".join(dead)
    )
    assert (result.code, "No broker answers" in result.err) == (3, True)
    assert not (tmp_path / "a").exists()


def test_topic_missing_on_one_broker(broker: Broker, qcli: Cli, topic: str, tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "2") as other:
        qcli.publish(topic, numbers(10))
        arguments = ["to-parquet", topic, str(tmp_path / "a"), "--quiet", *named(broker, other)]
        result = run_in_process(qcli, *arguments)
        assert (result.code, result.err.count("does not exist")) == (4, 1)
        assert other.http_address in result.err
        assert counts(tmp_path / "a") == {broker.http_address: 10}
        cli_of(other).publish(topic, numbers(5))
        assert run_in_process(qcli, *arguments).code == 0
        assert counts(tmp_path / "a") == {broker.http_address: 10, other.http_address: 5}


def test_recreated_topic_on_one_broker(broker: Broker, qcli: Cli, topic: str, tmp_path: Path) -> None:
    """The other broker is exported; running the same command again would not help."""
    with qcli_serve(tmp_path / "data") as other:
        both = (other, broker)
        for each in both:
            cli_of(each).publish(topic, numbers(10))
        export(qcli, topic, tmp_path / "a", *named(*both))
        other.http("POST", "/topic/delete", topic=topic)
        cli_of(other).publish(topic, numbers(12))
        for total, more in ((16, ()), (22, ("--follow", "--every", "100ms"))):
            qcli.publish(topic, numbers(6))
            result = run_in_process(qcli, "to-parquet", topic, str(tmp_path / "a"), *more, *named(*both))
            assert (result.code, result.err.count("was deleted and recreated")) == (4, 1)
            assert "Run the same command again" not in result.err
            assert counts(tmp_path / "a") == {broker.http_address: total, other.http_address: 10}


# ---------------------------------------------------------------------- while an export runs

PATIENCE_S = 3.0
ANSWER_TIMEOUT_S = 4.0


def check_dead_broker(live: Broker, topic: str, folder: Path, engine: Engine) -> None:
    """A broker dies after the plan: its 18 ranges cost one patience together, and the other's 18 are exported."""
    with qcli_serve(folder / "data", "--sync=interval") as mortal:
        both = (mortal, live)
        for broker in both:
            cli_of(broker).publish(topic, numbers(1800))
        places = [BrokerPlace(each.http_address, topic, patience_s=PATIENCE_S) for each in both]
        request = ExportRequest(topic, str(folder / "a"), min_ranges=18)
        with open_export(request, places) as job:
            tasks = job.plan(places)
            assert len(tasks) == 36
            kill(mortal)
            begun_s = time.monotonic()
            job.run(engine, tasks, lambda *_: None)
            elapsed_s = time.monotonic() - begun_s
            assert set(job.failures) == {mortal.http_address}
            assert isinstance(job.failures[mortal.http_address], BrokerUnreachable)
            assert (job.result.messages, job.result.ranges) == (1800, 18)
            assert elapsed_s < 8 * PATIENCE_S  # one for each range: 18 times, or 9 times in two processes
            with restarted(folder / "data", mortal.http_address):
                until(lambda: bool(job.plan(places)) and not job.failures)
                job.run(engine, job.plan(places), lambda *_: None)
                assert not job.failures
    assert counts(folder / "a") == {live.http_address: 1800, mortal.http_address: 1800}
    assert leftovers(folder) == []


def test_dead_broker_costs_one_patience(broker: Broker, topic: str, tmp_path: Path) -> None:
    check_dead_broker(broker, topic, tmp_path, run_inline)


@pytest.mark.slow
def test_dead_broker_costs_one_patience_on_spark(
    broker: Broker, topic: str, tmp_path: Path, engine: Engine
) -> None:
    check_dead_broker(broker, topic, tmp_path, engine)


def test_stopped_broker_does_not_hold_up_later_rounds(
    broker: Broker, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes connections and does not answer. Only the first round waits for it."""
    monkeypatch.setattr(broker_http, "ANSWER_TIMEOUT_S", ANSWER_TIMEOUT_S)
    with qcli_serve(tmp_path / "data") as stopped:
        both = (stopped, broker)
        places = [BrokerPlace(each.http_address, topic, patience_s=0) for each in both]
        for each in both:
            cli_of(each).publish(topic, numbers(10))
        with open_export(ExportRequest(topic, str(tmp_path / "a")), places) as job:
            stopped.process.send_signal(signal.SIGSTOP)
            job.run(run_inline, job.plan(places), lambda *_: None)
            begun_s = time.monotonic()
            for start in range(10, 60, 10):
                cli_of(broker).publish(topic, numbers(10, start))
                job.run(run_inline, job.plan(places), lambda *_: None)
            assert time.monotonic() - begun_s < 3 * ANSWER_TIMEOUT_S  # five times if each round waited
            assert "no answer" in str(job.failures[stopped.http_address])
            stopped.process.send_signal(signal.SIGCONT)
            until(lambda: bool(job.plan(places)))
            job.run(run_inline, job.plan(places), lambda *_: None)
            assert not job.failures
    assert counts(tmp_path / "a") == {broker.http_address: 60, stopped.http_address: 10}


# ---------------------------------------------------------------------- --follow


@contextmanager
def following(qcli: Cli, folder: Path, *args: str) -> Iterator[Running]:
    arguments = (
        "to-parquet",
        "t",
        str(folder),
        "--channel",
        "archive",
        "--follow",
        "--every",
        "100ms",
        *args,
    )
    with qcli.running(*arguments) as running:
        yield running


@contextmanager
def stopped(running: Running) -> Iterator[None]:
    """Stop a process until the block exits."""
    running.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        running.process.send_signal(signal.SIGCONT)


def heard(running: Running, *parts: str) -> str:
    """Read lines of stderr up to one that has these parts, and return it."""
    line = running.hear_line()
    while not all(part in line for part in parts):
        line = running.hear_line()
    return line


def test_follow_goes_on_without_a_dead_broker_and_with_it_when_it_returns(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    with qcli_serve(tmp_path / "1") as one, qcli_serve(tmp_path / "2") as two:
        for broker in (one, two):
            cli_of(broker).publish("t", numbers(10))
        with following(cli_of(one), folder, *named(one, two)) as running:
            until(lambda: rows_in(folder) == 20)
            kill(two)
            heard(running, "Warning: ", two.http_address, "; the others are exported; retrying.")
            cli_of(one).publish("t", numbers(30, 10))
            until(lambda: rows_in(folder) == 50)
            with restarted(tmp_path / "2", two.http_address) as again:
                cli_of(again).publish("t", numbers(5, 10))
                heard(running, "Note: ", two.http_address, "the export continues with it")
                until(lambda: rows_in(folder) == 55)
                assert running.process.poll() is None
                running.process.send_signal(signal.SIGINT)
                result = running.end()
                assert result.code == 130
                assert "Warning" not in result.err
    assert counts(folder) == {one.http_address: 40, two.http_address: 15}


def test_follow_waits_for_a_topic(tmp_path: Path) -> None:
    """Everything that is published after the start is exported, also if the channel is not the topic's first."""
    folder = tmp_path / "a"
    with qcli_serve(tmp_path / "1") as broker, following(cli_of(broker), folder, *named(broker)) as running:
        assert "TOPIC_NOT_FOUND" in heard(running, "Warning: ", broker.http_address)
        with stopped(running):
            broker.create("t", "other")
            cli_of(broker).publish("t", numbers(20))
        until(lambda: rows_in(folder) == 20)
        until(lambda: broker.channel_stats("t", "archive")["depth"] == 0)
        running.process.send_signal(signal.SIGTERM)
        assert running.end().code == 143
    assert column(folder, "body") == numbers(20)


def test_follow_exports_brokers_that_come_later(tmp_path: Path) -> None:
    """Also one that discovery services forget, because it is down."""
    folder = tmp_path / "a"
    with qcli_lookupd("--inactive-producer-timeout=1s") as lookupd:
        tcp = f"--lookupd-tcp-address={lookupd.tcp_address}"
        service = ["--lookupd-http-address", lookupd.http_address]
        with following(Cli("", ""), folder, *service) as running:
            heard(running, "know no broker with topic t", "Waiting")
            with qcli_serve(tmp_path / "1", tcp) as one:
                with stopped(running):  # it finds the messages together with the broker
                    one.create("t", "other")
                    cli_of(one).publish("t", numbers(10))
                until(lambda: rows_in(folder) == 10)
                with qcli_serve(tmp_path / "2", tcp) as two:
                    with stopped(running):
                        two.create("t", "other")
                        cli_of(two).publish("t", numbers(20))
                    until(lambda: rows_in(folder) == 30)
                    kill(two)
                    heard(running, "Warning: ", two.http_address)
                cli_of(one).publish("t", numbers(10, 10))
                until(lambda: rows_in(folder) == 40)
                with qcli_serve(tmp_path / "2", tcp, f"--http-address={two.http_address}") as again:
                    cli_of(again).publish("t", numbers(10, 20))
                    until(lambda: rows_in(folder) == 50)
                running.process.send_signal(signal.SIGTERM)
                assert running.end().code == 143
    assert sorted(counts(folder).values()) == [20, 30]
