"""The auth file: tokens and certificates, with their grants; and what clients without credentials see.

[[token]]
name = "web"
hash = "sha256:..."             # of the token; `qcli token create` makes both
expires = 2027-01-01T00:00:00Z  # optional
grants = [
    { roles = ["publish"], topics = ["clicks", "orders-*"] },
    { roles = ["consume"], topics = ["orders-*"], channels = ["billing"] },
]

[[certificate]]
name = "backup"
subject = "CN=backup,O=Example"  # RFC 4514, as `openssl x509 -subject -nameopt RFC2253` prints it
grants = [{ roles = ["read"] }]

[anonymous]                      # clients without credentials
topics = ["clicks"]              # of which they may request statistics
"""

import math
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from ..protocol import NSQError
from .patterns import ALL, compile_glob
from .policy import ROLES, Grant, Identity, Policy, Role, is_everywhere

MAX_FILE_BYTES = 16 * 1024 * 1024
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}", re.ASCII)
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_HEADER = re.compile(
    r"""[ \t]*(?:\[\[[ \t]*(["']?)(token|certificate)\1[ \t]*\]\]|\[[ \t]*(["']?)(anonymous)\3[ \t]*\])[ \t]*(?:#.*)?"""
)

Kind = Literal["token", "certificate"]


class AuthFileError(NSQError):
    """The auth file cannot be used. The text names the file, the line or entry, and the reason."""


def header_lines(text: str) -> list[tuple[int, Kind | Literal["anonymous"]]]:
    """Return the lines that look like the beginning of a table, as index and kind. Text in quotes may look so, too."""
    found = ((index, _HEADER.fullmatch(line)) for index, line in enumerate(text.split("\n")))
    return [
        (index, cast(Kind | Literal["anonymous"], match[2] or match[4])) for index, match in found if match
    ]


def read_auth_file(path: Path) -> Policy:
    """Read an auth file. Raises AuthFileError."""
    try:
        with path.open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & stat.S_IWOTH:
                raise AuthFileError(
                    f"the auth file {path} may be written by every user of this machine, so anyone could add a token: "
                    "chmod o-w"
                )
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as exc:
        hint = "; 'qcli token create' creates it" if isinstance(exc, FileNotFoundError) else ""
        raise AuthFileError(f"cannot read the auth file {path}: {exc.strerror}{hint}") from exc
    try:
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"longer than {MAX_FILE_BYTES} bytes")
        return parse_auth_file(data.decode())
    except (ValueError, RecursionError) as exc:  # tomllib's and Unicode errors are ValueErrors
        raise AuthFileError(f"the auth file {path} is not valid: {exc}") from exc


def parse_auth_file(text: str) -> Policy:
    """Parse the contents of an auth file. Raises ValueError, with the reason."""
    data = tomllib.loads(text)
    _refuse_unknown(data, {"token", "certificate", "anonymous"}, "the file")
    tokens: dict[str, Identity] = {}
    certificates: dict[str, Identity] = {}
    names: set[str] = set()
    for kind, entries in (("token", tokens), ("certificate", certificates)):
        for number, entry in enumerate(_list_of_tables(data, kind, "the file"), 1):
            try:
                _add(entry, "token" if kind == "token" else "certificate", number, entries, names)
            except ValueError as exc:
                lines = [index + 1 for index, header in header_lines(text) if header == kind]
                if len(lines) != len(data[kind]):  # the entries are not written as [[...]], or not only
                    raise
                raise ValueError(f"line {lines[number - 1]}: {exc}") from None
    return Policy(tokens, certificates, _anonymous(data))


def _anonymous(data: Mapping[str, Any]) -> Identity | None:
    """Return the identity of clients without credentials: it has no role, and sees topics."""
    table, where = data.get("anonymous"), "anonymous"
    if table is None:
        return None
    if not isinstance(table, dict):
        raise ValueError("the file: anonymous is not a table")
    _refuse_unknown(table, {"topics"}, where)
    topics = _texts(table, "topics", (), where)
    if not topics:
        raise ValueError('anonymous needs topics, such as ["clicks", "orders-*"]')
    try:
        seen = Grant(frozenset(), tuple(map(compile_glob, topics)), (compile_glob(ALL),))
    except ValueError as exc:
        raise ValueError(f"{where}: {exc}") from None
    return Identity("anonymous", "anonymous", (seen,))


def _add(
    entry: Mapping[str, Any],
    kind: Kind,
    number: int,
    entries: dict[str, Identity],
    names: set[str],
) -> None:
    name, key_name = entry.get("name"), "hash" if kind == "token" else "subject"
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"[[{kind}]] number {number} needs a name of 1 to 64 of the characters A-Z a-z 0-9 . _ @ -"
        )
    where = f"{kind} {name}"
    if name in names:
        raise ValueError(f"{where}: another entry has this name")
    names.add(name)
    _refuse_unknown(entry, {"name", key_name, "expires", "grants"}, where)
    key = entry.get(key_name)
    if not isinstance(key, str) or not key:
        raise ValueError(f"{where} needs a {key_name}")
    if kind == "token" and not _HASH.fullmatch(key):
        raise ValueError(f"{where}: its hash is not sha256: and 64 hexadecimal digits")
    if key in entries:
        raise ValueError(f"{where}: {entries[key].name} has the same {key_name}")
    grants = tuple(_grant(grant, where) for grant in _list_of_tables(entry, "grants", where))
    entries[key] = Identity(name, kind, grants, _expiry(entry, where), key)


def _grant(grant: Mapping[str, Any], where: str) -> Grant:
    _refuse_unknown(grant, {"roles", "topics", "channels"}, f"{where}: a grant")
    roles = _texts(grant, "roles", (), where)
    unknown = next((role for role in roles if role not in ROLES), None)
    if unknown is not None or not roles:
        problem = f"unknown role {unknown!r}" if roles else "a grant needs roles"
        raise ValueError(f"{where}: {problem}; the roles are {', '.join(ROLES)}")
    topics = _texts(grant, "topics", (ALL,), where)
    channels = _texts(grant, "channels", (ALL,), where)
    try:
        return Grant(
            cast(frozenset[Role], frozenset(roles)),
            tuple(map(compile_glob, topics)),
            tuple(map(compile_glob, channels)),
            is_everywhere(topics, channels),
            ALL in channels,
        )
    except ValueError as exc:
        raise ValueError(f"{where}: {exc}") from None


def _expiry(entry: Mapping[str, Any], where: str) -> float:
    """Return when an entry expires, Unix seconds. A date and time without an offset is UTC."""
    expires = entry.get("expires")
    if expires is None:
        return math.inf
    if not isinstance(expires, datetime):
        raise ValueError(f"{where}: expires is not a date and time such as 2027-01-01T00:00:00Z")
    return (expires if expires.tzinfo else expires.replace(tzinfo=UTC)).timestamp()


def _texts(table: Mapping[str, Any], key: str, default: tuple[str, ...], where: str) -> tuple[str, ...]:
    values = table.get(key, list(default))
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{where}: {key} is not a list of strings")
    return tuple(values)


def _list_of_tables(table: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    values = table.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ValueError(f"{where}: {key} is not a list of tables")
    return values


def _refuse_unknown(table: Mapping[str, Any], known: set[str], where: str) -> None:
    # A misspelt key must not weaken a restriction: "channel" instead of "channels" would allow all channels.
    if unknown := sorted(table.keys() - known):
        raise ValueError(f"{where} has the unknown key {unknown[0]}")
