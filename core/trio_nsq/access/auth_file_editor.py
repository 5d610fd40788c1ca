"""Changes an auth file: adds tokens, removes and lists entries. The rest of the file stays, with its comments.

Entries are edited as text, from one `[[token]]` or `[[certificate]]` line to the next, because libraries that keep
comments reorder tables of both kinds that are mixed. Before a change is written, the new text is parsed: it must have
exactly the entries it should have.
"""

import fcntl
import os
import secrets
import stat
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from .auth_file import MAX_FILE_BYTES, NAME, AuthFileError, header_lines, parse_auth_file
from .patterns import ALL
from .policy import token_digest

TOKEN_PREFIX = "nsq_"
"""By this, people and secret scanners recognise a token."""

_TOKEN_BYTES = 32
_NEW_FILE = "# Tokens and certificates of clients. A running server reads this file at SIGHUP.\n"
_MODE = 0o600

Kind = Literal["token", "certificate"]
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
    return _checked(changed, [*tokens, new, *certificates])


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
        entry = next(order[kind], None)
        if entry is not None and entry.name in names:
            while lines[end - 1].strip()[:1] in ("", "#"):
                end -= 1  # blank lines and comments belong to the next entry
            if end < len(lines) and begin and not lines[begin - 1].strip() and not lines[end].strip():
                begin -= 1  # one of the blank lines around the entry
            removed.update(range(begin, end))
    changed = "\n".join(line for index, line in enumerate(lines) if index not in removed)
    return _checked(changed, [entry for entry in before if entry.name not in names])


def _checked(text: str, entries: list[Entry]) -> str:
    """Return a changed text. Raises ValueError unless it has exactly these entries."""
    try:
        found = entries_of(text)
    except ValueError as exc:
        raise ValueError(f"the change would make it invalid ({exc}): edit it by hand") from exc
    if found != entries:
        raise ValueError("its entries are not written as [[token]] and [[certificate]]: edit it by hand")
    return text


def _keys(grant: GrantText) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return (("roles", grant.roles), ("topics", grant.topics), ("channels", grant.channels))


def _array(values: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{value}"' for value in values) + "]"


# ---------------------------------------------------------------------- the file


def read_entries(path: Path) -> list[Entry]:
    """Return the entries of a file. Raises AuthFileError."""
    try:
        return entries_of(_read(path))
    except ValueError as exc:
        raise AuthFileError(f"the auth file {path} is not valid: {exc}") from exc
    except OSError as exc:
        raise AuthFileError(f"cannot read the auth file {path}: {exc.strerror}") from exc


def edit_auth_file(
    path: Path, change: Callable[[str], str], *, replace: Callable[[Path, Path], None] = os.replace
) -> bool:
    """Change a file atomically: after a crash, it has the old or the new contents.

    Writers wait for each other. Mode and owner stay, as far as the user may set them.

    Args:
        path: The file. A missing one is created, with mode 0600. A symbolic link stays.
        change: Returns the new text for the old one.
        replace: Renames a file over another one; tests may fail here.

    Returns:
        Whether the file was created.

    Raises:
        AuthFileError: The file is not valid, cannot be written, or `change` raised this or ValueError.
    """
    path = path.resolve()
    created = False
    try:
        fd, created = _lock(path)
        try:
            text = _read(path)
            changed = change(text or _NEW_FILE)
            _write(path, changed.encode(), os.fstat(fd), replace)
        except BaseException:
            if created:
                path.unlink()
            raise
        finally:
            os.close(fd)  # releases the lock
    except ValueError as exc:
        raise AuthFileError(f"the auth file {path} is not valid: {exc}") from exc
    except OSError as exc:
        raise AuthFileError(f"cannot write the auth file {path}: {exc.strerror}") from exc
    return created


def _lock(path: Path) -> tuple[int, bool]:
    """Open and lock a file. Returns its descriptor, and whether it was created."""
    created = False
    while True:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE))
                created = True
            continue
        fcntl.flock(fd, fcntl.LOCK_EX)
        # Meanwhile another writer may have replaced the file: then this is the lock of the old one.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd, created
        os.close(fd)


def _read(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"longer than {MAX_FILE_BYTES} bytes")
    return data.decode()


def _write(path: Path, data: bytes, old: os.stat_result, replace: Callable[[Path, Path], None]) -> None:
    temporary = path.with_name(f".{path.name}.new")  # the lock allows only one writer
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            _take_over(fd, old)
            file.flush()
            os.fsync(fd)
        replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _take_over(fd: int, old: os.stat_result) -> None:
    """Give a new file the owner, group and mode of the old one."""
    mode = stat.S_IMODE(old.st_mode)
    try:
        os.fchown(fd, -1, old.st_gid)
    except PermissionError:
        mode &= ~stat.S_IRWXG  # not for another group
    with suppress(PermissionError):  # only root may give files away
        os.fchown(fd, old.st_uid, -1)
    os.fchmod(fd, mode)
