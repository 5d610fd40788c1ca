"""Variables of the environment that are written like ours, and are none: probably misspelled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import click

from .broker.address_options import HTTP_VARIABLE, LOOKUPD_VARIABLE, TCP_VARIABLE
from .broker.connection_options import VARIABLES
from .broker.name_completion import TIMEOUT_VARIABLE
from .framework.suggestions import did_you_mean

_PREFIX = "QCLI_"
_OF_MOST_COMMANDS = frozenset({TCP_VARIABLE, HTTP_VARIABLE, LOOKUPD_VARIABLE, TIMEOUT_VARIABLE, *VARIABLES})


def notices(names: Iterable[str], root: click.Command) -> list[str]:
    """A line for each of these variables that no command knows.

    Args:
        names: Of all variables there are.
        root: The command line; its commands are imported only if there are other variables than clients'.
    """
    ours = {name for name in names if name.startswith(_PREFIX)} - _OF_MOST_COMMANDS
    if not ours:
        return []
    known = {*_OF_MOST_COMMANDS, *_variables(click.Context(root))}
    return [
        f"Note: the variable {name} means nothing to qcli{did_you_mean(name, sorted(known))}."
        for name in sorted(ours - known)
    ]


def _variables(ctx: click.Context) -> Iterator[str]:
    """Those of a command, and of all below it."""
    for param in ctx.command.params:
        if isinstance(param.envvar, str):
            yield param.envvar
    if isinstance(ctx.command, click.Group):
        for name in ctx.command.list_commands(ctx):
            if command := ctx.command.get_command(ctx, name):
                yield from _variables(click.Context(command, parent=ctx))
