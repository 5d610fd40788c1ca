"""Completion of the names of a running broker's topics, channels and so on."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import click
from click.shell_completion import CompletionItem

from trio_nsq.event_loop.fan_out import start_all

from ..framework.errors import Failure
from ..framework.params import duration
from .address_options import DEFAULT_HTTP_ADDRESS
from .connection_options import ConnectOptions

if TYPE_CHECKING:
    from .admin_client import AdminClient

_T = TypeVar("_T")

TIMEOUT_MS = 500
"""The user waits at a prompt: after this time, offer no names."""

TIMEOUT_VARIABLE = "QCLI_COMPLETION_TIMEOUT"
"""Overrides the timeout, for distant brokers."""


def complete_topic(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in _ask(ctx) if name.startswith(incomplete)]


def complete_topic_with(
    channel: str,
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Make a completion of topics that have a channel of this name."""

    def complete(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        topics = _ask(ctx)
        return [
            CompletionItem(name) for name in topics if name.startswith(incomplete) and channel in topics[name]
        ]

    return complete


def complete_source(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete topics, and channels once only one topic matches."""
    topics = _ask(ctx)
    found = [name for name in topics if name.startswith(incomplete)]
    channels = _channels(topics, f"{found[0]}/" if len(found) == 1 else incomplete)
    return [CompletionItem(name) for name in (*found, *channels)]


def complete_channel(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete channels; while several topics match, topics with the slash."""
    topics = _ask(ctx)
    found = [name for name in topics if name.startswith(incomplete)]
    if len(found) > 1:
        # "unfinished": no blank after it, because the channel follows
        return [CompletionItem(f"{name}/", type="unfinished") for name in found]
    return [CompletionItem(name) for name in _channels(topics, f"{found[0]}/" if found else incomplete)]


def _channels(topics: dict[str, list[str]], incomplete: str) -> list[str]:
    """Return the matching channels, with their topic; none before the slash."""
    topic, slash, begin = incomplete.partition("/")
    names = topics.get(topic, []) if slash else []
    return [f"{topic}/{channel}" for channel in names if channel.startswith(begin)]


def _ask(ctx: click.Context) -> dict[str, list[str]]:
    """Return the names of the brokers' channels by topic; nothing if a broker does not answer in time."""
    from .admin_client import channels_by_topic

    found = ask_brokers(ctx, lambda client: client.stats()["topics"])
    return channels_by_topic([topic for each in found for topic in each])


def ask_brokers(ctx: click.Context, act: Callable[[AdminClient], _T]) -> list[_T]:
    """Return what a function returns for each of the brokers of a command; nothing if one does not answer in time."""
    from .admin_client import AdminClient
    from .brokers import Brokers, chosen

    one = ctx.params.get("nsqd_http_address")  # of a command that takes one broker
    try:
        connecting = ConnectOptions.of_command(ctx)
        given, lookupds = ((one,), ()) if one else chosen(ctx)
    except (Failure, click.UsageError):
        return []
    brokers = Brokers(
        given if given or lookupds else (DEFAULT_HTTP_ADDRESS,),
        lookupds,
        ctx.params.get("lookupd_allowed_hosts") or (),
        quiet=True,
    )
    try:
        timeout_ms = duration(os.environ.get(TIMEOUT_VARIABLE, f"{TIMEOUT_MS}ms"))
    except click.BadParameter:
        timeout_ms = TIMEOUT_MS

    def ask(brokers: Brokers) -> list[_T]:
        with ctx.scope(cleanup=False):
            found = brokers.ask(lambda address: act(AdminClient(address, connecting)))
        return list(found.results.values())

    # In a thread, because socket timeouts do not limit the total time, nor name resolution.
    answer = start_all(ask, [brokers])[brokers]
    try:
        return answer.result(timeout_ms / 1000)
    except Exception:
        return []  # an error must not disturb the prompt: offer no names
