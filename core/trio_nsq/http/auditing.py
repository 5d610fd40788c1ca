"""Records HTTP requests in the audit log: the refused ones, and those that manage topics or administer the server."""

from dataclasses import replace
from functools import partial

from ..access.audit import AuditLog, Event
from ..protocol.address import without_secrets
from .messages import HTTPError, Request, Response
from .routing import Handler, Route

_AUDITED_ROLES = ("manage", "admin")
_PARAMETERS = ("topic", "channel", "node", "member", "to")
"""The parameters of a request that are recorded. `to` is where something goes: an address, a position, a member."""


def audited(route: Route, audit: AuditLog) -> Route:
    """Return a route whose requests are recorded with their results, if it needs the role manage or admin."""
    if not audit.enabled or route.rule is None or route.rule.role not in _AUDITED_ROLES:
        return route
    return replace(route, handler=partial(_answer, audit, route.handler))


async def _answer(audit: AuditLog, handler: Handler, request: Request) -> Response:
    status, code = 500, "INTERNAL_ERROR"
    try:
        response = await handler(request)
        status, code = response.status, ""
        return response
    except HTTPError as exc:
        status, code = exc.status, exc.code
        raise
    except BaseException as exc:
        if not isinstance(exc, Exception):  # a cancellation, in a group if it comes from a nursery
            status, code = 503, "CANCELLED"  # the server stops, or the client has disconnected
        raise
    finally:
        _record(audit, "action", request, status, code)


def record_refusal(
    audit: AuditLog, request: Request, error: HTTPError, subject: str, *, is_login: bool
) -> None:
    """Record a request that the guard refuses.

    Args:
        subject: The subject of the client's verified certificate; empty without one.
        is_login: The client has sent a token, which is not valid.
    """
    _record(audit, "login_failed" if is_login else "refused", request, error.status, error.code, subject)


def record_action(audit: AuditLog, request: Request, status: int) -> None:
    """Record an answered request, besides those that `audited` records."""
    _record(audit, "action", request, status, "")


def record_closing(audit: AuditLog, request: Request, subject: str) -> None:
    """Record that the answer to a request is cut off, because the client may not send it any more."""
    _record(audit, "closed", request, None, "", subject)


def _record(
    audit: AuditLog, event: Event, request: Request, status: int | None, code: str, subject: str = ""
) -> None:
    if not audit.enabled:
        return
    # The body and other parameters may have secrets, so they are left out.
    about = {name: without_secrets(request.query[name]) for name in _PARAMETERS if name in request.query}
    audit.record(
        event,
        request.peer,
        request.identity,
        subject=subject,
        action=f"{request.method} {request.path}",
        status=status,
        error=code.partition(":")[0],
        **about,
    )
