"""`qcli context`: named sets of addresses and connection options."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ...broker.address_options import BROKER, MAY_BE_SEVERAL, http_addresses, lookupd_addresses, tcp_addresses
from ...broker.connection_options import tcp_connection, values_of_command
from ...contexts.choice import (
    CONTEXT_VARIABLE,
    address_variable,
    chosen_context,
    complete_context,
    name_context,
    note_of_unused_context,
    origin_of,
)
from ...contexts.context import ADDRESSES, KEYS, SECRETS, Context, ContextError, checked_context, option_of
from ...contexts.store import CURRENT, TABLE, Contexts, change_contexts, is_name, read_contexts
from ...framework.command import DocumentedGroup
from ...framework.errors import ExitCode, Failure
from ...framework.options import (
    CONNECTION_OPTIONS,
    Decorator,
    GroupedOption,
    all_of,
    option,
    output_format,
    several,
)
from ...framework.output import json_lines, plain_table, print_diagnostic, write

_CONNECTION = "TLS, AUTH and compression"
_FILE = click.Path(exists=True, dir_okay=False)
_SECRET = "Secret, by reference"


@click.group(
    "context",
    cls=DocumentedGroup,
    short_help="Save addresses and connection options under a name.",
    synonyms={
        **dict.fromkeys(("add", "create", "new", "set", "update", "edit"), "save"),
        **dict.fromkeys(("select", "switch", "set-context", "use-context"), "use"),
        **dict.fromkeys(("unset", "unselect", "unuse"), "use --none"),
        **dict.fromkeys(("current", "info", "get", "inspect", "view"), "show"),
    },
    examples={
        "save the addresses of a cluster": "qcli context save prod --lookupd-http-address lookup:4161 "
        "--tls-root-ca-file ca.pem --auth-secret-file prod.token",
        "use it for one command": "qcli --context prod stat",
        "use it for all commands from now on": "qcli context use prod",
        "see what a command would use, and from where": "qcli context show",
    },
    details={
        "Precedence": "An option that is typed overrides a variable, and a variable overrides the context. The context "
        "is the one of --context, else of QCLI_CONTEXT, else of 'qcli context use'. If --context is typed, no "
        "variables are read for addresses and connection options; --context '' uses no context.",
        "One cluster": "A context describes one cluster, so its addresses are used together: the default addresses do "
        "not join them. If an address is typed, or set by a variable, it names another cluster: then the context is "
        "not used, and its secret is not sent there. With --context NAME and a typed address, the TLS options and "
        "the secret of the context are used with that address.",
        "File": "$XDG_CONFIG_HOME/qcli/contexts.toml, by default ~/.config/qcli/contexts.toml: TOML that you may edit, "
        "and whose comments stay. Only you can read it. current is the context of 'qcli context use'. A context is a "
        "table [context.NAME], whose keys are the options of 'qcli context save' with underscores. Relative paths "
        "begin at the file's folder.",
        "Secrets": "The file has no secret. auth_secret_file is read, auth_secret_command is run and "
        "auth_secret_keyring is looked up each time a command connects. The command is run without a shell; its secret "
        "is the first line of its output. It has no standard input, and 60 seconds. auth_secret_keyring needs the "
        "Python package keyring (the extra 'keyring').",
        "Environment": "QCLI_CONTEXT names the context to use. XDG_CONFIG_HOME is the folder of configuration files.",
    },
)
def command() -> None:
    """Save addresses and connection options under a name, and use them in commands.

    A context describes one cluster: brokers, discovery services, TLS, and where the secret is. It is for the commands
    that connect to brokers, not for 'qcli serve' and 'qcli lookupd'.
    """


def _name(text: str) -> str:
    if not is_name(text):
        raise click.BadParameter(f"{text!r} is not a name: 1 to 64 of the characters . _ @ - a-z A-Z 0-9.")
    return text


def _file(text: str) -> str:
    """Return the absolute path of a file that exists; an empty text stays."""
    if not text:
        return text
    if text == "-":
        raise click.BadParameter("a context cannot read standard input: name a file.")
    _FILE(text)
    return os.path.abspath(text)  # noqa: PTH100 (removes `..`, and keeps symbolic links)


def _or_nothing(check: Callable[[str], str]) -> Callable[[str], str]:
    return lambda text: check(text) if text else text


def _saved(section: str, key: str, text: str, metavar: str = "TEXT") -> Decorator:
    """Return the option that saves a key; an empty value removes the key."""
    known, flag = KEYS[key], option_of(key)
    if known.type is bool:
        return option(section, f"{flag}/--no-{flag.removeprefix('--')}", key, default=None, help=text)
    check = _file if known.is_path else _or_nothing(known.check)
    if known.type is list:
        return several(section, flag, key, type=check, metavar=metavar, help=f"{text} {MAY_BE_SEVERAL}")
    return option(section, flag, key, type=check, metavar=metavar, help=text)


def _refuse_secret(_ctx: click.Context, _param: click.Parameter, text: str | None) -> None:
    if text is not None:
        raise click.UsageError(
            "A context holds no secret. Write it to a file that only you can read and save the file's name with "
            "--auth-secret-file FILE, or save where it is: --auth-secret-command, --auth-secret-keyring."
        )


_SAVED = all_of(
    _saved(BROKER, "nsqd_tcp_address", "TCP addresses of brokers.", "HOST:PORT"),
    _saved(BROKER, "nsqd_http_address", "HTTP addresses of brokers.", "[https://]HOST:PORT|PATH"),
    _saved(BROKER, "lookupd_http_address", "HTTP addresses of nsqlookupd.", "[https://]HOST:PORT"),
    _saved(BROKER, "lookupd_allowed_host", "Use only brokers with these host names: *.example.com.", "HOST"),
    _saved(_CONNECTION, "tls", "Encrypt TCP connections."),
    _saved(_CONNECTION, "tls_root_ca_file", "Trust the CAs in this PEM file.", "FILE"),
    _saved(_CONNECTION, "tls_cert", "Send the client certificate in this PEM file.", "FILE"),
    _saved(_CONNECTION, "tls_key", "Read the certificate's key from this PEM file.", "FILE"),
    _saved(_CONNECTION, "tls_insecure_skip_verify", "Skip certificate verification."),
    _saved(_CONNECTION, "snappy", "Compress TCP connections with snappy."),
    _saved(_CONNECTION, "deflate", "Compress TCP connections with deflate."),
    _saved(_SECRET, "auth_secret_file", "The first line of this file.", "FILE"),
    _saved(_SECRET, "auth_secret_command", "The first line that this command prints.", "COMMAND"),
    _saved(_SECRET, "auth_secret_keyring", "An entry of the keyring of Python.", "SERVICE/USER"),
    option(
        _SECRET,
        "--auth-secret",
        metavar="TEXT",
        hidden=True,
        expose_value=False,
        callback=_refuse_secret,
        help="Refused.",
    ),
    _saved("Options", "description", "What the context is, for 'qcli context list'."),
)


@command.command(
    "save",
    examples={
        "save the addresses of a broker": "qcli context save local --nsqd-tcp-address 127.0.0.1:4150 "
        "--nsqd-http-address 127.0.0.1:4151",
        "save a cluster with TLS, and a secret from a password manager": "qcli context save prod "
        "--lookupd-http-address https://lookup:4161 --tls-root-ca-file ca.pem --auth-secret-command 'pass show prod'",
        "remove an option from a context": "qcli context save prod --tls-root-ca-file ''",
    },
)
@click.argument("name", metavar="NAME", type=_name, shell_complete=complete_context)
@_SAVED
@option("Options", "--use", is_flag=True, help="Use the context from now on, as 'qcli context use' does.")
@click.pass_context
def save(ctx: click.Context, /, name: str, use: bool, **values: Any) -> None:
    """Create a context, or change the given options of a context.

    Variables are not saved. An empty value removes an option. The secret itself is not saved, only where it is.
    """
    from ...contexts.toml_edit import set_keys

    changes = {
        key: _value_to_save(values[key])
        for key in KEYS
        if ctx.get_parameter_source(key) is ParameterSource.COMMANDLINE
    }
    secrets = [key for key in SECRETS if changes.get(key)]
    if len(secrets) > 1:
        raise click.UsageError(f"{option_of(secrets[0])} and {option_of(secrets[1])} exclude each other.")
    if secrets:
        changes = dict.fromkeys(SECRETS) | changes
    if not changes:
        raise click.UsageError(f"Nothing to save: give an address, such as {option_of(ADDRESSES[1])}.")
    existed = False

    def change(contexts: Contexts, text: str) -> str:
        nonlocal existed
        existed = name in contexts.tables
        text = set_keys(text, (TABLE, name), changes)
        _check(name, text, contexts.path.parent)
        return set_keys(text, (), {CURRENT: name}) if use else text

    path = change_contexts(change)
    print_diagnostic(f"context {name} {'changed' if existed else 'saved'} in {path}")
    if use:
        _report_use(name)
    elif not existed:
        print_diagnostic(f"Use it with --context {name}, or from now on with 'qcli context use {name}'.")


def _value_to_save(value: Any) -> Any:
    """Return the value of an option for the file; None: it is empty, and the key is removed."""
    if isinstance(value, tuple):
        value = tuple(filter(None, value))
    return value if value or value is False else None


def _check(name: str, text: str, folder: Path) -> None:
    """Raises UsageError: the context of a changed text is not valid."""
    import tomllib

    try:
        checked_context(name, tomllib.loads(text)[TABLE][name], folder)
    except ContextError as error:
        raise click.UsageError(f"The context {name} was not saved: {error}.") from error


@command.command(
    "list",
    examples={
        "list all contexts": "qcli context list",
        "print their names": "qcli context list --format json | jq -r .name",
    },
    exits={ExitCode.FAILURE: "The file cannot be read, or a context is not valid."},
)
@output_format(
    "text: a line for each address; * marks the context of 'qcli context use'. json: an object per context: name, "
    "current, and its keys as in the file.",
    "text",
    "json",
)
def list_contexts(form: str) -> None:
    """List the contexts."""
    contexts = read_contexts()
    valid: list[Context] = []
    failures: list[Failure] = []
    for name in contexts.tables:
        try:
            valid += filter(None, [contexts.get(name)])
        except Failure as error:
            failures.append(error)
    if form == "json":
        write(json_lines({"name": c.name, "current": c.name == contexts.current, **c.values} for c in valid))
    elif valid:
        head = ("", "name", "addresses", "secret", "description")
        rows = [row for c in valid for row in _rows(c, c.name == contexts.current)]
        write(plain_table([head, *rows], len(head)))
    for failure in failures[:-1]:
        print_diagnostic(f"Error: {failure.message}")
    if failures:
        raise failures[-1]


def _rows(context: Context, is_current: bool) -> Iterator[tuple[str, ...]]:
    """Yield a row for each address, the first one with all that is known about the context."""
    secret = context.secret[0].removeprefix("auth_secret_") if context.secret else ""
    first, *others = context.addresses
    yield ("*" if is_current else "", context.name, first, secret, context.values.get("description", ""))
    for address in others:
        yield ("", "", address, "", "")


@command.command(
    "use",
    examples={
        "use a context from now on": "qcli context use prod",
        "use no context from now on": "qcli context use --none",
    },
)
@click.argument("name", metavar="NAME", required=False, shell_complete=complete_context)
@option("Options", "--none", is_flag=True, help="Use no context.")
def use_context(name: str | None, none: bool) -> None:
    """Use a context from now on, in all shells.

    --context and QCLI_CONTEXT override it.
    """
    from ...contexts.toml_edit import set_keys

    if (name is None) != none:
        raise click.UsageError("Name the context to use, or give --none.")

    def change(contexts: Contexts, text: str) -> str:
        if name is not None and contexts.get(name) is None:
            raise Failure(contexts.unknown(name))
        return set_keys(text, (), {CURRENT: name})

    if none and not read_contexts().path.exists():
        print_diagnostic("no context is used")
        return
    change_contexts(change)
    if name is None:
        print_diagnostic("no context is used from now on")
    else:
        _report_use(name)


def _report_use(name: str) -> None:
    """Say what a command would use from now on."""
    context = read_contexts().get(name)
    assert context is not None
    print_diagnostic(f"context {name} is used from now on: {', '.join(context.addresses)}")
    if (other := os.environ.get(CONTEXT_VARIABLE)) and other != name:
        print_diagnostic(f"Note: {CONTEXT_VARIABLE}={other} overrides this.")
    elif variable := address_variable():
        print_diagnostic(f"Note: the variable {variable} is set, so the context is used with --context only.")


@command.command("delete", examples={"delete two contexts": "qcli context delete test old"})
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=complete_context)
def delete(names: tuple[str, ...]) -> None:
    """Delete contexts. The files that they name stay."""
    from ...contexts.toml_edit import remove_table, set_keys

    was_current = False

    def change(contexts: Contexts, text: str) -> str:
        nonlocal was_current
        for name in names:
            if name not in contexts.tables:
                raise Failure(f"{contexts.unknown(name)} Nothing was deleted.")
        for name in dict.fromkeys(names):
            text = remove_table(text, (TABLE, name))
        was_current = contexts.current in names
        return set_keys(text, (), {CURRENT: None}) if was_current else text

    if not read_contexts().tables:  # not to be created
        raise Failure("There are no contexts. Nothing was deleted.")
    change_contexts(change)
    for name in dict.fromkeys(names):
        print_diagnostic(f"context {name} deleted")
    if was_current:
        print_diagnostic("No context is used from now on.")


@command.command(
    "show",
    examples={
        "show what a command would use": "qcli context show",
        "show a context": "qcli context show prod",
        "show what a command with this option would use": "qcli context show --nsqd-http-address other:4151",
    },
)
@click.argument(
    "name",
    metavar="[NAME]",
    required=False,
    is_eager=True,
    callback=name_context,
    expose_value=False,
    shell_complete=complete_context,
)
@tcp_addresses("As of other commands.")
@http_addresses("As of other commands.")
@lookupd_addresses("As of other commands.")
@tcp_connection
@output_format(
    "text: a table. json: an object: context, chosen_by, options (name, value, from).", "text", "json"
)
@click.pass_context
def show(ctx: click.Context, /, form: str, **_addresses: Any) -> None:
    """Show what a command would use, and from where.

    This has the addresses and connection options that are typed, in variables, or in the context. A secret is not
    shown, and not read. With NAME, the result is that of --context NAME.
    """
    chosen = chosen_context(ctx)
    name, by = (chosen.context.name, chosen.origin) if chosen else (None, None)
    rows = list(_used_options(ctx))
    if form == "json":
        options = [{"name": flag, "value": value, "from": origin} for flag, value, origin in rows]
        write(json.dumps({"context": name, "chosen_by": by, "options": options}, ensure_ascii=False) + "\n")
        return
    write(f"context: {f'{name} ({by})' if name else 'none'}\n\n")
    table = [
        (flag if index == 0 else "", text, origin if index == 0 else "")
        for flag, value, origin in rows
        for index, text in enumerate(_shown(value))
    ]
    write(plain_table([("option", "value", "from"), *table], 3))
    if note := note_of_unused_context(ctx):
        print_diagnostic(note)


def _shown(value: Any) -> tuple[str, ...]:
    """Return the lines that show a value."""
    if isinstance(value, tuple):
        return value
    return (str(value).lower() if isinstance(value, bool) else str(value),)


def _used_options(ctx: click.Context) -> Iterator[tuple[str, Any, str]]:
    """Yield option, value and origin of all that a command would use."""
    values = ctx.params | values_of_command(ctx)
    options = [
        param
        for param in ctx.command.params
        if isinstance(param, GroupedOption)
        and param.section in (BROKER, CONNECTION_OPTIONS)
        and param.name in values
    ]
    sources = {param.name: ctx.get_parameter_source(param.name) for param in options if param.name}
    has_address = any(
        values[param.name] and sources[param.name] is not ParameterSource.DEFAULT
        for param in options
        if param.section == BROKER
    )
    for param in options:
        value, source = values[param.name], sources[param.name]
        is_default = source is ParameterSource.DEFAULT
        if value in (None, (), "") or (is_default and (param.section != BROKER or has_address)):
            continue
        shown = "(not shown)" if param.name == "auth_secret" else value
        yield param.opts[0], shown, origin_of(ctx, param)
    chosen = chosen_context(ctx)
    typed_secret = values.get("auth_secret") or values.get("auth_secret_file")
    if chosen and chosen.context.secret and not typed_secret:
        key, value = chosen.context.secret
        yield option_of(key), value, f"context {chosen.context.name}"
