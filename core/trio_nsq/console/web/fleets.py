"""Several fleets on one listener: each has pages, viewers and rights of its own, below a path of its own."""

from collections.abc import Sequence

from ...http.decisions import Allow, Decision, Deny
from ...http.messages import Request, Response
from ...http.routing import Route, Router
from ..access.guard import ViewerGuard
from ..options import FLEETS, ConsoleOptions
from .site import Site


class FleetSites(Router):
    """Passes each request to the site of its fleet. The first page of all leads to the first fleet.

    Args:
        sites: One for each fleet, with its options. The order decides which one is first.
    """

    other_version = Site.other_version

    def __init__(self, sites: Sequence[tuple[ConsoleOptions, Site]]) -> None:
        first, self._first = sites[0]
        self._prefix = f"{first.base_path.rstrip('/')}/{FLEETS}/"
        self._sites = {options.fleet: site for options, site in sites}
        super().__init__(self._first.routes)

    def site_of(self, path: str) -> Site:
        """Return the site that answers requests for a path; outside of all fleets, the first one."""
        fleet = path.removeprefix(self._prefix).split("/")[0] if path.startswith(self._prefix) else ""
        return self._sites.get(fleet, self._first)

    def resolve(self, method: str, path: str, query: str = "") -> Route | Response:
        return self.site_of(path).resolve(method, path, query)

    def guard(self, port: int, scheme: str) -> "FleetGuard":
        return FleetGuard(self, {site: site.guard(port, scheme) for site in self._sites.values()})


class FleetGuard:
    """Has the guard of its fleet check each request of a connection. A `RequestGuard`."""

    def __init__(self, sites: FleetSites, guards: dict[Site, ViewerGuard]) -> None:
        self._sites = sites
        self._guards = guards

    def check(self, request: Request, route: Route | None) -> Decision:
        return self._of(request).check(request, route)

    async def look_up(self, request: Request, route: Route | None) -> Allow | Deny:
        return await self._of(request).look_up(request, route)

    def is_current(self, request: Request, route: Route) -> bool:
        return self._of(request).is_current(request, route)

    def refuse_late(self, request: Request, route: Route) -> Response:
        return self._of(request).refuse_late(request, route)

    def check_again(self, request: Request, route: Route) -> None:
        self._of(request).check_again(request, route)

    def _of(self, request: Request) -> ViewerGuard:
        return self._guards[self._sites.site_of(request.path)]
