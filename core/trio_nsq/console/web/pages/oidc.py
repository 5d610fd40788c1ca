"""The pages of a login with an OpenID Connect provider: to the provider, and back."""

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ...access.identified import Identified
from ...access.request_head import Refused, RequestHead
from ...console import console_of
from ...oidc.login import OIDCLogins
from ...oidc.options import BEGIN, CALLBACK
from ..page import NotFound, Page, View
from ..refusals import continue_at
from ..rendering import local_path
from .login import login_view


async def begin(request: Request) -> View | Response:
    """Send the browser to the provider."""
    oidc, access = _provider(request), console_of(request).access
    incoming: RequestHead = request.state.incoming
    next_path = local_path(request.query_params.get("next", ""))
    try:
        url, cookie = await access.begin_with_provider(oidc, incoming, next_path)
    except Refused as exc:
        return login_view(request, next_path, exc)
    response = RedirectResponse(url, 303)
    response.headers.append("Set-Cookie", cookie)
    return response


async def finish(request: Request) -> View | Response:
    """Begin the session of the user that the provider has sent back."""
    oidc, access = _provider(request), console_of(request).access
    incoming: RequestHead = request.state.incoming
    identified: Identified = request.state.identified
    try:
        next_path, cookies = await access.finish_with_provider(oidc, incoming, request.query_params)
    except Refused as exc:
        return login_view(request, "/", exc)
    access.log_out(incoming, identified)
    response = continue_at(access.base_path.rstrip("/") + next_path)
    for cookie in cookies:
        response.headers.append("Set-Cookie", cookie)
    return response


def _provider(request: Request) -> OIDCLogins:
    """Return the logins with a provider. Raises NotFound: there is none."""
    oidc = console_of(request).access.oidc
    if oidc is None:
        raise NotFound("This console has no OpenID Connect provider (--oidc-issuer).")
    return oidc


PAGES = [Page(BEGIN, "oidc_login", begin), Page(CALLBACK, "oidc_callback", finish)]
