"""What belongs to every action: the addresses for its command line, and its record."""

from starlette.requests import Request

from ..access.changes import note_change
from ..console import console_of
from ..upstream.client import Results, UpstreamError
from .commands import Fleet
from .report import Report


def fleet_of(request: Request) -> Fleet:
    """Return the addresses for command lines."""
    console = console_of(request)
    options = console.options
    return Fleet(options.nsqd_http_addresses, console.watcher.lookupds, options.lookupd_allowed_hosts)


def record_action(
    request: Request,
    action: str,
    report: Report,
    *,
    topic: str = "",
    channel: str = "",
    node: str = "",
    count: int | None = None,
) -> None:
    """Note an action for the audit log, and tell the endpoint of notifications about it.

    Args:
        action: nsqadmin's name, such as `delete_topic`.
        node: The broker, for actions on one.
        count: Messages that went.
    """
    errors = {address: UpstreamError(address, why) for address, why in report.failed.items()}
    results = Results(dict(report.done), errors)
    note_change(request, topic=topic, channel=channel, results=results, count=count)
    if report.done:
        console_of(request).notifier.notify(request, action, topic, channel, node)
