"""The viewer of a page: who it is, and what it may do."""

from dataclasses import dataclass

from starlette.requests import Request

from ...access.policy import Role


class Forbidden(Exception):
    """A viewer lacks a role. The text says which, and on what."""


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who sends a request.

    Attributes:
        name: For the audit log and the page; empty: anonymous.
        token: The viewer's own token, for requests to brokers, which enforce its roles, too; None: the console's own
            credentials are used.
        csrf: The token that forms send back.
        can_change: Whether an anonymous viewer may change everything.
    """

    name: str = ""
    token: str | None = None
    csrf: str = ""
    can_change: bool = True

    def allows(self, role: Role, topic: str = "", channel: str = "") -> bool:
        """Whether the viewer has a role on a topic or channel; without a topic, on all topics."""
        return self.can_change or role == "read"

    def sees(self, topic: str) -> bool:
        """Whether the viewer may know that a topic exists."""
        return True


def viewer_of(request: Request) -> Viewer:
    """Return the viewer of a request."""
    viewer = request.state.viewer
    assert isinstance(viewer, Viewer)
    return viewer


def require(request: Request, role: Role, topic: str = "", channel: str = "") -> Viewer:
    """Return the viewer if it has a role on a topic or channel; without a topic, on all. Raises Forbidden."""
    viewer = viewer_of(request)
    if not viewer.allows(role, topic, channel):
        where = (
            f"the channel {topic}/{channel}" if channel else f"the topic {topic}" if topic else "all topics"
        )
        raise Forbidden(f"This needs the role {role} on {where}.")
    return viewer
