"""The jobs that clients report: replays, exports, moves, connectors. Kept in memory, bounded; time is a parameter.

A client renews the report of its job every few seconds. The broker only shows what it was told last: it does not start,
stop or check any job.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

MAX_JOBS = 200
MAX_REPORT_BYTES = 4096
LOST_AFTER_S = 60.0
"""A running job whose report was not renewed for this time has lost contact."""
KEPT_S = 3600.0
"""An ended job, and one that has lost contact, is listed for this time after its last report."""

JobState = Literal["running", "succeeded", "failed", "stopped"]
"""`stopped`: by a signal or a request, so that it can be continued."""

_JOB_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KIND = re.compile(r"[a-z][a-z0-9-]{0,31}")
_MAX_NUMBER = 2**63
_TEXTS = {"topic": 64, "channel": 64, "name": 200, "host": 255, "unit": 20, "message": 500}
"""The texts of a report that may be left out, and their greatest lengths."""


class JobRefused(Exception):
    """A report is not accepted.

    Attributes:
        status: The HTTP status that fits.
        code: NSQ's name of the error.
    """

    def __init__(self, status: int, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class JobReport:
    """What a client tells about its job.

    Attributes:
        kind: The command, such as `replay`.
        topic, channel: What it reads, or where it publishes; an empty topic: all topics.
        name: What tells it apart for people, such as `clicks to ./archive`.
        host, pid: Where it runs; an empty host and pid 0: not told.
        started_at: Unix seconds.
        done, total: Units so far and in the end; total None: not known.
        per_second: The recent speed in units; None: not known yet.
        lag: Units that are known and not done yet; None: not known.
        lag_s: How old the units that are not done may be, in seconds; None: not known.
        failures: What has failed and is tried again, since the start; None: not counted.
        message: What it does or waits for, or why it has failed.
    """

    kind: str
    started_at: float
    state: JobState = "running"
    topic: str = ""
    channel: str = ""
    name: str = ""
    host: str = ""
    pid: int = 0
    done: int = 0
    total: int | None = None
    per_second: float | None = None
    unit: str = "messages"
    message: str = ""
    lag: int | None = None
    lag_s: float | None = None
    failures: int | None = None

    @classmethod
    def of(cls, value: Any) -> "JobReport":
        """Check a decoded JSON value. Unknown keys are ignored. Raises JobRefused."""
        if not isinstance(value, Mapping):
            raise _invalid("not a JSON object")
        kind, state = value.get("kind"), value.get("state", "running")
        if not isinstance(kind, str) or _KIND.fullmatch(kind) is None:
            raise _invalid("kind is a word of 1 to 32 lower-case letters, digits and -")
        if state not in get_args(JobState):
            raise _invalid(f"state is one of {', '.join(get_args(JobState))}")
        texts = {name: _text(value, name, most) for name, most in _TEXTS.items() if name in value}
        return cls(
            kind,
            _number(value, "started_at"),
            state,
            **texts,
            pid=int(_number(value, "pid", 0)),
            done=int(_number(value, "done", 0)),
            total=_count(value, "total"),
            per_second=_number_or_none(value, "per_second"),
            lag=_count(value, "lag"),
            lag_s=_number_or_none(value, "lag_s"),
            failures=_count(value, "failures"),
        )


def _invalid(reason: str) -> JobRefused:
    return JobRefused(400, "INVALID_JOB", reason)


def _text(value: Mapping[str, Any], name: str, most: int) -> str:
    text = value[name]
    if not isinstance(text, str) or len(text) > most:
        raise _invalid(f"{name} is a string of at most {most} characters")
    return text


def _number(value: Mapping[str, Any], name: str, default: int | None = None) -> float:
    number = value.get(name, default)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise _invalid(f"{name} is a number")
    if not 0 <= number < _MAX_NUMBER or math.isnan(number):
        raise _invalid(f"{name} is at least 0 and less than 2^63")
    return number


def _number_or_none(value: Mapping[str, Any], name: str) -> float | None:
    return None if value.get(name) is None else _number(value, name)


def _count(value: Mapping[str, Any], name: str) -> int | None:
    return None if value.get(name) is None else int(_number(value, name))


@dataclass(frozen=True, slots=True)
class ReportedJob:
    """A job as it was reported last.

    Attributes:
        client: The name of the authenticated client that reports it; empty without authentication.
        reported_s: The time of the last report.
    """

    job_id: str
    report: JobReport
    client: str
    reported_s: float

    def is_lost(self, now_s: float) -> bool:
        """Whether it should be running, and its client has stopped to report."""
        return self.report.state == "running" and now_s - self.reported_s > LOST_AFTER_S

    def is_over(self, now_s: float) -> bool:
        """Whether it has ended or lost contact."""
        return self.report.state != "running" or self.is_lost(now_s)


class ReportedJobs:
    """The reports of one broker, at most `MAX_JOBS`."""

    def __init__(self) -> None:
        self._jobs: dict[str, ReportedJob] = {}  # that with the oldest report first

    def put(self, job_id: str, report: JobReport, now_s: float, client: str = "") -> None:
        """Take a report. If there are too many, forget the job that ended first.

        Raises:
            JobRefused: The id is not valid or belongs to another client, or too many jobs are running.
        """
        if _JOB_ID.fullmatch(job_id) is None:
            raise JobRefused(400, "INVALID_JOB", "the id has 1 to 64 letters, digits and . _ -")
        known = self._jobs.get(job_id)
        if known is not None and known.client != client:
            raise JobRefused(403, "FORBIDDEN", "another client reports this job")
        self._forget_old(now_s)
        if known is None and len(self._jobs) >= MAX_JOBS:
            over = next((each for each in self._jobs.values() if each.is_over(now_s)), None)
            if over is None:
                raise JobRefused(503, "TOO_MANY_JOBS", f"{MAX_JOBS} jobs are running")
            del self._jobs[over.job_id]
        self._jobs.pop(job_id, None)
        self._jobs[job_id] = ReportedJob(job_id, report, client, now_s)

    def listed(self, now_s: float) -> Iterator[ReportedJob]:
        """Return all jobs, those with the newest report first."""
        self._forget_old(now_s)
        return reversed(self._jobs.values())

    def _forget_old(self, now_s: float) -> None:
        for job in list(self._jobs.values()):
            if now_s - job.reported_s <= KEPT_S:
                return
            del self._jobs[job.job_id]
