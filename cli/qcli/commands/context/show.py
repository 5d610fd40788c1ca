"""`qcli context show`: what a command would use, and from where."""

import json
from collections.abc import Iterator
from typing import Any

import click
from click.core import ParameterSource

from ...broker.address_options import BROKER, http_addresses, lookupd_addresses, tcp_addresses
from ...broker.connection_options import tcp_connection, values_of_command
from ...contexts.choice import (
    chosen_context,
    complete_context,
    name_context,
    note_of_unused_context,
)
from ...contexts.context import option_of
from ...framework.command import DocumentedCommand
from ...framework.options import CONNECTION_OPTIONS, GroupedOption, output_format
from ...framework.output import plain_table, print_diagnostic, write
from ...records.brokers import UsedContextRecord


@click.command(
    "show",
    cls=DocumentedCommand,
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
    "text: a table. json: an object: context, chosen_by, options (name, value, from).",
    "text",
    "json",
    records=[UsedContextRecord],
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
        yield param.opts[0], shown, param.origin(ctx)
    chosen = chosen_context(ctx)
    typed_secret = values.get("auth_secret") or values.get("auth_secret_file")
    if chosen and chosen.context.secret and not typed_secret:
        key, value = chosen.context.secret
        yield option_of(key), value, f"context {chosen.context.name}"
