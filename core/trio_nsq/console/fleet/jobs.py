"""The jobs that programs report to their brokers. Answers are untrusted. Pure, except for `ask_jobs`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...api.broker import jobs as list_jobs
from ...fleet.snapshot import Snapshot
from ...fleet.stats import text
from ..upstream.client import Results, Upstream, UpstreamError

TIMEOUT_S = 1.0
"""A broker that answers later is missing on the page until the next snapshot."""
_MAX_JOBS = 200
"""Of one broker, which keeps no more."""
_MAX_NUMBER = 2**63
_STATES = ("running", "succeeded", "failed", "stopped", "lost")


@dataclass(frozen=True, slots=True)
class Job:
    """A job, as it was reported last.

    Attributes:
        topic, channel: What it reads, or where it publishes; an empty topic: all topics.
        started_at, reported_at: Unix seconds.
        total: None: not known.
        per_second: The recent speed in units; None: not known.
        lag: Units that are known and not done yet; None: not known.
        lag_s: How old the units that are not done may be, in seconds; None: not known.
        failures: What has failed and is tried again, since the start; None: not counted.
        state: `running`, `succeeded`, `failed`, `stopped`, or `lost`: it reports no more.
        client: The name with which it has authenticated.
        brokers: Those that list it.
    """

    job_id: str
    kind: str
    topic: str
    channel: str
    name: str
    host: str
    pid: int
    started_at: float
    reported_at: float
    done: int
    total: int | None
    per_second: float | None
    unit: str
    state: str
    message: str
    client: str
    brokers: tuple[str, ...]
    lag: int | None = None
    lag_s: float | None = None
    failures: int | None = None

    @property
    def is_running(self) -> bool:
        """Whether it goes on, as far as known."""
        return self.state == "running"

    @property
    def share(self) -> float | None:
        """The completed share, 0 to 1; None: not known."""
        return min(1.0, self.done / self.total) if self.total else None

    @property
    def left_ms(self) -> float | None:
        """How long it will take at its recent speed; None: not known."""
        if not self.is_running or self.total is None or not self.per_second:
            return None
        return max(0, self.total - self.done) / self.per_second * 1000


async def ask_jobs(upstream: Upstream, snapshot: Snapshot) -> Results[list[Job]]:
    """Ask the brokers that answer. Those that know no jobs, as nsqd, have none."""

    async def ask(address: str) -> list[Job]:
        try:
            return parse_jobs(await upstream.ask(address, list_jobs(), timeout_s=TIMEOUT_S), address)
        except UpstreamError as exc:
            if exc.status == 404:
                return []
            raise

    return await upstream.on_all(
        [address for address in snapshot.reachable if not snapshot.brokers[address].is_nsqd], ask
    )


def parse_jobs(answer: Any, broker: str) -> list[Job]:
    """Return the jobs of an answer to `/jobs`; what is no job is left out. Raises UpstreamError."""
    if not isinstance(answer, dict) or not isinstance(answer.get("jobs"), list):
        raise UpstreamError(broker, "its answer is not an object with jobs")
    found = []
    for raw in answer["jobs"][:_MAX_JOBS]:
        if not isinstance(raw, dict) or not text(raw, "id") or raw.get("state") not in _STATES:
            continue
        found.append(
            Job(
                text(raw, "id"),
                text(raw, "kind"),
                text(raw, "topic"),
                text(raw, "channel"),
                text(raw, "name"),
                text(raw, "host"),
                int(_number(raw, "pid") or 0),
                _number(raw, "started_at") or 0,
                _number(raw, "reported_at") or 0,
                int(_number(raw, "done") or 0),
                _count(raw, "total"),
                _number(raw, "per_second"),
                text(raw, "unit"),
                raw["state"],
                text(raw, "message"),
                text(raw, "client"),
                (broker,),
                _count(raw, "lag"),
                _number(raw, "lag_s"),
                _count(raw, "failures"),
            )
        )
    return found


def merge_jobs(lists: Iterable[Iterable[Job]]) -> list[Job]:
    """Return each job once, as it was reported last: those that run first, then the newest first."""
    found: dict[str, Job] = {}
    for job in (job for jobs in lists for job in jobs):
        known = found.get(job.job_id)
        if known is not None:
            newest = max(
                (known, job), key=lambda each: (each.state not in ("running", "lost"), each.reported_at)
            )
            job = replace(newest, brokers=(*known.brokers, *job.brokers))
        found[job.job_id] = job
    return sorted(found.values(), key=lambda job: (not job.is_running, -job.started_at))


def _count(raw: Mapping[str, Any], name: str) -> int | None:
    return None if (found := _number(raw, name)) is None else int(found)


def _number(raw: Mapping[str, Any], name: str) -> float | None:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if 0 <= value < _MAX_NUMBER else None
