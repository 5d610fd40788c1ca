"""`/jobs`: the jobs that clients report. nsqd does not have it."""

import time
from dataclasses import asdict
from typing import Any

from ...access.policy import ROLES, Identity
from ...http.messages import HTTPError, Request, Response
from ...protocol.untrusted_json import decode_json
from ..server import Server
from ..state.reported_jobs import JobRefused, JobReport, ReportedJob

_NS_PER_S = 1_000_000_000


async def put_job(server: Server, request: Request) -> Response:
    """Take the report of a job. Any role on its topic is enough."""
    identity = request.identity
    try:
        report = JobReport.of(decode_json(request.body))
    except JobRefused as exc:
        raise HTTPError(exc.status, str(exc)) from exc
    except ValueError as exc:
        raise HTTPError(400, "INVALID_BODY: not valid JSON") from exc
    if not _may_see(identity, report.topic):
        where = f"topic {report.topic}" if report.topic else "all topics"
        raise HTTPError(403, f"FORBIDDEN: this needs a role on {where}")
    job_id, client = request.path.rpartition("/")[2], identity.name if identity is not None else ""
    try:
        server.reported_jobs.put(job_id, report, _now_s(server), client)
    except JobRefused as exc:
        raise HTTPError(exc.status, str(exc)) from exc
    return Response.empty()


async def list_jobs(server: Server, request: Request) -> Response:
    """Return the jobs on topics that the client may know of, those with the newest report first."""
    now_s, unix_s = _now_s(server), time.time()
    jobs = [
        _shown(job, now_s, unix_s)
        for job in server.reported_jobs.listed(now_s)
        if _may_see(request.identity, job.report.topic)
    ]
    return Response.json({"jobs": jobs})


def _shown(job: ReportedJob, now_s: float, unix_s: float) -> dict[str, Any]:
    state = "lost" if job.is_lost(now_s) else job.report.state
    reported_at = round(unix_s - (now_s - job.reported_s), 3)
    about = {"id": job.job_id} | asdict(job.report)
    return about | {"state": state, "client": job.client, "reported_at": reported_at}


def _may_see(identity: Identity | None, topic: str) -> bool:
    if identity is None:
        return True
    return identity.sees(topic) if topic else any(identity.allows_everywhere(role) for role in ROLES)


def _now_s(server: Server) -> float:
    return server.clock.now_ns() / _NS_PER_S
