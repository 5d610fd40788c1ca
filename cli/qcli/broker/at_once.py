"""Requests to several servers at the same time."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
from click.globals import pop_context, push_context

from ..framework.errors import Failure
from .connection_options import ConnectOptions

_T = TypeVar("_T")
MAX_THREADS = 64


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
    ctx = click.get_current_context(silent=True)
    if ctx is not None:
        ConnectOptions.of_command(ctx)  # reads the secret, which may come from standard input, only once
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for address in addresses:
        waiting.put(address)
    answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def work() -> None:
        if ctx is not None:
            push_context(ctx)  # click keeps the current context for each thread
        try:
            while True:
                address = waiting.get_nowait()
                try:
                    answers.put((address, act(address)))
                except BaseException as error:
                    answers.put((address, error))
        except queue.Empty:
            pass
        finally:
            if ctx is not None:
                pop_context()

    for _ in range(min(at_most or MAX_THREADS, len(addresses))):
        # A daemon: Python must not wait for it when the user interrupts the command.
        threading.Thread(target=work, daemon=True).start()
    found = dict(answers.get() for _ in addresses)
    for answer in found.values():
        if isinstance(answer, BaseException) and not isinstance(answer, Failure):
            raise answer
    return {address: found[address] for address in addresses}


def in_context(act: Callable[[], _T]) -> Callable[[], _T]:
    """Return `act` for a thread: there, it runs in the context of the current command."""
    ctx = click.get_current_context()
    ConnectOptions.of_command(ctx)  # reads the secret only once

    def run() -> _T:
        push_context(ctx)
        try:
            return act()
        finally:
            pop_context()

    return run
