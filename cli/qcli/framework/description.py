"""Describes commands as JSON records, for scripts and agents: `qcli help --format json`."""

from collections.abc import Collection
from inspect import cleandoc
from typing import Any

import click

from .command import DocumentedCommand, subcommands
from .json_schema import record_types
from .options import OTHER_OPTIONS
from .params import CountOrWord


def describe(ctx: click.Context, read_only: Collection[str]) -> dict[str, Any]:
    """Return the record of a command, with the records of the commands below it.

    Args:
        ctx: The context of the command.
        read_only: The commands that change nothing, such as "channel list".
    """
    command = ctx.command
    assert isinstance(command, DocumentedCommand)
    record: dict[str, Any] = {
        "command": ctx.command_path,
        "summary": command.get_short_help_str(limit=200),
        "help": cleandoc(command.help or ""),
    }
    if isinstance(command, click.Group):
        return record | {"commands": [describe(below, read_only) for below, _ in subcommands(ctx)]}
    params = [param for param in command.get_params(ctx) if not getattr(param, "hidden", False)]
    return record | {
        "effect": "read" if ctx.command_path.partition(" ")[2] in read_only else "write",
        "usage": " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)]),
        "arguments": [_argument(ctx, param) for param in params if isinstance(param, click.Argument)],
        "options": [_option(ctx, param) for param in params if isinstance(param, click.Option)],
        "exit_codes": {str(code.value): meaning for code, meaning in command.exits.items()},
        "examples": [{"about": about, "line": line} for about, line in command.examples.items()],
        "schema_command": _schema_command(ctx) if record_types(command) else None,
    }


def _schema_command(ctx: click.Context) -> str:
    """Return the command that prints the JSON Schema of the records of a command."""
    program, _, names = ctx.command_path.partition(" ")
    return f"{program} help {names} --schema"


def _argument(ctx: click.Context, param: click.Argument) -> dict[str, Any]:
    return {
        "name": param.make_metavar(ctx),
        "required": param.required,
        "repeatable": param.nargs == -1,
    } | _type(param.type)


def _option(ctx: click.Context, param: click.Option) -> dict[str, Any]:
    extra = param.get_help_extra(ctx)
    environment = [param.envvar] if isinstance(param.envvar, str) else list(param.envvar or ())
    is_flag = param.is_flag or param.count
    return {
        "names": [*param.opts, *param.secondary_opts],
        "value": None if is_flag else param.make_metavar(ctx),
        "required": param.required,
        "repeatable": param.multiple or param.count,
        "default": extra.get("default"),
        "environment": environment,
        "section": getattr(param, "section", OTHER_OPTIONS),
        "help": param.help or "",
    } | ({"type": "flag"} if is_flag else _type(param.type))


def _type(kind: click.ParamType[Any]) -> dict[str, Any]:
    """Return the type of a value: what is not one of click's own types is text, whose form the metavar names."""
    if isinstance(kind, click.Choice) and not isinstance(kind, CountOrWord):
        return {"type": "choice", "choices": [str(choice) for choice in kind.choices]}
    if isinstance(kind, click.IntRange | click.FloatRange):
        limits = {"minimum": kind.min, "maximum": kind.max}
        return {"type": "integer" if isinstance(kind, click.IntRange) else "number"} | limits
    if isinstance(kind, click.Path | click.File):
        return {"type": "path"}
    return {"type": "boolean" if isinstance(kind, type(click.BOOL)) else "text"}
