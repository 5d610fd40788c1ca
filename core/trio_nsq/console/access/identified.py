"""The viewer of a request, and how it was identified."""

from dataclasses import dataclass

from .sessions import Session
from .viewer import Viewer


@dataclass(frozen=True, slots=True)
class Identified:
    """The viewer of a request.

    Attributes:
        session: The viewer's session; None without one.
        visitor: The id of a viewer without a session, whose forms need a token all the same; empty for a program.
        is_new_visitor: Whether the browser does not have its cookie yet.
        token: With which the viewer was identified; empty without one.
    """

    viewer: Viewer
    session: Session | None = None
    visitor: str = ""
    is_new_visitor: bool = False
    token: str = ""

    @property
    def has_own_token(self) -> bool:
        """Whether the request itself has a valid token, in its Authorization header."""
        return bool(self.token) and self.session is None
