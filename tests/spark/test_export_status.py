"""Tests for the status of a continuous export, and for `--http-address`."""

import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.support import Cli
from interop.peers import Broker, free_address, qcli_serve
from spark.support import cli_of, numbers, run_in_process, until
from trio_nsq.connectors.monitoring.status import JobStatus, TopicStatus
from trio_nsq.spark.export.request import ExportResult
from trio_nsq.spark.export.status import STALLED_S, ExportStatus

START_S = 100.0


def new(**values: Any) -> ExportStatus:
    return ExportStatus("t to ./a", 5000.0, START_S, every_s=10.0, **values)


def topic(found: JobStatus, name: str = "t") -> TopicStatus:
    return next(each for each in found.topics if each.topic == name)


def test_lag_is_since_the_begin_of_the_last_complete_round() -> None:
    status = new(max_lag_s=60.0)
    status.begin_round(["t"], 101.0)
    status.note_backlog("t", 7)
    during = status.snapshot(105.0, 3)
    assert (during.rounds, during.written, topic(during).lag, topic(during).lag_s) == (0, 3, 7, 5.0)
    left_out = ExportResult(filtered=1, for_one_channel=2, repeated=4, discarded_rows=8)
    status.end_topic("t", left_out)
    assert topic(status.snapshot(105.0, 3)).left_out == 15
    status.end_topic("t", ExportResult(messages=7, files=1, misfits={"x": 2, "y": 1}))
    status.end_round(106.0, 5006.0)
    after = topic(status.snapshot(108.0, 7))
    assert (after.lag, after.lag_s, after.messages, after.misfits) == (0, 7.0, 7, 3)
    assert after.last_round_at == 5006.0
    status.begin_round(["t"], 110.0)
    status.end_round(110.5, 5010.5)  # nothing new: nobody reported the topic
    assert topic(status.snapshot(110.5, 7)).lag_s == 0.5
    assert status.snapshot(171.0, 7).problems == ["t: the lag is 61 s, more than 60 s"]


def test_messages_that_wait_for_others_are_behind() -> None:
    status = new(max_lag_s=45.0, max_age_s=60.0)
    status.begin_round(["t"], 200.0)
    status.end_topic("t", ExportResult(messages=5))
    status.end_round(201.0, 5101.0)
    assert topic(status.snapshot(201.0, 5)).lag_s == 1.0
    for now_s, waiting, lag_s in ((210.0, 3, 11.0), (240.0, 4, 41.0), (300.0, 2, 61.0), (310.0, 0, 1.0)):
        status.begin_round(["t"], now_s)
        status.end_topic("t", ExportResult(), waiting=waiting)
        status.end_round(now_s + 1, 5000.0 + now_s)
        found = status.snapshot(now_s + 1, 5)
        assert (topic(found).lag, topic(found).lag_s) == (waiting, lag_s)
        assert bool(found.problems) == (lag_s > 45)


def test_a_topic_that_fails_is_a_problem_until_a_round_exports_it() -> None:
    status = new()
    status.begin_round(["t", "u"], 101.0)
    status.note_backlog("t", 9)
    status.end_topic("t", ExportResult(), "t: the disk is full")
    status.end_round(102.0, 5002.0)
    found = status.snapshot(103.0, 0)
    assert found.problems == ["t: the disk is full"]
    assert (topic(found).lag, topic(found).lag_s, topic(found, "u").lag_s) == (9, 3.0, 2.0)
    status.begin_round(["t", "u"], 111.0)
    assert status.snapshot(112.0, 0).problems == ["t: the disk is full"]  # not known to be better yet
    status.end_topic("t", ExportResult(messages=9))
    status.end_round(113.0, 5013.0)
    found = status.snapshot(114.0, 9)
    assert (found.problems, topic(found).failures, topic(found).last_round_at) == ([], 1, 5013.0)


def test_a_search_that_fails_is_a_problem() -> None:
    status = new()
    status.begin_round([], 101.0)
    status.end_round(102.0, 5002.0, ["no discovery service answers"])
    assert status.snapshot(103.0, 0).problems == ["no discovery service answers"]


def test_an_export_without_progress_is_stalled() -> None:
    status = new()
    status.begin_round(["t"], 101.0)
    assert status.snapshot(101.0 + 10 + STALLED_S, 0).problems == []
    (problem,) = status.snapshot(102.0 + 10 + STALLED_S, 0).problems
    assert problem == "for 611 s, no message was written and no round has ended"
    assert status.snapshot(103.0 + 10 + STALLED_S, 1).problems == []  # a message was written


def test_topics_that_are_gone_are_forgotten() -> None:
    status = new()
    status.begin_round(["t", "u"], 101.0)
    status.end_round(102.0, 5002.0)
    status.begin_round(["u"], 111.0)
    status.end_topic("t", ExportResult(messages=1))  # too late, and no error
    assert [each.topic for each in status.snapshot(112.0, 0).topics] == ["u"]


def test_a_channel_that_is_consumed_may_have_more() -> None:
    status = new(knows_lag=False)
    status.begin_round(["t"], 101.0)
    status.end_round(102.0, 5002.0)
    assert (topic(status.snapshot(103.0, 0)).lag, topic(status.snapshot(103.0, 0)).lag_s) == (None, None)


@given(
    st.lists(st.tuples(st.sets(st.sampled_from("abc")), st.sets(st.sampled_from("abc")), st.floats(0, 50)))
)
def test_lag_never_hides_messages(rounds: list[tuple[set[str], set[str], float]]) -> None:
    """Against a list of the rounds: a topic is stored up to the begin of its last round without a failure."""
    status, now_s, complete = new(), START_S, dict.fromkeys("abc", START_S)
    for failing, _, pause_s in rounds:
        status.begin_round("abc", now_s)
        begun_s = now_s
        now_s += pause_s
        for name in failing:
            status.end_topic(name, ExportResult(), "x")
        status.end_round(now_s, 0.0)
        complete |= dict.fromkeys(set("abc") - failing, begun_s)
        found = status.snapshot(now_s, 0)
        assert {each.topic: each.lag_s for each in found.topics} == {
            name: now_s - since_s for name, since_s in complete.items()
        }
        assert {each.topic for each in found.topics if each.error} == failing


# ---------------------------------------------------------------------- the command


def test_status_of_an_export_over_http(tmp_path: Path) -> None:
    """Its broker goes away and returns; one of two topics cannot be written."""
    folder, http = tmp_path / "a", free_address()
    folder.mkdir()
    (folder / "bad").write_text("in the way")
    address = free_address()
    line = ("to-parquet", "good", "bad", str(folder), "--follow", "--every", "100ms", "--json")
    with qcli_serve(tmp_path / "data", f"--http-address={address}") as broker:
        qcli = cli_of(broker)
        qcli.publish("good", [b'{"a": 1}'] * 5 + [b"no JSON"])
        qcli.publish("bad", [b'{"a": 2}'])
        with qcli.running(*line, "--http-address", http, "--max-lag", "1h") as running:

            def stats() -> dict[str, Any]:
                try:
                    found: dict[str, Any] = httpx.get(f"http://{http}/stats", timeout=20).json()
                except httpx.TransportError:
                    return {"topics": []}
                return found

            until(lambda: any(each["messages"] == 6 for each in stats()["topics"]))
            until(lambda: stats()["rounds"] > 2)
            found = stats()
            bad, good = found["topics"]
            assert (good["unparsed"], good["files"], good["lag"], good["error"]) == (1, 1, 0, "")
            assert good["lag_s"] < 60
            assert bad["failures"] > 0
            health = httpx.get(f"http://{http}/healthz", timeout=20)
            assert (health.status_code, "bad" in health.text) == (503, True)
            (folder / "bad").unlink()
            until(lambda: bool(stats()["healthy"]))
            assert httpx.get(f"http://{http}/healthz", timeout=20).text == "OK"
            broker.process.kill()
            until(lambda: not stats()["healthy"])
            assert address in stats()["problems"][0]
            running.process.send_signal(signal.SIGTERM)
            assert running.end().code == 143


def test_status_of_an_export_of_one_topic(tmp_path: Path) -> None:
    """The reports to the brokers have its lag, too."""
    http, address = free_address(), free_address()
    with qcli_serve(tmp_path / "data", f"--http-address={address}") as broker:
        qcli = cli_of(broker)
        qcli.publish("t", numbers(10))
        line = ("to-parquet", "t", str(tmp_path / "a"), "--follow", "--every", "100ms")
        with qcli.running(*line, "--http-address", http) as running:
            assert running.hear_line() == f"Note: /healthz, /metrics and /stats are at {http}.\n"

            def stats() -> dict[str, Any]:
                found: dict[str, Any] = httpx.get(f"http://{http}/stats", timeout=20).json()
                return found

            until(lambda: [each["messages"] for each in stats()["topics"]] == [10])
            qcli.publish("t", numbers(5))
            until(lambda: stats()["topics"][0]["messages"] == 15)
            found = stats()
            assert (found["written"], found["healthy"], found["topics"][0]["failures"]) == (15, True, 0)

            def reported() -> list[Any]:
                jobs = json.loads(broker.http("GET", "/jobs"))["jobs"]
                return [(each["lag"], each["failures"]) for each in jobs if each["lag_s"] is not None]

            until(lambda: reported() == [(0, 0)])
            broker.process.kill()
            until(lambda: stats()["topics"][0]["error"] != "")
            assert not stats()["healthy"]
            running.process.send_signal(signal.SIGTERM)
            assert running.end().code == 143


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (["--http-address", "127.0.0.1:0"], "--http-address is for --follow"),
        (["--max-lag", "5m"], "--max-lag is for --follow"),
        (["--follow", "--max-lag", "5m"], "--max-lag is for /healthz"),
    ],
)
def test_usage(qcli: Cli, tmp_path: Path, line: list[str], text: str) -> None:
    result = run_in_process(qcli, "to-parquet", "t", str(tmp_path), *line)
    assert (result.code, text in result.err) == (2, True), result.err


def test_an_address_that_is_taken(broker: Broker, qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(1))
    line = ["to-parquet", topic, str(tmp_path), "--follow", "--http-address", broker.http_address]
    result = run_in_process(qcli, *line)
    assert result.code == 1
    assert f"--http-address: cannot listen on {broker.http_address}" in result.err
    assert "Traceback" not in result.err
