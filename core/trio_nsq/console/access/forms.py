"""Checks requests that change something: no page of another origin has sent them, and forms have their token."""

from ...http.web_pages import foreign_page
from .identified import Identified
from .proxies import Proxies
from .request_head import Refused, RequestHead
from .sessions import Sessions


class Forms:
    """Checks requests that change something."""

    def __init__(self, sessions: Sessions, proxies: Proxies) -> None:
        self._sessions = sessions
        self._proxies = proxies

    def check_page(self, incoming: RequestHead, identified: Identified) -> None:
        """Check that no page of another origin has sent a change. Raises Refused."""
        headers = incoming.headers
        if incoming.is_bearer and identified.has_own_token:
            return
        site = headers.get("sec-fetch-site")
        if site is not None:  # the browser compares the real names; a proxy may have changed the Host header
            foreign = site not in ("same-origin", "none")
        else:
            foreign = foreign_page({**headers, "host": self._proxies.host(incoming.host, headers)})
        if foreign:
            raise Refused(403, "NOT_FOR_WEB_PAGES", self._why_foreign(incoming))

    def _why_foreign(self, incoming: RequestHead) -> str:
        """Return what to do about a request that seems to come from a page of another origin."""
        text = "A page of another origin has sent this request."
        origin, host = incoming.headers.get("origin", ""), self._proxies.host(incoming.host, incoming.headers)
        if self._proxies.trusts(incoming.host) and origin and "sec-fetch-site" not in incoming.headers:
            text += (
                f" The browser asked for {origin[:100]}, and the request has the Host {host[:100]}. If a reverse proxy "
                "has changed the Host, let it pass the browser's on (nginx: proxy_set_header Host $http_host;), or "
                "send it as X-Forwarded-Host, and name it with --http-allowed-host."
            )
        return text

    def needs_form_token(self, incoming: RequestHead, identified: Identified) -> bool:
        """Whether a change needs the token of a form.

        That of a browser does. Programs send a token of their own, or use the API without cookies.
        """
        if identified.has_own_token:
            return bool(incoming.cookies) and not incoming.is_bearer
        return not (incoming.is_api and incoming.is_program)

    def check_form_token(self, identified: Identified, given: str) -> None:
        """Check the token of a form. Raises Refused."""
        id_ = identified.session.id if identified.session is not None else identified.visitor
        if not id_ or identified.is_new_visitor or not self._sessions.is_form_token(id_, given):
            raise Refused(
                403,
                "FORM_OUTDATED",
                "The form is not from this session: you have logged in or out since it was shown, or the browser "
                "sends no cookies. Go back, reload the page, and try again.",
            )
