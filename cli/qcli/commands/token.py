"""`qcli token`: creates, lists and revokes the tokens in an auth file."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from ..broker.brokers import Brokers, broker_http_options
from ..framework.command import DocumentedGroup, did_you_mean
from ..framework.errors import ExitCode, Failure, OutputClosed
from ..framework.options import Decorator, all_of, option, output_format, several
from ..framework.output import json_lines, plain_table, print_diagnostic, write
from ..framework.params import long_duration, parsed
from ..records.brokers import TokenGrant, TokenRecord

if TYPE_CHECKING:
    from trio_nsq.access.auth_file_editor import Entry

_ALL = "all"
_OF_SERVER = ("admin", "replicate")
"""The roles that are for the whole server."""
AUTH_FILE_VARIABLE = "QCLI_AUTH_FILE"
_ANONYMOUS = "[anonymous]"
"""Stands for clients without credentials in lists; no name in an auth file has brackets."""
_NS_PER_S = 1_000_000_000
_MS_PER_S = 1000


class Role(click.ParamType[str]):
    """A role, or `all`."""

    name = "role"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from trio_nsq.access.policy import ROLES

        if value not in (*ROLES, _ALL):
            hint = did_you_mean(str(value), (*ROLES, _ALL))
            self.fail(f"{value!r} is not a role{hint}: {', '.join(ROLES)} or {_ALL}.", param, ctx)
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from trio_nsq.access.policy import ROLES

        return [CompletionItem(role) for role in (*ROLES, _ALL) if role.startswith(incomplete)]


def _pattern(text: str) -> str:
    from trio_nsq.access.patterns import compile_glob

    parsed(compile_glob, text)
    return text


def _name(text: str) -> str:
    from trio_nsq.access.auth_file import NAME

    if not NAME.fullmatch(text):
        raise click.BadParameter(f"{text!r} is not a name: 1 to 64 of the characters . _ @ - a-z A-Z 0-9.")
    return text


def _expiry(text: str) -> datetime:
    """Parse a time in the future: a duration from now such as `30d`, or a time, local without a zone."""
    now = datetime.fromtimestamp(int(time.time()), UTC)
    try:
        expires = datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        try:
            expires = datetime.fromtimestamp(now.timestamp() + long_duration(text) / _MS_PER_S, UTC)
        except (click.BadParameter, ValueError, OverflowError, OSError):
            raise click.BadParameter(
                f"{text!r} is neither a duration such as 30d or 12h, nor a time such as 2027-01-31 or "
                "2027-01-31T12:00Z."
            ) from None
    if expires <= now:
        raise click.BadParameter(f"{text!r} is not in the future.")
    return expires


def _complete_name(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from trio_nsq.access.auth_file import AuthFileError
    from trio_nsq.access.auth_file_editor import read_entries

    file = ctx.params.get("auth_file") or os.environ.get(AUTH_FILE_VARIABLE)
    try:
        entries = read_entries(Path(file)) if file else []
    except AuthFileError:
        entries = []  # an error must not disturb the prompt
    return [CompletionItem(entry.name) for entry in entries if entry.name.startswith(incomplete)]


_AUTH_FILE = option(
    "Which file",
    "--auth-file",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar=AUTH_FILE_VARIABLE,
    required=True,
    metavar="FILE",
    help="The auth file of the broker or discovery service.",
)


def _reload_options(text: str) -> Decorator:
    return all_of(option("Options", "--reload", is_flag=True, help=text), broker_http_options)


@click.group(
    "token",
    cls=DocumentedGroup,
    short_help="Create, list and revoke tokens.",
    examples={
        "let a web application publish": "qcli token create web --role publish --topic clicks --auth-file auth.toml > "
        "web.token",
        "run a broker that requires tokens": "qcli serve --data-path ./data --auth-file auth.toml",
        "use the token": "qcli pub clicks --auth-secret-file web.token < clicks.txt",
        "revoke it": "qcli token revoke web --auth-file auth.toml",
    },
    exits={ExitCode.PARTIAL: "The file was changed, but a broker could not read it again (--reload)."},
    details={
        "Roles": "publish; consume (subscribe to channels); read (messages without consuming them, statistics, "
        "settings); manage (create, delete, pause, empty, seek, settings, dead letters); admin (configuration and "
        "debugging of a server); register (topics with a discovery service, for brokers); replicate (a broker, for the "
        "members of its cluster); unmask (fields that a web console masks). No role includes another. "
        "docs/how-to/secure-a-broker.md has examples.",
        "Auth file": "TOML. These commands keep its comments, order, mode and owner. It has hashes of the tokens, not "
        "the tokens. A running server reads it again at SIGHUP, or by PUT /config/auth_file.",
        "Environment": "QCLI_AUTH_FILE sets --auth-file, as for 'qcli serve'.",
    },
)
def command() -> None:
    """Create, list and revoke the tokens in an auth file.

    A server with --auth-file requires a token of its clients, and allows what the token's roles allow. A token is shown
    once, when it is created.
    """


@command.command(
    "create",
    examples={
        "let a web application publish to some topics": "qcli token create web --role publish --topic clicks --topic "
        "'orders-*' --auth-file auth.toml > web.token",
        "let a service consume one channel, for 90 days": "qcli token create billing --role consume --topic orders "
        "--channel billing --expires 90d --auth-file auth.toml > billing.token",
        "let Prometheus read the metrics": "qcli token create prometheus --role read --auth-file auth.toml > "
        "prometheus.token",
        "let an administrator do everything": "qcli token create alice --role all --auth-file auth.toml > alice.token",
    },
    exits={
        ExitCode.FAILURE: "No token was created: the name is taken, or the file is not valid or cannot be written.",
        ExitCode.PARTIAL: "The token was created, but a broker could not read the file again (--reload).",
    },
)
@click.argument("name", metavar="NAME", type=_name)
@_AUTH_FILE
@several(
    "What it allows",
    "--role",
    "roles",
    type=Role(),
    required=True,
    metavar="ROLE",
    help="publish, consume, read, manage, admin, register, replicate, unmask, or all. Several: with commas, or repeat "
    "the option.",
)
@several(
    "What it allows",
    "--topic",
    "topics",
    type=_pattern,
    metavar="PATTERN",
    help="Only these topics; * stands for any characters. By default all topics.",
)
@several(
    "What it allows",
    "--channel",
    "channels",
    type=_pattern,
    metavar="PATTERN",
    help="Only these channels. By default all channels.",
)
@option(
    "What it allows",
    "--expires",
    type=_expiry,
    metavar="DURATION|TIME",
    help="Valid for this long, such as 30d, or until this time, such as 2027-01-31. By default for ever.",
)
@_reload_options("Have the broker read the file again.")
def create(
    name: str,
    auth_file: Path,
    roles: tuple[str, ...],
    topics: tuple[str, ...],
    channels: tuple[str, ...],
    expires: datetime | None,
    reload: bool,
    brokers: Brokers,
) -> None:
    """Create a token and print it.

    Standard output has only the token. It is not stored, and cannot be shown again. A missing file is created.
    """
    from trio_nsq.access.auth_file_editor import (
        GrantText,
        NameTaken,
        add_token,
        edit_auth_file,
        make_token,
        remove_entries,
    )
    from trio_nsq.access.policy import ROLES

    chosen = ROLES if _ALL in roles else roles
    of_server = next((role for role in _OF_SERVER if role in chosen), None)
    for flag, patterns in (("--topic", topics), ("--channel", channels)):
        if of_server is not None and patterns:
            raise click.UsageError(
                f"The role {of_server} is for the whole server, so {flag} would disable it. Name the other roles, or "
                f"leave {flag} out."
            )
    token = make_token()
    grant = GrantText(tuple(chosen), topics or ("*",), channels or ("*",))
    try:
        created = edit_auth_file(auth_file, lambda text: add_token(text, name, token, grant, expires))
    except NameTaken as error:
        raise Failure(
            f"{auth_file} has an entry {name} already. Choose another name, or revoke it: "
            f"qcli token revoke {name} --auth-file {auth_file}"
        ) from error
    try:
        write(f"{token}\n")
    except (Failure, OutputClosed) as error:  # the token is lost
        edit_auth_file(auth_file, lambda text: remove_entries(text, [name]))
        raise Failure("No token was created: standard output cannot be written.") from error
    if created:
        print_diagnostic(
            f"{auth_file} created: only this user can read it. The server needs to read it, too."
        )
    where = f" on topics {', '.join(topics)}" if topics else ""
    where += f" on channels {', '.join(channels)}" if channels else ""
    until = f" until {expires:%Y-%m-%d %H:%M:%S} UTC" if expires is not None else ""
    print_diagnostic(f"token {name} created: {', '.join(chosen)}{where}{until}")
    _tell_servers(reload, brokers)


@command.command(
    "list",
    examples={
        "list all tokens and certificates": "qcli token list --auth-file auth.toml",
        "list the names of expired ones": "qcli token list --auth-file auth.toml --format json | jq -r "
        "'select(.expired) | .name'",
    },
)
@_AUTH_FILE
@output_format(
    "text: a line for each grant. json: an object per entry: name, kind, subject (of a certificate), grants (roles, "
    "topics, channels), expires, expired.",
    "text",
    "json",
    records=[TokenRecord],
)
def list_entries(auth_file: Path, form: str) -> None:
    """List tokens and certificates, with what they allow; and [anonymous], what clients without one may see."""
    from trio_nsq.access.auth_file_editor import read_anonymous_topics, read_entries

    entries, now = read_entries(auth_file), datetime.now(UTC)
    records = [_record(entry, now) for entry in entries]
    rows = [row for entry in entries for row in _rows(entry, now)]
    if (topics := read_anonymous_topics(auth_file)) is not None:
        grants: list[TokenGrant] = [{"roles": [], "topics": topics, "channels": ["*"]}]
        records.append(
            {"name": _ANONYMOUS, "kind": "anonymous", "grants": grants, "expires": None, "expired": False}
        )
        rows.append((_ANONYMOUS, "anonymous", "", " ".join(topics), "*", "never"))
    if form == "json":
        write(json_lines(records))
    elif rows:
        head = ("name", "kind", "roles", "topics", "channels", "expires")
        write(plain_table([head, *rows], len(head)))


def _record(entry: Entry, now: datetime) -> TokenRecord:
    record: TokenRecord = {
        "name": entry.name,
        "kind": entry.kind,
        "grants": [
            {"roles": [*each.roles], "topics": [*each.topics], "channels": [*each.channels]}
            for each in entry.grants
        ],
        "expires": f"{entry.expires:%Y-%m-%dT%H:%M:%SZ}" if entry.expires else None,
        "expired": entry.has_expired(now),
    }
    if entry.subject:
        record["subject"] = entry.subject
    return record


def _rows(entry: Entry, now: datetime) -> list[tuple[str, ...]]:
    expires = f"{entry.expires:%Y-%m-%d %H:%M:%S}" if entry.expires else "never"
    if entry.has_expired(now):
        expires += " EXPIRED"
    grants = [(" ".join(g.roles), " ".join(g.topics), " ".join(g.channels)) for g in entry.grants]
    return [(entry.name, entry.kind, *grant, expires) for grant in grants or [("", "", "")]]


@command.command(
    "revoke",
    examples={
        "revoke two tokens": "qcli token revoke web billing --auth-file auth.toml",
        "revoke a token, and have the broker read the file again": "qcli token revoke web --auth-file auth.toml "
        "--reload",
    },
    exits={
        ExitCode.FAILURE: "Nothing was revoked: a name is unknown, or the file is not valid or cannot be written.",
        ExitCode.PARTIAL: "The entries were removed, but a broker could not read the file again (--reload).",
    },
)
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=_complete_name)
@_AUTH_FILE
@_reload_options("Have the broker read the file again, which closes the connections.")
def revoke(names: tuple[str, ...], auth_file: Path, reload: bool, brokers: Brokers) -> None:
    """Remove tokens or certificates from an auth file.

    When the server has read the file again, it closes the connections of revoked tokens.
    """
    from trio_nsq.access.auth_file_editor import UnknownNames, edit_auth_file, remove_entries

    if not auth_file.exists():  # not to be created
        raise Failure(f"The auth file {auth_file} does not exist.")
    try:
        edit_auth_file(auth_file, lambda text: remove_entries(text, names))
    except UnknownNames as error:
        hint = did_you_mean(error.names[0], error.known) if len(error.names) == 1 else ""
        raise Failure(
            f"{auth_file} has no entry {', '.join(error.names)}{hint}. Nothing was revoked."
        ) from error
    for name in dict.fromkeys(names):
        print_diagnostic(f"{name} revoked")
    _tell_servers(reload, brokers)


def _tell_servers(reload: bool, brokers: Brokers) -> None:
    """Have the brokers read the file again, or say what to do. Raises Failure."""
    if not reload:
        print_diagnostic("A running server reads the file at SIGHUP. A broker also with --reload.")
        return
    from trio_nsq.api import broker as api

    from ..broker.admin_client import AdminClient

    def read_again(address: str) -> bytes:
        broker = AdminClient(address)
        path = broker.ask(api.option("auth_file"))
        if not path:
            raise Failure(f"The broker at {address} has no --auth-file.")
        broker.ask(api.set_option("auth_file", path))
        return path

    def report(address: str, path: bytes) -> None:
        print_diagnostic(f"the broker at {address} has read {path.decode('utf-8', 'replace')} again")

    try:
        brokers.change(read_again, report)
    except Failure as error:
        text = f"The file was changed, but: {error.message} SIGHUP also makes the server read the file."
        raise Failure(text, ExitCode.PARTIAL) from error
