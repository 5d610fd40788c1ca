"""What a guard decides about a request, before its body is read."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from .messages import Request, Response
from .routing import Route


@dataclass(frozen=True, slots=True)
class Allow:
    """The request may go on.

    Attributes:
        max_body_bytes: The longest body, if it is shorter than that of the route.
    """

    max_body_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Deny:
    """The request is refused."""

    response: Response


@dataclass(frozen=True, slots=True)
class NeedsLookup:
    """Other servers have to be asked who the client is: `RequestGuard.look_up` decides."""


ALLOW = Allow()
NEEDS_LOOKUP = NeedsLookup()
Decision: TypeAlias = Allow | Deny | NeedsLookup


class RequestGuard(Protocol):
    """Decides which requests of a connection may go on. For each request, `route` is None if it has none."""

    def check(self, request: Request, route: Route | None) -> Decision:
        """Decide about a request whose body has not arrived, and note who its client is."""

    async def look_up(self, request: Request, route: Route | None) -> Allow | Deny:
        """As `check`, which needed a lookup. The body may have arrived."""

    def is_current(self, request: Request, route: Route) -> bool:
        """Whether a request with an `identity` that was allowed may be executed now, and renew its `identity`.

        It may have waited for its body, or for the answers to earlier requests, while its token was revoked.
        """

    def refuse_late(self, request: Request, route: Route) -> Response:
        """Refuse a request that is not current any more."""

    def check_again(self, request: Request, route: Route) -> None:
        """Check a request before a further piece of its answer is sent. Raises CutOff or
        EndOfAnswer: its client may not send it any more."""
