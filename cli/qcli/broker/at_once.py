"""Requests to several servers at the same time."""

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import click
from click.globals import pop_context, push_context

from trio_nsq.event_loop.fan_out import MAX_THREADS, start_all

from ..framework.errors import Failure
from .connection_options import ConnectOptions

_P = ParamSpec("_P")
_T = TypeVar("_T")


def at_once(
    addresses: Sequence[str], act: Callable[[str], _T], *, at_most: int | None = None
) -> dict[str, _T | Failure]:
    """Call `act` with each address, in threads if there are several; return its results or failures in this order.

    Args:
        at_most: The maximum of calls at the same time; None: `MAX_THREADS`.

    Raises the first other error. An interruption does not wait for the threads.
    """
    if len(addresses) == 1:
        try:
            return {addresses[0]: act(addresses[0])}
        except Failure as failure:
            return {addresses[0]: failure}
    found: dict[str, _T | Failure] = {}
    for address, future in start_all(in_context(act), addresses, at_most=at_most or MAX_THREADS).items():
        try:
            found[address] = future.result()
        except Failure as failure:
            found[address] = failure
    return found


def in_context(act: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return `act` for a thread: there, it runs in the context of the current command, if there is one."""
    ctx = click.get_current_context(silent=True)
    if ctx is None:
        return act
    ConnectOptions.of_command(ctx)  # reads the secret, which may come from standard input, only once

    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        push_context(ctx)  # click keeps the current context for each thread
        try:
            return act(*args, **kwargs)
        finally:
            pop_context()

    return run
