"""Changes an auth file: adds tokens, removes and lists entries. The rest of the file stays, with its comments.

Entries are edited as text, from one `[[token]]` or `[[certificate]]` line to the next, because libraries that keep
comments reorder tables of both kinds that are mixed. Before a change is written, the new text is parsed: it must have
exactly the entries it should have, and the same `[anonymous]`.
"""

import os
import secrets
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..platform.edit_file import edit_file, read_text
from .auth_file import MAX_FILE_BYTES, NAME, AuthFileError, Kind, header_lines, parse_auth_file
from .patterns import ALL
from .policy import token_digest

TOKEN_PREFIX = "nsq_"
"""By this, people and secret scanners recognise a token."""

_TOKEN_BYTES = 32
_NEW_FILE = "# Tokens and certificates of clients. A running server reads this file at SIGHUP.\n"

_KINDS: tuple[Kind, ...] = ("token", "certificate")


@dataclass(frozen=True, slots=True)
class GrantText:
    """Roles on the topics and channels that match patterns, as in the file."""

    roles: tuple[str, ...]
    topics: tuple[str, ...] = (ALL,)
    channels: tuple[str, ...] = (ALL,)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of an auth file.

    Attributes:
        subject: The subject of a certificate; empty for a token.
        expires: None: never.
    """

    name: str
    kind: Kind
    subject: str
    grants: tuple[GrantText, ...]
    expires: datetime | None

    def has_expired(self, now: datetime) -> bool:
        """Whether the entry is no longer valid at this time."""
        return self.expires is not None and self.expires <= now


class NameTaken(AuthFileError):
    """The file has an entry with this name."""


class UnknownNames(AuthFileError):
    """The file has no entries with these names.

    Attributes:
        names: The names.
        known: The names that it has.
    """

    def __init__(self, names: Sequence[str], known: Sequence[str]) -> None:
        super().__init__(f"no entry has the name {', '.join(names)}")
        self.names = names
        self.known = known


def make_token() -> str:
    """Make a token of 256 random bits."""
    return TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)


# ---------------------------------------------------------------------- the text


def entries_of(text: str) -> list[Entry]:
    """Return the entries of a file, tokens before certificates. Raises ValueError: it is not valid."""
    parse_auth_file(text)
    data = tomllib.loads(text)
    return [_entry(kind, table) for kind in _KINDS for table in data.get(kind, [])]


def _entry(kind: Kind, table: dict[str, Any]) -> Entry:
    expires = table.get("expires")
    if expires is not None:
        expires = expires.astimezone(UTC) if expires.tzinfo else expires.replace(tzinfo=UTC)
    grants = tuple(
        GrantText(*(tuple(grant.get(key, [ALL])) for key in ("roles", "topics", "channels")))
        for grant in table.get("grants", [])
    )
    return Entry(table["name"], kind, table.get("subject", ""), grants, expires)


def add_token(text: str, name: str, token: str, grant: GrantText, expires: datetime | None = None) -> str:
    """Return the text of a file with one token more.

    Raises:
        NameTaken: An entry has this name.
        ValueError: The text, the name or the grant is not valid.
    """
    before = entries_of(text)
    if any(entry.name == name for entry in before):
        raise NameTaken(f"an entry has the name {name}")
    if not NAME.fullmatch(name):  # it is not quoted below
        raise ValueError("a name has 1 to 64 of the characters A-Z a-z 0-9 . _ @ -")
    lines = ["[[token]]", f'name = "{name}"', f'hash = "{token_digest(token.encode())}"']
    if expires is not None:
        expires = expires.astimezone(UTC).replace(microsecond=0)
        lines.append(f"expires = {expires:%Y-%m-%dT%H:%M:%SZ}")
    keys = [f"{key} = {_array(values)}" for key, values in _keys(grant) if values != (ALL,)]
    lines.append(f"grants = [{{ {', '.join(keys)} }}]")
    gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
    changed = text + gap + "\n".join(lines) + "\n"
    new = Entry(name, "token", "", (grant,), expires)
    tokens, certificates = ([entry for entry in before if entry.kind == kind] for kind in _KINDS)
    return _checked(text, changed, [*tokens, new, *certificates])


def remove_entries(text: str, names: Sequence[str]) -> str:
    """Return the text of a file without the entries with these names. Comments before an entry stay.

    Raises:
        UnknownNames: Some names have no entry.
        ValueError: The text is not valid, or has the entries in a form that this function does not know.
    """
    before = entries_of(text)
    known = [entry.name for entry in before]
    if unknown := [name for name in names if name not in known]:
        raise UnknownNames(unknown, known)
    lines = text.split("\n")
    headers = [*header_lines(text), (len(lines), "token")]
    order = {kind: iter([entry for entry in before if entry.kind == kind]) for kind in _KINDS}
    removed: set[int] = set()
    for (begin, kind), (end, _) in pairwise(headers):
        entry = next(order[kind], None) if kind != "anonymous" else None
        if entry is not None and entry.name in names:
            while lines[end - 1].strip()[:1] in ("", "#"):
                end -= 1  # blank lines and comments belong to the next entry
            if end < len(lines) and begin and not lines[begin - 1].strip() and not lines[end].strip():
                begin -= 1  # one of the blank lines around the entry
            removed.update(range(begin, end))
    changed = "\n".join(line for index, line in enumerate(lines) if index not in removed)
    return _checked(text, changed, [entry for entry in before if entry.name not in names])


def _checked(before: str, changed: str, entries: list[Entry]) -> str:
    """Return a changed text. Raises ValueError unless it has exactly these entries, and `[anonymous]` as before."""
    try:
        found = entries_of(changed)
    except ValueError as exc:
        raise ValueError(f"the change would make it invalid ({exc}): edit it by hand") from exc
    kept = tomllib.loads(changed).get("anonymous") == tomllib.loads(before).get("anonymous")
    if found != entries or not kept:
        raise ValueError("its entries are not written as [[token]] and [[certificate]]: edit it by hand")
    return changed


def _keys(grant: GrantText) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return (("roles", grant.roles), ("topics", grant.topics), ("channels", grant.channels))


def _array(values: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{value}"' for value in values) + "]"


# ---------------------------------------------------------------------- the file


def read_entries(path: Path) -> list[Entry]:
    """Return the entries of a file. Raises AuthFileError."""
    try:
        return entries_of(read_text(path, MAX_FILE_BYTES))
    except ValueError as exc:
        raise AuthFileError(f"the auth file {path} is not valid: {exc}") from exc
    except OSError as exc:
        raise AuthFileError(f"cannot read the auth file {path}: {exc.strerror}") from exc


def read_anonymous_topics(path: Path) -> list[str] | None:
    """Return the topics of `[anonymous]` in a file that `read_entries` has read; None: it has no such table."""
    table = tomllib.loads(read_text(path, MAX_FILE_BYTES)).get("anonymous")
    return None if table is None else list(table["topics"])


def edit_auth_file(
    path: Path, change: Callable[[str], str], *, replace: Callable[[Path, Path], None] = os.replace
) -> bool:
    """Change a file atomically: after a crash, it has the old or the new contents.

    Args:
        path: The file. A missing one is created, with mode 0600. See `edit_file`.
        change: Returns the new text for the old one.
        replace: Renames a file over another one; tests may fail here.

    Returns:
        Whether the file was created.

    Raises:
        AuthFileError: The file is not valid, cannot be written, or `change` raised this or ValueError.
    """
    try:
        return edit_file(path, lambda text: change(text or _NEW_FILE), MAX_FILE_BYTES, replace=replace)
    except ValueError as exc:
        raise AuthFileError(f"the auth file {path} is not valid: {exc}") from exc
    except OSError as exc:
        raise AuthFileError(f"cannot write the auth file {path}: {exc.strerror}") from exc
