"""Tests for the state of reported jobs."""

from typing import Any

import pytest

from trio_nsq.broker.state.reported_jobs import (
    KEPT_S,
    LOST_AFTER_S,
    MAX_JOBS,
    JobRefused,
    JobReport,
    ReportedJobs,
)


def report(**values: Any) -> JobReport:
    return JobReport.of({"kind": "replay", "started_at": 1} | values)


def listed(jobs: ReportedJobs, now_s: float) -> list[str]:
    return [job.job_id for job in jobs.listed(now_s)]


def test_a_report_replaces_the_earlier_one() -> None:
    jobs = ReportedJobs()
    jobs.put("a", report(done=1), 0)
    jobs.put("b", report(), 1)
    jobs.put("a", report(done=2, total=9, per_second=0.5), 2)
    found = {job.job_id: job.report for job in jobs.listed(2)}
    assert list(found) == ["a", "b"]
    assert (found["a"].done, found["a"].total, found["a"].per_second) == (2, 9, 0.5)


def test_a_running_job_without_reports_has_lost_contact_and_is_forgotten_later() -> None:
    jobs = ReportedJobs()
    jobs.put("a", report(), 0)
    (job,) = jobs.listed(LOST_AFTER_S)
    assert not job.is_lost(LOST_AFTER_S)
    assert job.is_lost(LOST_AFTER_S + 1)
    jobs.put("a", report(), LOST_AFTER_S + 1)  # it is back
    (job,) = jobs.listed(LOST_AFTER_S + 1)
    assert not job.is_lost(LOST_AFTER_S + 1)
    assert listed(jobs, LOST_AFTER_S + 1 + KEPT_S) == ["a"]
    assert listed(jobs, LOST_AFTER_S + 2 + KEPT_S) == []


@pytest.mark.parametrize("state", ["succeeded", "failed", "stopped"])
def test_an_ended_job_is_not_lost_and_is_kept_for_an_hour(state: str) -> None:
    jobs = ReportedJobs()
    jobs.put("a", report(state=state), 0)
    (job,) = jobs.listed(KEPT_S)
    assert job.is_over(KEPT_S)
    assert not job.is_lost(KEPT_S)
    assert listed(jobs, KEPT_S + 1) == []


def test_the_job_that_ended_first_makes_room() -> None:
    jobs = ReportedJobs()
    for number in range(MAX_JOBS):
        jobs.put(str(number), report(state="succeeded" if number in (7, 9) else "running"), number / 100)
    jobs.put("new", report(), 3)
    assert "7" not in listed(jobs, 3)
    assert {"9", "0", "new"} <= set(listed(jobs, 3))
    jobs.put("newer", report(), 3)
    with pytest.raises(JobRefused, match="TOO_MANY_JOBS") as refusal:
        jobs.put("too-many", report(), 3)
    assert refusal.value.status == 503
    jobs.put("5", report(done=4), 3)  # those that it has are renewed
    assert len(listed(jobs, 3)) == MAX_JOBS
    jobs.put("late", report(), 3 + LOST_AFTER_S)  # by now, others have lost contact
    assert len(listed(jobs, 3 + LOST_AFTER_S)) == MAX_JOBS
    assert "0" not in listed(jobs, 3 + LOST_AFTER_S)


def test_only_the_same_client_renews_a_report() -> None:
    jobs = ReportedJobs()
    jobs.put("a", report(), 0, "alice")
    for other in ("", "bob"):
        with pytest.raises(JobRefused, match="FORBIDDEN"):
            jobs.put("a", report(state="failed"), 1, other)
    jobs.put("a", report(done=5), 2, "alice")
    (job,) = jobs.listed(2)
    assert (job.client, job.report.done) == ("alice", 5)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"kind": "replay"},
        {"kind": "Replay"},
        {"kind": "a b"},
        {"kind": "x" * 33},
        {"kind": 1},
        {"started_at": "now"},
        {"started_at": True},
        {"started_at": -1},
        {"started_at": float("nan")},
        {"started_at": float("inf")},
        {"done": 2**63},
        {"done": None},
        {"total": "many"},
        {"per_second": -1},
        {"state": "lost"},
        {"state": ["running"]},
        {"topic": "t" * 65},
        {"topic": 1},
        {"message": "m" * 501},
        {"name": None},
    ],
)
def test_refused_reports(value: Any) -> None:
    if isinstance(value, dict) and len(value) == 1 and value != {"kind": "replay"}:
        value = {"kind": "replay", "started_at": 1} | value
    with pytest.raises(JobRefused, match="INVALID_JOB"):
        JobReport.of(value)


@pytest.mark.parametrize("job_id", ["", "x" * 65, "a/b", "a b", "ä", "a\n"])
def test_refused_ids(job_id: str) -> None:
    with pytest.raises(JobRefused, match="INVALID_JOB"):
        ReportedJobs().put(job_id, report(), 0)


def test_unknown_keys_are_ignored() -> None:
    assert report(more={"deep": [1]}) == report()
