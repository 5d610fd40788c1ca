"""What a client may do, as JSON: the answer of `GET /access`, and the identity that its reader rebuilds."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, cast

from .patterns import ALL, ALL_REGEX, Pattern, compile_glob, compile_regex
from .policy import ROLES, Grant, Identity, Role, Source

MAX_PATTERNS = 1000
"""In one description: each name is compared with all of them, and a broken server could send very many."""

_EVERYTHING = {"roles": list(ROLES), "topics": [ALL], "channels": [ALL]}
_MAX_TIME_S = 2.0**53
_SOURCES: tuple[Source, ...] = ("token", "certificate", "auth server")


class Description(NamedTuple):
    """What a server says about a client.

    Attributes:
        identity: The client; None if the server has no authentication, so that every client may do everything.
        read_only: The server refuses HTTP requests that change something.
    """

    identity: Identity | None
    read_only: bool = False


def describe(identity: Identity | None, *, read_only: bool) -> dict[str, Any]:
    """Return the description of a client; None: the server has no authentication."""
    if identity is None:
        about: dict[str, Any] = {"authentication": False, "name": "", "source": None, "expires_at": None}
        return about | {"read_only": read_only, "pattern_type": "glob", "grants": [_EVERYTHING]}
    return {
        "authentication": True,
        "name": identity.name,
        "source": identity.source,
        "expires_at": identity.expires_at_s if identity.expires_at_s < math.inf else None,
        "read_only": read_only,
        "pattern_type": "regex" if identity.source == "auth server" else "glob",
        "grants": [
            {
                "roles": [role for role in ROLES if role in grant.roles],
                "topics": [pattern.pattern for pattern in grant.topics],
                "channels": [pattern.pattern for pattern in grant.channels],
            }
            for grant in identity.grants
        ],
    }


def parse_description(value: Any) -> Description:
    """Parse the description of a client.

    Roles that this version does not know are left out. Without the package google-re2, a regular expression that is
    neither `.*` nor a plain name matches nothing.

    Raises:
        ValueError: The value is no description.
    """
    about = _object(value, "the answer")
    read_only = about.get("read_only") is True
    authentication = about.get("authentication")
    if authentication is False:
        return Description(None, read_only)
    if authentication is not True:
        raise ValueError("authentication is not true or false")
    name, source, expires_at_s = about.get("name"), about.get("source"), about.get("expires_at")
    if not isinstance(name, str) or source not in _SOURCES:
        raise ValueError("the name or the source is not valid")
    if expires_at_s is None:
        expires_at_s = math.inf
    elif isinstance(expires_at_s, bool) or not isinstance(expires_at_s, int | float):
        raise ValueError("expires_at is not a number")
    elif not abs(expires_at_s) < _MAX_TIME_S:
        raise ValueError("expires_at is not a time")
    pattern_type = about.get("pattern_type")
    if pattern_type not in ("glob", "regex"):
        raise ValueError("unknown pattern_type")
    grants = _grants(about.get("grants"), pattern_type)
    return Description(Identity(name, cast(Source, source), grants, float(expires_at_s)), read_only)


def _grants(value: Any, pattern_type: Literal["glob", "regex"]) -> tuple[Grant, ...]:
    lines = [_object(line, "a grant") for line in _list(value, "grants")]
    if sum(len(_list(line.get(key), key)) for line in lines for key in ("topics", "channels")) > MAX_PATTERNS:
        raise ValueError(f"more than {MAX_PATTERNS} patterns")
    return tuple(_grant(line, pattern_type) for line in lines)


def _grant(line: Mapping[str, Any], pattern_type: Literal["glob", "regex"]) -> Grant:
    compiled: Callable[[str], Pattern] = compile_glob if pattern_type == "glob" else _regex
    every = ALL if pattern_type == "glob" else ALL_REGEX
    roles, topics, channels = (_texts(line, key) for key in ("roles", "topics", "channels"))
    return Grant(
        cast(frozenset[Role], frozenset(roles).intersection(ROLES)),
        tuple(map(compiled, topics)),
        tuple(map(compiled, channels)),
        everywhere=every in topics and every in channels,
        every_channel=every in channels,
    )


class _Nothing:
    """A pattern that cannot be evaluated here. It matches nothing: less is shown, and nothing more is allowed."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def fullmatch(self, text: str, /) -> None:
        return None


def _regex(text: str) -> Pattern:
    try:
        return compile_regex(text)
    except ModuleNotFoundError:
        if text == ALL_REGEX:
            return compile_glob(ALL)
        plain = text.replace("_", "").replace("-", "").isalnum()
        return compile_glob(text) if plain else _Nothing(text)


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} is not a list")
    return value


def _texts(line: Mapping[str, Any], key: str) -> list[str]:
    values = _list(line.get(key), key)
    if not all(isinstance(each, str) for each in values):
        raise ValueError(f"{key} has something that is not a string")
    return values
