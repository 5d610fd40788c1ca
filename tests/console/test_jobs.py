"""The page of jobs: what programs report to brokers, merged and escaped."""

import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from console.support import WebServer, qcli_admin
from fleet.support import Fleet, hung, running_fleet, wait_until
from interop.peers import Broker
from trio_nsq.console.fleet.jobs import Job, merge_jobs, parse_jobs
from trio_nsq.console.upstream.client import UpstreamError


def raw(job_id: str = "one", **values: Any) -> dict[str, Any]:
    known = {
        "id": job_id,
        "kind": "replay",
        "topic": "t",
        "state": "running",
        "started_at": 10,
        "reported_at": 20,
    }
    return known | values


def parsed(*jobs: Any, broker: str = "b") -> list[Job]:
    return parse_jobs({"jobs": list(jobs)}, broker)


def test_a_job_of_several_brokers_is_one_as_it_was_reported_last() -> None:
    merged = merge_jobs(
        [
            parsed(raw(done=3, reported_at=20), raw("two", started_at=30), broker="b1"),
            parsed(raw(done=5, reported_at=21), broker="b2"),
            parsed(raw(done=4, reported_at=19, state="lost"), broker="b3"),
        ]
    )
    assert [(job.job_id, job.done, job.brokers) for job in merged] == [
        ("two", 0, ("b1",)),
        ("one", 5, ("b1", "b2", "b3")),
    ]


def test_one_broker_that_knows_the_end_is_enough() -> None:
    ended = raw(state="succeeded", reported_at=5)
    (job,) = merge_jobs([parsed(raw(reported_at=20)), parsed(ended), parsed(raw(reported_at=21))])
    assert job.state == "succeeded"


def test_jobs_that_run_come_first_then_the_newest() -> None:
    jobs = parsed(
        raw("old", started_at=1), raw("ended", started_at=9, state="failed"), raw("new", started_at=2)
    )
    assert [job.job_id for job in merge_jobs([jobs])] == ["new", "old", "ended"]


def test_share_and_time_left() -> None:
    (job,) = parsed(raw(done=25, total=100, per_second=5))
    assert (job.share, job.left_ms) == (0.25, 15_000)
    (job,) = parsed(raw(done=150, total=100, per_second=5))
    assert (job.share, job.left_ms) == (1.0, 0)
    for job in parsed(raw(), raw(total=0), raw(total=9, per_second=0), raw(total=9)):
        assert job.left_ms is None


@pytest.mark.parametrize("answer", [None, [], {}, {"jobs": None}, {"jobs": {}}])
def test_an_answer_that_is_none(answer: Any) -> None:
    with pytest.raises(UpstreamError, match="b: "):
        parse_jobs(answer, "b")


def test_what_is_no_job_is_left_out_and_wrong_values_are_unknown() -> None:
    wrong = raw(
        lag=-1,
        lag_s="x",
        failures=[],
        done="x",
        total=-1,
        per_second=True,
        pid=[],
        host=5,
        started_at=float("nan"),
        message=None,
    )
    (job,) = parsed(wrong, None, 7, {}, {"id": "x"}, raw(state="x"), raw(state=["running"]), raw(""))
    assert (job.done, job.total, job.per_second, job.pid, job.host, job.started_at) == (
        0,
        None,
        None,
        0,
        "",
        0,
    )
    assert (job.lag, job.lag_s, job.failures) == (None, None, None)
    assert len(parsed(*(raw(str(number)) for number in range(1000)))) == 200


# ---------------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), ours=2) as running:
        yield running


@pytest.fixture(scope="module")
def site(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    flags = [f"--nsqd-http-address={address}" for address in fleet.http_addresses]
    with qcli_admin(tmp_path_factory.mktemp("console"), "--poll-interval=50ms", *flags) as running:
        yield running


def report(broker: Broker, job_id: str, **values: Any) -> None:
    connection = http.client.HTTPConnection(broker.http_address, timeout=20)
    body = {"kind": "replay", "topic": "t", "started_at": time.time() - 30} | values
    connection.request("PUT", f"/jobs/{job_id}", json.dumps(body))
    assert connection.getresponse().read() == b""
    connection.close()


def page(site: WebServer) -> str:
    answer = site.ask("GET", "/jobs")
    assert answer.status == 200
    return answer.body.decode()


def test_without_jobs(site: WebServer) -> None:
    assert "No job runs" in page(site)


def test_jobs_of_all_brokers(site: WebServer, fleet: Fleet) -> None:
    one, two = fleet.ours
    report(one, "a", done=250, total=1000, per_second=50, name="t to t.again", host="worker-1", pid=77)
    report(
        two,
        "b",
        kind="to-parquet",
        topic="clicks",
        channel="archive",
        done=1234567,
        lag=4321,
        lag_s=90,
        failures=2,
    )
    report(two, "c", kind="drain", topic="", state="failed", message="The disk is full.")
    wait_until(lambda: "The disk is full." in page(site), "the page shows the jobs")
    text = page(site)
    for shown in (
        't to t.again', "worker-1", "pid 77", "250 of 1,000 messages, 25.0 %", "50/s", "15 s",
        'value="250"', "1,234,567 messages", "channel archive", "all topics", "failed", one.http_address,
        "4,321", "messages, 90 s", "2 failed tries",
    ):  # fmt: skip
        assert shown in text, shown
    assert text.index("to-parquet") < text.index("Ended in the last hour") < text.index("The disk is full.")


def test_hostile_texts_are_text(site: WebServer, fleet: Fleet) -> None:
    evil = "<script>alert(1)</script>\u202e\"'&"
    report(fleet.ours[0], "evil", name=evil, host=evil, message=evil, unit="<b>", topic='"><i>')
    wait_until(lambda: "alert(1)" in page(site), "the page shows the job")
    text = page(site)
    assert "<script>alert" not in text
    assert "<b></td>" not in text
    assert "<i>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_a_broker_that_hangs_delays_no_other(site: WebServer, fleet: Fleet) -> None:
    one, two = fleet.ours
    report(one, "here", name="still shown")
    with hung(two):
        wait_until(lambda: "still shown" in page(site), "the page shows the job")
