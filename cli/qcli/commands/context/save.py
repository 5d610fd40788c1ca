"""`qcli context save`: creates or changes a context."""

import os
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ...broker.address_options import BROKER, MAY_BE_SEVERAL
from ...contexts.choice import CONTEXT_VARIABLE, address_variable, complete_context
from ...contexts.context import ADDRESSES, COLORS, KEYS, SECRETS, ContextError, checked_context, option_of
from ...contexts.store import CURRENT, TABLE, Contexts, change_contexts, is_name, read_contexts
from ...framework.command import DocumentedCommand
from ...framework.options import Decorator, all_of, option, several
from ...framework.output import print_diagnostic
from ...framework.params import or_nothing

_CONNECTION = "TLS, AUTH and compression"
_FILE = click.Path(exists=True, dir_okay=False)
_SECRET = "Secret, by reference"


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


def _saved(section: str, key: str, text: str, metavar: str = "TEXT") -> Decorator:
    """Return the option that saves a key; an empty value removes the key."""
    known, flag = KEYS[key], option_of(key)
    if known.type is bool:
        return option(section, f"{flag}/--no-{flag.removeprefix('--')}", key, default=None, help=text)
    check = _file if known.is_path else or_nothing(known.check)
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
    _saved("Options", "title_color", f"Label of the web console: {', '.join(COLORS)}.", "COLOR"),
    _saved("Options", "description", "What the context is, for 'qcli context list'."),
)


@click.command(
    "save",
    cls=DocumentedCommand,
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
        report_use(name)
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


def report_use(name: str) -> None:
    """Say what a command would use from now on."""
    context = read_contexts().get(name)
    assert context is not None
    print_diagnostic(f"context {name} is used from now on: {', '.join(context.addresses)}")
    if (other := os.environ.get(CONTEXT_VARIABLE)) and other != name:
        print_diagnostic(f"Note: {CONTEXT_VARIABLE}={other} overrides this.")
    elif variable := address_variable():
        print_diagnostic(f"Note: the variable {variable} is set, so the context is used with --context only.")
