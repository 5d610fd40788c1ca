"""Favourite and hidden topics of a viewer. The viewer's browser keeps them, in two cookies of this fleet.

They need no account and no script, and the server can sort and page by them. They are no secret and give no rights, so
they are not signed; what is not valid in them is ignored.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from starlette.requests import Request

from ...access.patterns import Pattern, compile_glob
from ...protocol import is_valid_name
from ..access.cookies import cookie_header
from ..access.request_head import RequestHead
from ..console import console_of

MAX_CHARACTERS = 1900
"""Of each cookie. Browsers keep 4,096 with the name and attributes, and servers limit the head of a request."""
_SEPARATOR = ":"  # in no name, and allowed in a cookie
_YEAR_S = 365 * 24 * 60 * 60
_KINDS = ("favourites", "hidden")


class TooMany(ValueError):
    """The topics do not fit into a cookie. The text says which, and what to do."""


@dataclass(frozen=True, slots=True)
class Preferences:
    """Favourite and hidden topics.

    Attributes:
        favourites: Names. They come first in lists, and are never hidden.
        hidden: Names and patterns, in which `*` stands for any characters.
    """

    favourites: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()

    def with_favourite(self, topic: str, *, add: bool) -> "Preferences":
        return replace(self, favourites=_changed(self.favourites, topic, add))

    def with_hidden(self, pattern: str, *, add: bool) -> "Preferences":
        return replace(self, hidden=_changed(self.hidden, pattern, add))


def is_pattern(text: str) -> bool:
    """Whether a text is a name, or a pattern for names."""
    try:
        compile_glob(text)
    except ValueError:
        return False
    return True


def preferences_of(request: Request) -> Preferences:
    """Return the preferences that the browser has sent."""
    favourites, hidden = (request.cookies.get(_cookie(request, kind), "") for kind in _KINDS)
    return Preferences(_parsed(favourites, is_valid_name), _parsed(hidden, is_pattern))


def cookies_of(request: Request, preferences: Preferences) -> list[str]:
    """Return the headers that make the browser keep preferences. Raises TooMany."""
    access, incoming = console_of(request).access, _incoming(request)
    found = []
    for kind, names in zip(_KINDS, (preferences.favourites, preferences.hidden), strict=True):
        value = _SEPARATOR.join(names)
        if len(value) > MAX_CHARACTERS:
            raise TooMany(
                f"These {kind} topics have {len(value):,} characters, and a browser keeps {MAX_CHARACTERS:,}: remove "
                "some, or use a pattern such as test-*."
            )
        found.append(
            cookie_header(
                _cookie(request, kind),
                value,
                path=access.base_path,
                strict=False,
                secure=access.is_secure(incoming),
                max_age_s=_YEAR_S if value else 0,
            )
        )
    return found


def hides(patterns: Iterable[str], preferences: Preferences) -> Callable[[str], bool]:
    """Return what tells whether a topic is hidden.

    Args:
        patterns: Those of the console, for all viewers.
    """
    compiled: list[Pattern] = [compile_glob(each) for each in (*patterns, *preferences.hidden)]
    favourites = frozenset(preferences.favourites)

    def is_hidden(topic: str) -> bool:
        return topic not in favourites and any(each.fullmatch(topic) for each in compiled)

    return is_hidden


def _parsed(value: str, is_valid: Callable[[str], bool]) -> tuple[str, ...]:
    names = dict.fromkeys(value[:MAX_CHARACTERS].split(_SEPARATOR))
    return tuple(name for name in names if is_valid(name))


def _changed(names: tuple[str, ...], name: str, add: bool) -> tuple[str, ...]:
    return (*(each for each in names if each != name), *([name] if add else []))


def _incoming(request: Request) -> RequestHead:
    incoming: RequestHead = request.state.incoming
    return incoming


def _cookie(request: Request, kind: str) -> str:
    """Return the name of a cookie. It has the port, as that of a session."""
    return f"trio_nsq_{kind}_{_incoming(request).port}"
