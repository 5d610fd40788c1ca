"""The pages to log in and out."""

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ...access.access import Identified
from ...access.request_head import Refused, RequestHead
from ...access.viewer import viewer_of
from ...console import console_of
from ..forms import form
from ..page import Page, View
from ..rendering import local_path, path_of


async def login(request: Request) -> View | Response:
    """Show the form; or log in with the token that it has sent."""
    access = console_of(request).access
    fields = await form(request)
    next_path = local_path(fields.get("next") or request.query_params.get("next", ""))
    context = {"next": next_path, "error": "", "name": viewer_of(request).name}
    if request.method != "POST":
        return View("login.html", context)
    incoming: RequestHead = request.state.incoming
    try:
        cookie, lifetime_s = await access.log_in(incoming, fields.get("token", "").strip())
    except Refused as exc:
        return View("login.html", {**context, "error": exc.text}, exc.status)
    identified: Identified = request.state.identified
    access.log_out(incoming, identified)
    response = RedirectResponse(console_of(request).options.root.rstrip("/") + next_path, 303)
    response.headers.append("Set-Cookie", access.session_header(incoming, cookie, int(lifetime_s)))
    return response


async def logout(request: Request) -> Response:
    """End the session."""
    access = console_of(request).access
    incoming: RequestHead = request.state.incoming
    access.log_out(incoming, request.state.identified)
    response = RedirectResponse(path_of(request, "login"), 303)
    response.headers.append("Set-Cookie", access.session_header(incoming, "", 0))
    return response


PAGES = [
    Page("/login", "login", login, methods=("GET", "POST")),
    Page("/logout", "logout", logout, methods=("POST",)),
]
