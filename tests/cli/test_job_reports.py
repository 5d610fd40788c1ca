"""Tests for the progress that replays, exports and drains report to their brokers."""

import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.support import DEADLINE_S, Cli, only_ours
from interop.peers import Broker, nsqd, qcli_serve
from trio_nsq.client.http.job_reporter import JobProgress, JobReporter

pytestmark = only_ours


def job_of(broker: Broker, meets: Callable[[dict[str, Any]], bool], **about: str) -> dict[str, Any]:
    """Wait until the broker lists a job with these values that meets the condition."""
    deadline = time.monotonic() + DEADLINE_S
    found: list[dict[str, Any]] = []
    while time.monotonic() < deadline:
        found = [
            job
            for job in json.loads(broker.http("GET", "/jobs"))["jobs"]
            if about.items() <= job.items() and meets(job)
        ]
        if found:
            return found[0]
        time.sleep(0.05)
    raise AssertionError(f"no such job; the last ones were {broker.http('GET', '/jobs')!r}")


def ended(state: str) -> Callable[[dict[str, Any]], bool]:
    return lambda job: bool(job["state"] == state)


def test_replay_of_a_topic(broker: Broker, qcli: Cli, topic: str) -> None:
    qcli.publish(topic, [b"%d" % number for number in range(1000)])
    with qcli.running("replay", topic, f"{topic}.again", "--rate", "100") as replay:
        job = job_of(broker, lambda job: bool(job["done"] > 0), topic=topic, state="running")
        assert job["kind"] == "replay"
        assert job["name"] == f"{topic} to {topic}.again"
        assert (job["host"], job["pid"]) == (socket.gethostname(), replay.process.pid)
        assert (job["done"] < 1000, job["total"], job["unit"]) == (True, 1000, "messages")
        assert abs(job["started_at"] - time.time()) < 60
        replay.process.send_signal(signal.SIGINT)
        assert replay.end().code == 130
    last = job_of(broker, ended("stopped"), id=job["id"])
    assert last["done"] >= job["done"]


def test_a_short_job_is_not_reported_and_a_dry_run_neither(broker: Broker, qcli: Cli, topic: str) -> None:
    qcli.publish(topic, [b"x"] * 10)
    assert qcli("replay", topic, f"{topic}.again").code == 0
    assert qcli("replay", topic, f"{topic}.again", "--dry-run").code == 0
    assert topic not in broker.http("GET", "/jobs").decode()


def test_export_that_follows(broker: Broker, qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, [b"x"] * 10)
    with qcli.running(
        "to-parquet", topic, str(tmp_path), "--channel", "a", "--follow", "--every", "1h"
    ) as export:
        job = job_of(broker, lambda job: bool(job["done"] == 10), topic=topic)
        assert (job["kind"], job["channel"], job["total"]) == ("to-parquet", "a", None)
        assert job["name"] == f"{topic} to {tmp_path}"
        export.process.send_signal(signal.SIGTERM)
        assert export.end().code == 143
    job_of(broker, ended("stopped"), id=job["id"])


def test_replay_of_files(broker: Broker, qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, [b"%d" % number for number in range(300)])
    assert qcli("to-parquet", topic, str(tmp_path / "files")).code == 0
    options = ("--rate", "200", "--jobs-folder", str(tmp_path / "jobs"))
    with qcli.running("replay", str(tmp_path / "files"), f"{topic}.again", *options) as replay:
        job = job_of(broker, ended("running"), topic=f"{topic}.again")
        assert job["total"] == 300
        assert replay.end().code == 0
    last = job_of(broker, ended("succeeded"), id=job["id"])
    assert last["done"] == 300


def test_a_failure_has_its_reason(broker: Broker, tmp_path: Path, topic: str, qcli: Cli) -> None:
    qcli.publish(topic, [b"x"] * 1000)
    with qcli_serve(tmp_path / "other") as other:
        options = ("--rate", "100", "--nsqd-tcp-address", other.tcp_address)
        with qcli.running("replay", topic, f"{topic}.again", *options) as replay:
            job = job_of(broker, ended("running"), topic=topic)
            Cli(other.tcp_address, other.http_address)("drain", "--timeout", "1ms")
            assert replay.end().code == 4
    last = job_of(broker, ended("failed"), id=job["id"])
    assert "DRAINING" in last["message"]


def test_drain(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "source") as source, qcli_serve(tmp_path / "target") as target:
        cli = Cli(source.tcp_address, source.http_address)
        source.http("POST", "/topic/create", topic="t")
        source.http("POST", "/channel/create", topic="t", channel="c")
        cli.publish("t", [b"x"] * 5)
        with cli.running("drain") as drain:
            job = job_of(source, ended("running"), kind="drain", topic="")
            assert (job["done"], job["total"], job["name"]) == (0, 5, source.http_address)
            moving = cli("drain", "--move-to", target.http_address)
            assert moving.code == 0
            assert drain.end().code == 0
        last = job_of(source, ended("succeeded"), id=job["id"])
        assert (last["done"], last["total"]) == (5, 5)


def test_nsqd_gets_one_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "trio_nsq.client")
    asked = threading.Semaphore(0)

    def progress() -> JobProgress:
        asked.release()
        return JobProgress()

    with nsqd(tmp_path / "d") as broker:
        reporter = JobReporter((broker.http_address,), "replay", "t", progress, interval_s=0.01)
        reporter.start()
        for _ in range(5):
            assert asked.acquire(timeout=DEADLINE_S)
        reporter.end("succeeded")
        told = [record for record in caplog.records if "the job was not reported" in record.getMessage()]
        assert len(told) == 1
        assert "NOT_FOUND" in told[0].getMessage()


def test_a_broker_that_hangs_or_is_gone_does_not_disturb_the_others(broker: Broker, topic: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        gone = "127.0.0.1:1"
        addresses = (gone, "127.0.0.1:%d" % silent.getsockname()[1], "no port", broker.http_address)
        reporter = JobReporter(addresses, "replay", topic, lambda: JobProgress(7, 9), interval_s=0.01)
        reporter.start()
        job = job_of(broker, ended("running"), topic=topic)
        assert (job["done"], job["total"]) == (7, 9)
        reporter.end("succeeded")


def test_a_bug_in_the_progress_is_no_failure_of_the_job(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "trio_nsq.client")

    def progress() -> JobProgress:
        raise RuntimeError("a bug")

    reporter = JobReporter((), "replay", "t", progress, interval_s=0.001)
    reporter.start()
    deadline = time.monotonic() + DEADLINE_S
    while "reporting the job has failed" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    reporter.end("failed", "x" * 10_000)


def test_secrets_of_urls_and_long_texts_are_cut(broker: Broker, topic: str) -> None:
    name = "s3://key:secret@bucket/" + "long" * 100
    reporter = JobReporter(
        (broker.http_address,),
        "replay",
        topic,
        lambda: JobProgress(message="m" * 600),
        name=name,
        interval_s=0.01,
    )
    reporter.start()
    job = job_of(broker, ended("running"), topic=topic)
    reporter.end("stopped")
    assert "secret" not in job["name"]
    assert (len(job["name"]), len(job["message"])) == (200, 500)
