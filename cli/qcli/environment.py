"""Variables of the environment that are written like ours, and are none: probably misspelled."""

from __future__ import annotations

from collections.abc import Iterable

import click

from .broker.address_options import HTTP_VARIABLE, LOOKUPD_VARIABLE, TCP_VARIABLE
from .broker.connection_options import VARIABLES
from .broker.name_completion import TIMEOUT_VARIABLE
from .framework.command import contexts_below
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
    params = [param for ctx in contexts_below(click.Context(root)) for param in ctx.command.params]
    known = {*_OF_MOST_COMMANDS, *(param.envvar for param in params if isinstance(param.envvar, str))}
    return [
        f"Note: the variable {name} means nothing to qcli{did_you_mean(name, sorted(known))}."
        for name in sorted(ours - known)
    ]
