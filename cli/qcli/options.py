"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from . import params
from .commands import option
from .connecting import http_connection, tcp_connection

_F = TypeVar("_F", bound=Callable[..., Any])

TCP_OPTION = "--nsqd-tcp-address"
HTTP_OPTION = "--nsqd-http-address"
TCP_VARIABLE = "QCLI_NSQD_TCP_ADDRESS"
HTTP_VARIABLE = "QCLI_NSQD_HTTP_ADDRESS"
DEFAULT_TCP_ADDRESS = "127.0.0.1:4150"
DEFAULT_HTTP_ADDRESS = "127.0.0.1:4151"

BROKER = "Which broker"


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
