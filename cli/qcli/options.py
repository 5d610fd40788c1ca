"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from . import params
from .commands import option, output_format
from .connecting import http_connection, tcp_connection

_F = TypeVar("_F", bound=Callable[..., Any])

TCP_OPTION = "--nsqd-tcp-address"
HTTP_OPTION = "--nsqd-http-address"
TCP_VARIABLE = "QCLI_NSQD_TCP_ADDRESS"
HTTP_VARIABLE = "QCLI_NSQD_HTTP_ADDRESS"
DEFAULT_TCP_ADDRESS = "127.0.0.1:4150"
DEFAULT_HTTP_ADDRESS = "127.0.0.1:4151"

BROKER = "Which broker"
WORK = "Who does the work"


def tcp_address(text: str, *, used: bool = True, checked: bool = True) -> Callable[[_F], _F]:
    """`--nsqd-tcp-address`, and `QCLI_NSQD_TCP_ADDRESS`.

    Args:
        text: Its help.
        used: Whether its value matters, so that the help has to say where it comes from.
        checked: Whether one that is none is refused at once; if not, and it turns out to be needed, see
            `check_tcp_address`. One that is not used is never refused.
    """
    return option(
        BROKER,
        TCP_OPTION,
        type=params.tcp_address if used and checked else str,
        default=DEFAULT_TCP_ADDRESS,
        envvar=TCP_VARIABLE,
        metavar="HOST:PORT",
        show_default=used,
        show_envvar=used,
        help=text,
    )


def check_tcp_address(text: str) -> None:
    """Raises BadParameter if it is none."""
    try:
        params.tcp_address(text)
    except click.BadParameter as error:
        error.param_hint = f"'{TCP_OPTION}' (env var: '{TCP_VARIABLE}')"
        raise


def http_address(text: str) -> Callable[[_F], _F]:
    """`--nsqd-http-address`, and `QCLI_NSQD_HTTP_ADDRESS`."""
    return option(
        BROKER,
        HTTP_OPTION,
        type=params.http_address,
        default=DEFAULT_HTTP_ADDRESS,
        envvar=HTTP_VARIABLE,
        metavar="[https://]HOST:PORT|PATH",
        show_default=True,
        show_envvar=True,
        help=text,
    )


def streams_from_broker(command: _F) -> _F:
    """The addresses, and how to connect, for a command that speaks the TCP protocol."""
    command = tcp_connection(command)
    command = http_address("The broker's HTTP address; asked for names by shell completion only.")(command)
    return tcp_address("The broker to connect to.")(command)


def asks_broker(command: _F) -> _F:
    """The addresses, and how to connect, for a command that speaks HTTP."""
    command = http_connection(command)
    command = http_address("The broker's HTTP address.")(command)
    # Every command takes both, so that all can be called alike.
    return tcp_address("Accepted, not used.", used=False)(command)


def works_in_bulk(reachable: str, told: str) -> Callable[[_F], _F]:
    """Who does the work, and what is said of it, for a command that may hand it to Spark.

    Args:
        reachable: What has to be reachable from wherever Spark's tasks are.
        told: What `--quiet` leaves out besides the progress.
    """
    options: tuple[Callable[[_F], _F], ...] = (
        option(
            WORK,
            "--engine",
            type=click.Choice(["auto", "inline", "spark"]),
            default="auto",
            show_default=True,
            help="inline: this process, without Java. spark: Spark's tasks, on all cores. auto: whichever is done "
            "sooner; standard error says which.",
        ),
        option(
            WORK,
            "--master",
            metavar="URL",
            help="Spark's master, such as spark://HOST:7077; not given: Spark runs within this command. "
            f"{reachable} to be reachable from everywhere.",
        ),
        output_format(
            "text: a summary for people, on standard error. json: an object on standard output, see below.",
            "text",
            "json",
        ),
        option("Output", "--quiet", "-q", is_flag=True, help=f"No progress and no {told}; errors only."),
    )

    def add(command: _F) -> _F:
        for each in reversed(options):  # the last decorator is the first option
            command = each(command)
        return command

    return add
