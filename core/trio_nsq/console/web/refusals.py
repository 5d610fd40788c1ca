"""Answers to requests that are refused before they reach a page."""

from collections.abc import Callable, Iterable
from html import escape
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from ..access.cookies import session_cookie
from ..access.request_head import Refused, RequestHead
from .rendering import path_of

_TITLES = {401: "Log in", 403: "Not allowed", 413: "Too large", 429: "Too many logins", 503: "Not now"}

Error = Callable[[Request, int, str, Iterable[str]], Response]


def refusal(request: Request, refused: Refused, error: Error) -> Response:
    """Return the answer to a refused request: JSON for a program, the login, or a page with the reason.

    Args:
        error: Renders a page with a status, a title and texts.
    """
    incoming: RequestHead = request.state.incoming
    if incoming.is_api:
        headers = {"WWW-Authenticate": 'Bearer realm="trio-nsq"'} if refused.status == 401 else None
        return JSONResponse({"message": f"{refused.code}: {refused.text}"}, refused.status, headers)
    if refused.status == 401 and incoming.is_safe and "authorization" not in incoming.headers:
        if incoming.path == "/live":
            return Response(refused.text, refused.status, media_type="text/plain")
        if _comes_from_elsewhere(incoming):
            return _again(request)
        here = incoming.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(path_of(request, "login", {"next": here} if here != "/" else None), 303)
    return error(request, refused.status, _TITLES.get(refused.status, "Error"), [refused.text])


def _comes_from_elsewhere(incoming: RequestHead) -> bool:
    """Whether a link on a page of another site was followed: the browser then sends no strict cookie."""
    headers = incoming.headers
    return (
        headers.get("sec-fetch-site") in ("cross-site", "same-site")
        and headers.get("sec-fetch-mode") == "navigate"
        and session_cookie(incoming) not in incoming.cookies
    )


def _again(request: Request) -> Response:
    """Return a page that makes the browser ask again, from a page of this origin, so that it sends the session."""
    path = "/" + request.url.path.lstrip("/")  # two slashes would name another host
    return continue_at(quote(path) + (f"?{request.url.query}" if request.url.query else ""))


def continue_at(target: str) -> HTMLResponse:
    """Return a page that makes the browser open a path of this origin.

    After a redirection from another site, the browser would not send the strict cookie of the session there.
    """
    where = escape(target)
    return HTMLResponse(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={where}">'
        f'<title>qcli admin</title><p><a href="{where}">Continue</a></p></html>'
    )
