"""Tests for `/healthz`, `/metrics` and `/stats` of jobs."""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import trio
from prometheus_client.openmetrics import parser as openmetrics

from broker.metrics import OPENMETRICS, described, documented
from trio_nsq.connectors.monitoring.server import serve_status, serving_status
from trio_nsq.connectors.monitoring.status import MAX_PROBLEMS, JobStatus, TopicStatus, problems_of
from trio_nsq.protocol.errors import StartupError


def status(*topics: TopicStatus, problems: tuple[str, ...] = ()) -> JobStatus:
    return JobStatus("to-parquet", "topics to ./a", 12.5, topics, problems, rounds=3, written=7)


# ---------------------------------------------------------------------- what is healthy


def test_problems_of_topics() -> None:
    topics = [
        TopicStatus("late", lag_s=61.2),
        TopicStatus("early", lag_s=60.0),
        TopicStatus("unknown"),
        TopicStatus("failing", error="failing: the disk is full", lag_s=99.0),
    ]
    assert problems_of(topics, 60.0, ["no broker"]) == [
        "no broker",
        "late: the lag is 61 s, more than 60 s",
        "failing: the disk is full",
    ]
    assert problems_of(topics[:3], None) == []


def test_a_broker_that_is_down_is_one_problem() -> None:
    same = "No broker answers at a:1"
    assert problems_of([TopicStatus(name, error=same) for name in "abc"], None) == [same]


def test_many_problems_are_counted() -> None:
    found = problems_of((TopicStatus(f"t{n}", error=f"t{n}: x") for n in range(MAX_PROBLEMS + 1000)), None)
    assert len(found) == MAX_PROBLEMS + 1
    assert found[-1] == "and 1,000 more problems"


def test_sums() -> None:
    found = status(
        TopicStatus("a", lag=3, lag_s=1.0, failures=2), TopicStatus("b", lag_s=4.0), TopicStatus("c")
    )
    assert (found.lag, found.lag_s, found.failures) == (3, 4.0, 2)
    assert (status().lag, status(TopicStatus("a")).lag_s) == (None, None)


# ---------------------------------------------------------------------- over HTTP


@contextmanager
def served(found: JobStatus) -> Iterator[httpx.Client]:
    with serving_status("127.0.0.1:0", lambda: found) as address:
        with httpx.Client(base_url=f"http://{address}", timeout=20) as client:
            yield client


def test_health() -> None:
    with served(status()) as client:
        assert [client.get(path).text for path in ("/healthz", "/ping")] == ["OK", "OK"]
    with served(status(problems=("a: x", "b: y"))) as client:
        answer = client.get("/healthz")
        assert (answer.status_code, answer.text) == (503, "a: x\nb: y")
        assert client.get("/ping").text == "OK"  # the process lives


def test_statistics() -> None:
    with served(status(TopicStatus("a", messages=5, lag=2), TopicStatus("b"))) as client:
        found = client.get("/stats").json()
        assert (found["kind"], found["healthy"], found["lag"], found["rounds"]) == ("to-parquet", True, 2, 3)
        assert [(each["topic"], each["messages"], each["lag"]) for each in found["topics"]] == [
            ("a", 5, 2),
            ("b", 0, None),
        ]
        assert [each["topic"] for each in client.get("/stats?topic=b").json()["topics"]] == ["b"]
        answer = client.get("/stats?topic=c")
        assert (answer.status_code, answer.json()) == (404, {"message": "TOPIC_NOT_FOUND"})


def test_metrics_are_the_documented_ones() -> None:
    topics = (
        TopicStatus('a"\\\n', messages=5, lag=2, lag_s=1.5, error="x", last_round_at=7.5),
        TopicStatus("b"),
    )
    with served(status(*topics, problems=("x",))) as client:
        text = client.get("/metrics", headers=OPENMETRICS).text
        assert described(text) == documented("job") | {"nsq_build_info": documented()["nsq_build_info"]}
        families = openmetrics.text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        samples = {(s.name, s.labels.get("topic")): s.value for family in families for s in family.samples}
        assert samples["nsq_job_messages_total", topics[0].topic] == 5
        assert samples["nsq_job_lag_seconds", topics[0].topic] == 1.5
        assert samples["nsq_job_failing", topics[0].topic] == 1
        assert samples["nsq_job_last_round_timestamp_seconds", topics[0].topic] == 7.5
        assert ("nsq_job_lag_seconds", "b") not in samples  # not known
        assert samples["nsq_job_healthy", None] == 0
        assert "nsq_job_lag_messages" in client.get("/metrics").text  # Prometheus' own format


def test_web_pages_with_a_name_of_their_own_are_refused() -> None:
    with served(status()) as client:
        headers = {"Host": "evil.example", "Origin": "http://evil.example"}
        answer = client.get("/stats", headers=headers)
        assert (answer.status_code, "use its IP address" in answer.text) == (403, True)


def test_an_address_that_is_taken() -> None:
    with serving_status("127.0.0.1:0", status) as address:
        with pytest.raises(StartupError, match=r"--http-address: cannot listen on .* in use"):
            with serving_status(address, status):
                raise AssertionError
    with pytest.raises(StartupError, match="neither host:port nor"):
        with serving_status("nowhere", status):
            raise AssertionError


def test_the_address_is_free_after_the_end_and_a_unix_socket_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for _ in range(2):
        with serving_status(str(path), status) as address:
            assert address == str(path)
            assert path.is_socket()
        assert not path.exists()


async def test_in_the_event_loop_of_the_job() -> None:
    async with trio.open_nursery() as nursery:
        address = await nursery.start(serve_status, "127.0.0.1:0", lambda: status(TopicStatus("a")))

        def ask() -> bytes:
            connection = http.client.HTTPConnection(address, timeout=20)
            connection.request("GET", "/stats")
            try:
                return connection.getresponse().read()
            finally:
                connection.close()

        assert json.loads(await trio.to_thread.run_sync(ask))["topics"][0]["topic"] == "a"
        nursery.cancel_scope.cancel()
