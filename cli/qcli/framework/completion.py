"""Completion in bash, zsh and fish: what the scripts in `completions/` ask, and the names a running broker knows.

The scripts run `qcli` with `_QCLI_COMPLETE=<shell>_complete` and get one candidate per line back (see
`qcli.generate.scripts`). The word to be completed is in `QCLI_CURRENT`, those before it are in `QCLI_WORDS`, one per
line. bash does not know them, its words end at `=` and `:` too: it sends the line up to the cursor in `QCLI_LINE`, and
those signs in `QCLI_WORDBREAKS`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import click
from click.shell_completion import (
    CompletionItem,
    ShellComplete,
    add_completion_class,
    shell_complete,
    split_arg_string,
)

from ..broker.address_options import DEFAULT_HTTP_ADDRESS
from ..broker.connection_options import Connecting
from .command import GoFlagsCommand
from .errors import Failure
from .params import duration

TIMEOUT_MS = 500
"""A person is waiting at a prompt; no names are better than late ones."""
TIMEOUT_VARIABLE = "QCLI_COMPLETION_TIMEOUT"
"""Another time, for brokers that are far away."""

COMPLETE_VARIABLE = "_QCLI_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


class LineComplete(ShellComplete):
    """Answers the scripts of `qcli.generate`."""

    source_template = "%(prog_name)s"

    def get_completion_args(self) -> tuple[list[str], str]:
        """The complete words after the program's name, and the word to be completed."""
        line = os.environ.get("QCLI_LINE")
        if line is None:
            words = os.environ.get("QCLI_WORDS", "").split("\n")
            return words[1:], os.environ.get("QCLI_CURRENT", "")
        words = split_arg_string(line) + ([""] if line[-1:].isspace() else [])
        return words[1:-1], words[-1]

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        """Candidates as the shell inserts them: for the whole word, also in `--option=value`."""
        option, equals, _ = incomplete.partition("=")
        prefix = f"{option}=" if equals and option.startswith("--") else ""
        breaks = set(os.environ.get("QCLI_WORDBREAKS", "")) & set("=:")
        # bash replaces only what follows the last of its breaks
        cut = 1 + max((incomplete.rfind(sign) for sign in breaks), default=-1)
        items = super().get_completions(self._as_click_has_it(args), incomplete)
        for item in items:
            item.value = (prefix + item.value)[cut:]
        return items

    def _as_click_has_it(self, args: list[str]) -> list[str]:
        """The words before, so that click finds the option whose value is to be completed."""
        assert isinstance(self.cli, click.Group)
        ctx = click.Context(self.cli, resilient_parsing=True)
        command = self.cli.get_command(ctx, args[0]) if args else None
        if isinstance(command, GoFlagsCommand):
            return [args[0], *command.as_click_has_it(click.Context(command, parent=ctx), args[1:])]
        return args

    def format_completion(self, item: CompletionItem) -> str:
        """One line."""
        return f"{item.type}\t{item.value}\t{' '.join((item.help or '').split())}"


def answer_shell(command: click.Command, instruction: str) -> int:
    """Answer a completion script.

    Args:
        command: The root of all commands.
        instruction: What the script put into the environment.

    Returns:
        The exit code.
    """
    # Our class answers instead of click's, so that scripts and answers change together.
    for shell in SHELLS:
        add_completion_class(LineComplete, shell)
    return shell_complete(command, {}, "qcli", COMPLETE_VARIABLE, instruction)


def complete_topic(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The broker's topics that begin so."""
    return [CompletionItem(name) for name in _ask(ctx) if name.startswith(incomplete)]


def complete_topic_with(
    channel: str,
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Make the completion of those topics only that have a channel of this name."""

    def complete(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        topics = _ask(ctx)
        return [
            CompletionItem(name) for name in topics if name.startswith(incomplete) and channel in topics[name]
        ]

    return complete


def complete_source(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Topics that begin so, and the channels of one once it is clear which topic is meant."""
    topics = _ask(ctx)
    if "/" not in incomplete:
        found = [name for name in topics if name.startswith(incomplete)]
        if len(found) != 1:
            return [CompletionItem(name) for name in found]
        incomplete = found[0]
        return [CompletionItem(name) for name in (incomplete, *_channels(topics, incomplete + "/"))]
    return [CompletionItem(name) for name in _channels(topics, incomplete)]


def complete_channel(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Channels of the topic that is meant; before that is clear, topics with the slash."""
    topics = _ask(ctx)
    if "/" not in incomplete:
        found = [name for name in topics if name.startswith(incomplete)]
        if len(found) != 1:
            # "unfinished": no blank after it, for the channel is still to come
            return [CompletionItem(f"{name}/", type="unfinished") for name in found]
        incomplete = found[0] + "/"
    return [CompletionItem(name) for name in _channels(topics, incomplete)]


def _channels(topics: dict[str, list[str]], incomplete: str) -> list[str]:
    topic, _, begin = incomplete.partition("/")
    return [f"{topic}/{channel}" for channel in topics.get(topic, []) if channel.startswith(begin)]


def _ask(ctx: click.Context) -> dict[str, list[str]]:
    """The names of the brokers' channels by topic; nothing if one does not answer in time."""
    from ..broker.broker_http import BrokerHTTP
    from ..broker.fan_out import names_of

    given = (
        ctx.params.get("nsqd_http_addresses") or ctx.params.get("nsqd_http_address") or DEFAULT_HTTP_ADDRESS
    )
    addresses = [given] if isinstance(given, str) else given
    try:
        timeout_ms = duration(os.environ.get(TIMEOUT_VARIABLE, f"{TIMEOUT_MS}ms"))
    except click.BadParameter:
        timeout_ms = TIMEOUT_MS
    try:
        brokers = [BrokerHTTP(address, Connecting.of_command(ctx)) for address in addresses]
    except (Failure, click.UsageError):
        return {}
    answer: list[dict[str, list[str]]] = []

    def ask() -> None:
        try:
            answer.append(names_of([topic for broker in brokers for topic in broker.stats()["topics"]]))
        except Exception:
            # Nobody at a prompt wants to read why there are no names.
            pass

    # In a thread, because no timeout of a socket bounds the whole, nor name resolution.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_ms / 1000)
    return answer[0] if answer else {}
