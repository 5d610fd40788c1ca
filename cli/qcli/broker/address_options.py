"""Options for the addresses of brokers and discovery services."""

from typing import Any

import click

from trio_nsq.protocol.address import format_address, host_of, is_loopback

from ..framework import params
from ..framework.options import Decorator, all_of, option, several
from ..framework.output import print_diagnostic

TCP_OPTION = "--nsqd-tcp-address"
HTTP_OPTION = "--nsqd-http-address"
TCP_VARIABLE = "QCLI_NSQD_TCP_ADDRESS"
HTTP_VARIABLE = "QCLI_NSQD_HTTP_ADDRESS"
LOOKUPD_OPTION = "--lookupd-http-address"
LOOKUPD_VARIABLE = "QCLI_LOOKUPD_HTTP_ADDRESS"
ALLOWED_HOST_VARIABLE = "QCLI_LOOKUPD_ALLOWED_HOST"
DEFAULT_TCP_ADDRESS = "127.0.0.1:4150"
DEFAULT_HTTP_ADDRESS = "127.0.0.1:4151"

BROKER = "Which broker"
MAY_BE_SEVERAL = "Several: with commas, or repeat the option."


_HTTP: dict[str, Any] = {
    "type": params.http_address,
    "envvar": HTTP_VARIABLE,
    "metavar": "[https://]HOST:PORT|PATH",
}


def tcp_addresses(text: str) -> Decorator:
    """Return the option for several brokers: a tuple, `nsqd_tcp_addresses`. `check_tcp_address` checks a value."""
    return several(
        BROKER,
        TCP_OPTION,
        "nsqd_tcp_addresses",
        default=(DEFAULT_TCP_ADDRESS,),
        help=f"{text} {MAY_BE_SEVERAL}",
        envvar=TCP_VARIABLE,
        metavar="HOST:PORT",
    )


unused_tcp_addresses = option(
    BROKER,
    TCP_OPTION,
    multiple=True,
    default=(DEFAULT_TCP_ADDRESS,),
    show_default=False,
    envvar=TCP_VARIABLE,
    metavar="HOST:PORT",
    expose_value=False,
    hidden=True,
    help="Accepted, not used.",
)
"""Every command accepts both addresses, so that scripts can call all of them in the same way."""


def check_tcp_address(text: str) -> None:
    try:
        params.tcp_address(text)
    except click.BadParameter as error:
        ctx = click.get_current_context()
        (error.param,) = (each for each in ctx.command.params if TCP_OPTION in each.opts)
        error.ctx = ctx
        raise


def _one_http_address(text: str) -> str:
    if "," in text:
        raise click.BadParameter(
            f"{text!r} is a list; this command takes one broker. Run it for each of them."
        )
    return params.http_address(text)


def http_address(text: str) -> Decorator:
    one = {**_HTTP, "type": _one_http_address}
    return option(BROKER, HTTP_OPTION, default=DEFAULT_HTTP_ADDRESS, help=text, **one)


def http_addresses(text: str) -> Decorator:
    """Return the option for several brokers: a tuple, `nsqd_http_addresses`."""
    return several(
        BROKER,
        HTTP_OPTION,
        "nsqd_http_addresses",
        default=(DEFAULT_HTTP_ADDRESS,),
        help=f"{text} {MAY_BE_SEVERAL}",
        **_HTTP,
    )


def check_default_tcp_address(what: str) -> None:
    """Check that this machine is meant if the command line sets the HTTP address only, and print a note.

    A user who knows one address may expect that the command uses that broker for everything.

    Args:
        what: What the command does with the TCP address, such as `messages go to`.

    Raises:
        UsageError: The HTTP address is of another machine than the default TCP address.
    """
    ctx = click.get_current_context()
    sources = [ctx.get_parameter_source(name) for name in ("nsqd_http_addresses", "nsqd_tcp_addresses")]
    typed_alone = [click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.DEFAULT]
    if sources != typed_alone or ctx.params.get("lookupd_addresses"):  # discovery replaces the default
        return
    for address in ctx.params["nsqd_http_addresses"]:
        host = host_of(address)
        if host and not is_loopback(host):
            raise click.UsageError(
                f"{HTTP_OPTION} is {address}, and without {TCP_OPTION} {what} {DEFAULT_TCP_ADDRESS}. Give "
                f"{TCP_OPTION} of the broker, such as {format_address(host, 4150)}."
            )
    print_diagnostic(
        f"Note: {HTTP_OPTION} is not for all requests: {what} {DEFAULT_TCP_ADDRESS}, see {TCP_OPTION}."
    )


def lookupd_addresses(text: str) -> Decorator:
    """Return the options about discovery services, which are tuples.

    `--lookupd-http-address`: `lookupd_addresses`. `--lookupd-allowed-host`:
    `lookupd_allowed_hosts`.
    """
    return all_of(
        several(
            BROKER,
            LOOKUPD_OPTION,
            "lookupd_addresses",
            type=params.lookupd_address,
            envvar=LOOKUPD_VARIABLE,
            metavar="[https://]HOST:PORT",
            help=f"{text} {MAY_BE_SEVERAL}",
        ),
        several(
            BROKER,
            "--lookupd-allowed-host",
            "lookupd_allowed_hosts",
            envvar=ALLOWED_HOST_VARIABLE,
            metavar="HOST",
            brief=True,
            help="Use only brokers with these host names or addresses, if nsqlookupd returns others: *.example.com. "
            f"{MAY_BE_SEVERAL}",
        ),
    )
