"""Tests for `--http-address` of to-file, to-http and to-nsq, and for their reports to brokers."""

import json
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.support import Cli, only_ours
from connectors.http_receiver import receiver
from interop.peers import Broker, free_address, qcli_serve
from spark.support import until

pytestmark = only_ours


@pytest.mark.parametrize("kind", ["to-file", "to-http", "to-nsq"])
def test_status_of_a_connector(broker: Broker, qcli: Cli, topic: str, tmp_path: Path, kind: str) -> None:
    qcli.publish(topic, [b"x"] * 10)
    http = free_address()
    with receiver() as server:
        more = {
            "to-file": ["--output-dir", str(tmp_path), "--sync-interval", "50ms"],
            "to-http": ["--post", server.url],
            "to-nsq": [
                f"--destination-nsqd-tcp-address={broker.tcp_address}",
                f"--destination-nsqd-http-address={broker.http_address}",
                f"--destination-topic={topic}.copy",
            ],
        }[kind]
        if kind != "to-http":  # their reports go to the brokers whose logs they read
            more += ["--nsqd-tcp-address", broker.tcp_address]
        with qcli.running(kind, topic, "--channel", "c", *more, "--http-address", http) as running:

            def stats() -> dict[str, Any]:
                try:
                    found: dict[str, Any] = httpx.get(f"http://{http}/stats", timeout=20).json()
                except httpx.TransportError:
                    return {"topics": []}
                return found

            def meets(condition: Callable[[dict[str, Any]], bool]) -> Callable[[], bool]:
                return lambda: any(condition(each) for each in stats()["topics"])

            until(meets(lambda each: bool(each["topic"] == topic and each["messages"] == 10)))
            if kind != "to-http":  # the others read the log, whose end they know
                until(meets(lambda each: bool(each["lag"] == 0)))
            assert httpx.get(f"http://{http}/healthz", timeout=20).text == "OK"
            text = httpx.get(f"http://{http}/metrics", timeout=20).text
            assert f'nsq_job_messages_total{{topic="{topic}"}} 10.0' in text
            assert f'nsq_job_info{{kind="{kind}",name="{topic}"}} 1.0' in text

            def job() -> dict[str, Any]:
                jobs = json.loads(broker.http("GET", "/jobs"))["jobs"]
                found: dict[str, Any] = next(
                    (each for each in jobs if each["kind"] == kind and each["topic"] == topic), {}
                )
                return found

            until(lambda: job().get("done") == 10)
            assert (job()["state"], job()["channel"], job()["total"]) == ("running", "c", None)
            running.process.send_signal(signal.SIGTERM)
            assert running.end().code == 143
    assert (job()["state"], job()["done"]) == ("stopped", 10)


def topic_at(address: str) -> dict[str, Any]:
    """Return the status of the only topic of a connector; empty if there is none yet."""
    try:
        found: list[dict[str, Any]] = httpx.get(f"http://{address}/stats", timeout=20).json()["topics"]
    except httpx.TransportError:
        return {}
    return found[0] if found else {}


def test_requests_that_fail_are_counted_and_told(qcli: Cli, topic: str) -> None:
    qcli.publish(topic, [b"x"])
    http, nobody = free_address(), free_address()
    with qcli.running("to-http", topic, "--post", f"http://{nobody}/", "--http-address", http):

        def fails() -> bool:
            found = topic_at(http)
            return found.get("failures", 0) > 0 and nobody in found["error"]

        until(fails)


def test_destination_that_goes_away(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Its failures are counted and told, until it stores messages again."""
    qcli.publish(topic, [b"1"])
    http, at = free_address(), free_address()
    args = [topic, f"--destination-nsqd-http-address={at}", f"--nsqd-tcp-address={qcli.tcp_address}"]
    with ExitStack() as stack:
        with qcli_serve(tmp_path / "data", f"--http-address={at}") as destination:
            stack.enter_context(qcli.running("to-nsq", *args, f"--http-address={http}"))
            until(lambda: topic_at(http).get("messages") == 1)
            assert (topic_at(http)["failures"], topic_at(http)["error"]) == (0, "")
            destination.process.kill()
            destination.process.wait()
        qcli.publish(topic, [b"2"])
        until(lambda: topic_at(http)["failures"] > 0)
        assert f"the broker at {at} is unavailable" in topic_at(http)["error"]
        assert (
            f'nsq_job_failing{{topic="{topic}"}} 1.0' in httpx.get(f"http://{http}/metrics", timeout=20).text
        )
        stack.enter_context(qcli_serve(tmp_path / "data", f"--http-address={at}"))
        until(lambda: topic_at(http)["messages"] == 2)
        assert topic_at(http)["error"] == ""


def test_an_address_that_is_taken(broker: Broker, qcli: Cli, topic: str, tmp_path: Path) -> None:
    result = qcli("to-file", topic, "--output-dir", str(tmp_path), "--http-address", broker.http_address)
    assert (result.code, "--http-address: cannot listen on" in result.err) == (1, True), result.err
