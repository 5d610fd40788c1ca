"""Arguments and options of the commands about clusters."""

from __future__ import annotations

from collections.abc import Callable

import click
from click.shell_completion import CompletionItem

from ...broker.name_completion import ask_brokers
from ...framework import params
from ...framework.options import Decorator, option

yes_option = option("Options", "--yes", "-y", is_flag=True, help="Do not ask for confirmation.")


def timeout_option(text: str, default: str | None = None) -> Decorator:
    """`--timeout`, in milliseconds; None without a default: no limit."""
    return option("Options", "--timeout", type=params.positive_duration, default=default, help=text)


def member_argument(
    name: str, metavar: str, states: tuple[str, ...], *, required: bool, is_repeated: bool = False
) -> Decorator:
    """Return the argument for a member: its id, the first characters of it, or its address.

    Args:
        is_repeated: There may be several.

    The shell completes the ids of members in these states.
    """
    nargs = -1 if is_repeated else 1
    return click.argument(
        name, metavar=metavar, required=required, nargs=nargs, shell_complete=_complete(states)
    )


def _complete(
    states: tuple[str, ...],
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    def complete(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from trio_nsq.api import broker as api
        from trio_nsq.fleet.cluster import address_of

        found = {
            member["id"]: CompletionItem(member["id"], help=address_of(member["addresses"]))
            for cluster in ask_brokers(ctx, lambda client: client.ask(api.cluster()))
            for member in cluster["members"]
            if member["state"] in states and member["id"].startswith(incomplete)
        }
        return [found[each] for each in sorted(found)]

    return complete
