"""The pages to log in and out."""

from contextlib import suppress

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ...access.identified import Identified
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
    incoming: RequestHead = request.state.incoming
    if request.method != "POST":
        return login_view(request, next_path)
    try:
        cookie, lifetime_s = await access.log_in(incoming, fields.get("token", "").strip())
    except Refused as exc:
        return login_view(request, next_path, exc)
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
    # Not to the provider at once: a form must not lead to another site (the content policy), and a user may want to
    # stay logged in there.
    ended = {"ended": "provider"} if viewer_of(request).source == "oidc" else None
    response = RedirectResponse(path_of(request, "login", ended), 303)
    response.headers.append("Set-Cookie", access.session_header(incoming, "", 0))
    return response


def login_view(request: Request, next_path: str, refused: Refused | None = None) -> View:
    """Return the page to log in.

    Args:
        next_path: The page that is shown after the login, below the base path.
        refused: Why the last login failed.
    """
    access = console_of(request).access
    logout_url = ""
    if access.oidc is not None and request.query_params.get("ended") == "provider":
        with suppress(Refused):  # then there is no way back
            logout_url = access.oidc.logout_url(access.url_of(request.state.incoming, "/login"))
    context = {
        "next": next_path,
        "error": "" if refused is None else refused.text,
        "name": viewer_of(request).name,
        "takes_tokens": access.takes_tokens,
        "provider": "" if access.oidc is None else access.oidc.name,
        "logout_url": logout_url,
    }
    return View("login.html", context, 200 if refused is None else refused.status)


PAGES = [
    Page("/login", "login", login, methods=("GET", "POST")),
    Page("/logout", "logout", logout, methods=("POST",)),
]
