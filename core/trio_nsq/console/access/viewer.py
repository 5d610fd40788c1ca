"""The viewer of a page: who it is, and what it may do."""

from dataclasses import dataclass
from typing import Literal

from starlette.requests import HTTPConnection

from ...access.policy import Role
from .rights import EVERYTHING, Rights

ViewerSource = Literal["", "token", "proxy", "oidc"]


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
        rights: What the viewer may do.
        source: How the viewer was identified; empty: anonymous.
        has_session: Whether the viewer has logged in, and can log out.
        subject: The id at the OpenID Connect provider that has named the viewer; empty: none has.
    """

    name: str = ""
    token: str | None = None
    csrf: str = ""
    rights: Rights = EVERYTHING
    source: ViewerSource = ""
    has_session: bool = False
    subject: str = ""

    def allows(self, role: Role, topic: str = "", channel: str = "") -> bool:
        """Whether the viewer has a role on a topic or channel; without a topic, on all topics."""
        return self.rights.allows(role, topic, channel)

    def sees(self, topic: str) -> bool:
        """Whether the viewer may know that a topic exists."""
        return self.rights.sees(topic)


def may_send_to(viewer: Viewer, topic: str, channel: str = "") -> bool:
    """Whether a viewer may have messages of another topic put into a topic, or into a channel of it.

    Brokers check it, too, but not for viewers that use the console's own credentials.
    """
    return viewer.allows("publish", topic) or viewer.allows("manage", topic, channel)


def viewer_of(request: HTTPConnection) -> Viewer:
    viewer = request.state.viewer
    assert isinstance(viewer, Viewer)
    return viewer


def require(request: HTTPConnection, role: Role, topic: str = "", channel: str = "") -> Viewer:
    """Return the viewer if it has a role on a topic or channel; without a topic, on all. Raises Forbidden."""
    viewer = viewer_of(request)
    if not viewer.allows(role, topic, channel):
        where = (
            f"channel {channel} of topic {topic}" if channel else f"topic {topic}" if topic else "all topics"
        )
        raise Forbidden(f"This needs the role {role} on {where}.")
    return viewer
