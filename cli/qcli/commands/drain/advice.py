"""What the errors of a drain tell the user to do."""

import click
from click.core import ParameterSource

from ...broker.address_options import HTTP_OPTION
from ...contexts.choice import CONTEXT_OPTION, chosen_context


def stop_command(address: str) -> str:
    """Return the command that ends the drain mode of this broker, in quotes, for a user who typed this command."""
    ctx = click.get_current_context()
    chosen = chosen_context(ctx)
    words = ["qcli"]
    if chosen is not None and chosen.origin == CONTEXT_OPTION:
        words += [CONTEXT_OPTION, chosen.context.name]
    words += ["drain", "--stop"]
    if ctx.get_parameter_source("nsqd_http_address") is ParameterSource.COMMANDLINE:
        words += [HTTP_OPTION, address]
    return f"'{' '.join(words)}'"


def check_broker_is_named(address: str | None) -> None:
    """Raises UsageError: the context has no address of a broker."""
    if address:
        return
    ctx = click.get_current_context()
    chosen = chosen_context(ctx)
    assert chosen is not None, "without a context, there is a default"
    qcli = f"qcli {CONTEXT_OPTION} {chosen.context.name}"
    raise click.UsageError(
        f"This command is for one broker, and the context {chosen.context.name} names none. Name it: '{qcli} "
        f"{ctx.info_name} {HTTP_OPTION} HOST:PORT'. '{qcli} nodes' lists the brokers."
    )
