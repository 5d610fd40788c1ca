"""The jobs of all programs, as the brokers list them: replays, exports, drains, connectors."""

from dataclasses import asdict, fields
from functools import partial
from itertools import chain

from starlette.requests import Request

from ...access.viewer import viewer_of
from ...console import console_of, snapshot_of
from ...fleet.jobs import Job, ask_jobs, merge_jobs
from ...record_files import gaps
from ..page import Page, Table, View

_COLUMNS = (*(field.name for field in fields(Job)), "broker", "gap")
"""The last two are of brokers that do not answer."""


async def jobs(request: Request) -> View:
    """All jobs on topics that the viewer sees; a job on all topics needs a role on all topics."""
    viewer, console = viewer_of(request), console_of(request)
    snapshot = snapshot_of(request)
    found = await console.shared.once("jobs", snapshot.version, partial(ask_jobs, console.upstream, snapshot))
    shown = [
        job
        for job in merge_jobs(found.values.values())
        if (viewer.sees(job.topic) if job.topic else viewer.allows("read") or viewer.allows("admin"))
    ]
    groups = (
        ("Running", [job for job in shown if job.is_running]),
        ("Ended in the last hour", [job for job in shown if not job.is_running]),
    )
    errors = snapshot.silent_brokers | {address: error.reason for address, error in found.errors.items()}
    has_brokers = not all(broker.is_nsqd for broker in snapshot.brokers.values())
    context = {"groups": groups, "errors": errors, "has_brokers": has_brokers}
    records = chain(map(asdict, shown), gaps(errors))
    return View("jobs.html", context, table=Table("jobs", _COLUMNS, records))


PAGES = [Page("/jobs", "jobs", jobs, live=True)]
