"""`qcli context`: named sets of addresses and connection options."""

from collections.abc import Iterator

import click

from ...contexts.choice import complete_context
from ...contexts.context import Context
from ...contexts.store import CURRENT, TABLE, Contexts, change_contexts, read_contexts
from ...framework.command import DocumentedGroup
from ...framework.errors import ExitCode, Failure
from ...framework.options import option, output_format
from ...framework.output import json_lines, plain_table, print_diagnostic, report_none, write
from ...records.brokers import ContextRecord
from .save import report_use, save
from .show import show


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
        "Secrets": "The file has no secret. A command that connects reads auth_secret_file, runs "
        "auth_secret_command, or looks auth_secret_keyring up, once. The command is run without a shell; its secret "
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
    records=[ContextRecord],
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
    elif not failures:
        report_none("contexts", hint="'qcli context save NAME' and the options of a command save one.")
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
            raise contexts.unknown(name)
        return set_keys(text, (), {CURRENT: name})

    if none and not read_contexts().path.exists():
        print_diagnostic("no context is used")
        return
    change_contexts(change)
    if name is None:
        print_diagnostic("no context is used from now on")
    else:
        report_use(name)


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
                raise contexts.unknown(name, "Nothing was deleted.")
        for name in dict.fromkeys(names):
            text = remove_table(text, (TABLE, name))
        was_current = contexts.current in names
        return set_keys(text, (), {CURRENT: None}) if was_current else text

    if not (contexts := read_contexts()).tables:  # the file is not to be created
        raise contexts.unknown(names[0], "Nothing was deleted.")
    change_contexts(change)
    for name in dict.fromkeys(names):
        print_diagnostic(f"context {name} deleted")
    if was_current:
        print_diagnostic("No context is used from now on.")


for _command in (save, show):
    command.add_command(_command)
