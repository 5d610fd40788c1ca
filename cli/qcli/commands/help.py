"""`qcli help`: the help of a command, or a topic that several commands share."""

import json
import re
from collections.abc import Callable
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from ..framework.command import (
    DocumentedCommand,
    DocumentedGroup,
    alike,
    contexts_below,
    sections,
)
from ..framework.description import describe
from ..framework.errors import ExitCode
from ..framework.json_schema import schema_of
from ..framework.options import CONNECTION_OPTIONS, option, output_format
from ..framework.output import write
from ..framework.positions import POSITIONS_NOTE
from ..records.commands import CommandRecord
from .shared.format_string import LETTERS

_SHORTEST_SEARCHED = 3
"""Shorter words are in the help of too many commands."""
_MOST_FOUND = 5


_READ_ONLY = frozenset(
    {
        *("peek", "stat", "nodes", "clients", "help"),
        *("topic list", "topic settings", "channel list", "channel settings"),
        *("cluster status", "cluster wait", "dlq list", "dlq show", "deferred list"),
        *("log dump", "log verify", "archive status", "archive verify"),
        *("context list", "context show", "token list"),
    }
)
"""Commands that change nothing, whatever their options: no broker, no channel, no file."""


class _Topic(NamedTuple):
    """A help topic: its title, its paragraphs, and the rows of a table below them."""

    title: str
    paragraphs: tuple[str, ...]
    rows: Callable[[click.Context], list[tuple[str, str]]] | None = None


def _connection_options(top: click.Context) -> list[tuple[str, str]]:
    """Return names and help of all connection options; `qcli pub` has all of them."""
    assert isinstance(top.command, click.Group)
    command = top.command.get_command(top, "pub")
    assert command is not None
    ctx = command.context_class(command, info_name="pub", parent=top)
    options = sections(ctx, command)[CONNECTION_OPTIONS]
    return [record for option in options if (record := option.get_help_record(ctx))]


def _exit_codes(_top: click.Context) -> list[tuple[str, str]]:
    return [(str(code.value), code.meaning) for code in ExitCode]


_TOPICS = {
    "connection": _Topic(
        "TLS, AUTH and compression",
        (
            "These options belong to every command that connects to a broker; --tls, --snappy and --deflate, which are "
            "for TCP connections, only to pub, tail, replay, to-parquet, to-http and bench.",
            "For TLS over HTTP, write the address as https://HOST:PORT: --nsqd-http-address https://broker:4152. A "
            "path, such as /run/qcli.sock, is a unix socket.",
            "The secret goes to brokers and nsqlookupd. A warning precedes it if it leaves this machine without TLS.",
            "A context keeps addresses and these options under a name: see 'qcli context --help'.",
        ),
        _connection_options,
    ),
    "environment": _Topic(
        "Environment variables",
        (
            "QCLI_NSQD_TCP_ADDRESS, QCLI_NSQD_HTTP_ADDRESS, QCLI_LOOKUPD_HTTP_ADDRESS and QCLI_LOOKUPD_ALLOWED_HOST "
            "set --nsqd-tcp-address, --nsqd-http-address, --lookupd-http-address and --lookupd-allowed-host of every "
            "command. Separate several values with commas.",
            "QCLI_CLIENT_ and the name of a connection option sets that option, such as QCLI_CLIENT_TLS_ROOT_CA_FILE "
            "or QCLI_CLIENT_AUTH_SECRET_FILE. See 'qcli help connection'.",
            "QCLI_ and the name of an option of serve or lookupd sets that option, such as QCLI_DATA_PATH. QCLI_SERVE_ "
            "and the name, such as QCLI_SERVE_DATA_PATH, is for serve only and overrides the variable that both read.",
            "QCLI_JOBS_FOLDER sets --jobs-folder of 'qcli replay'. QCLI_COMPLETION_TIMEOUT is how long completion "
            "waits for a broker's names (default: 500ms). NO_COLOR turns colours off.",
            "QCLI_CONTEXT is the context to use, unless --context names one. XDG_CONFIG_HOME is the folder of the file "
            "of contexts (default: ~/.config). See 'qcli context --help'.",
            "A command line option overrides the environment, and the environment overrides a context or a "
            "configuration file. If --context is typed, the environment is not read for addresses and connection "
            "options.",
        ),
    ),
    "positions": _Topic(
        "Positions in a topic",
        (
            POSITIONS_NOTE,
            "'qcli log dump' reads files without a broker and takes sequences, times and how long ago.",
        ),
    ),
    "format-strings": _Topic(
        "Format strings of messages",
        (
            "tail, peek, dlq show and deferred list write messages with -f FORMAT. Text is written as it is; nothing "
            "is added between messages, so end the format with \\n. Escapes are \\n, \\r, \\t, \\0 and so on, \\xNN "
            "for any byte, and \\\\ for a backslash. %% is a percent sign.",
            "Letters of kcat have its meaning: %s, %S, %R, %t, %o and %T. Messages of NSQ have no key, partition and "
            "headers: %k, %K, %p and %h are errors.",
        ),
        lambda _top: [(f"%{letter}", each.text) for letter, each in LETTERS.items()],
    ),
    "durations": _Topic(
        "Durations and sizes",
        (
            "A duration is a number with a unit, or several of them: 500ms, 2s, 1m30s, 12h. --defer, positions and "
            "retention times also take days: 7d, 1d12h. A number without a unit is an error, except 0.",
            "A size is a number of bytes, or a number with a unit: 4096, 500MB, 10GiB. kB, MB, GB and TB are powers "
            "of 1000; KiB, MiB, GiB and TiB are powers of 1024.",
        ),
    ),
    "exit-codes": _Topic(
        "Exit codes",
        ("All commands use the same codes. The manual page of a command gives the details.",),
        _exit_codes,
    ),
}


def _complete(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return topics and commands, or the subcommands of the command before."""
    words = tuple(ctx.params.get("words") or ())
    found = _find(ctx.find_root(), words)
    if found is None or not isinstance(found.command, click.Group):
        return []
    names = [(name, found.command.get_command(found, name)) for name in found.command.list_commands(found)]
    items = [CompletionItem(name, help=command.get_short_help_str(200)) for name, command in names if command]
    if not words:
        items += [CompletionItem(name, help=topic.title) for name, topic in _TOPICS.items()]
    return [item for item in items if item.value.startswith(incomplete)]


def _find(top: click.Context, words: tuple[str, ...]) -> click.Context | None:
    """Return the context of the command with these names; None: there is no such command."""
    ctx = top
    for word in words:
        command = ctx.command.get_command(ctx, word) if isinstance(ctx.command, click.Group) else None
        if command is None:
            return None
        ctx = command.context_class(command, info_name=word, parent=ctx, **command.context_settings)
    return ctx


@click.command(
    "help",
    cls=DocumentedCommand,
    short_help="Show the help of a command or a topic.",
    examples={
        "all commands": "qcli help",
        "the help of a command, as 'qcli channel seek --help' shows it": "qcli help channel seek",
        "the options for TLS, AUTH and compression": "qcli help connection",
        "environment variables": "qcli help environment",
        "all commands, for programs": "qcli help --format json",
        "the JSON Schema of what a command prints": "qcli help topic list --schema",
    },
    exits={ExitCode.USAGE: "There is no such command or topic."},
    details={title: " ".join(paragraphs) for title, paragraphs, rows in _TOPICS.values() if rows is None},
)
@click.argument("words", metavar="[TOPIC|COMMAND...]", nargs=-1, shell_complete=_complete)
@output_format(
    "text: help for people. json: an object with the command, all commands below it, their arguments, options, types, "
    "exit codes and examples, and whether a command only reads.",
    *("text", "json"),
    records=[CommandRecord],
)
@option(
    "Output",
    "--schema",
    is_flag=True,
    help="Print the JSON Schema of each line that the command prints with --format json.",
)
@click.pass_context
def command(ctx: click.Context, words: tuple[str, ...], form: str, schema: bool) -> None:
    """Show the help of a command, or of a topic that several commands share.

    Topics: connection, environment, positions, format-strings, durations, exit-codes.
    """
    top = ctx.find_root()
    if len(words) == 1 and words[0] in _TOPICS:
        if form == "json" or schema:
            flag = "--schema" if schema else "--format json"
            raise click.UsageError(f"{flag} describes commands, and '{words[0]}' is a topic.")
        write(_text(top, _TOPICS[words[0]]))
        return
    found = _find(top, words)
    if found is None:
        assert isinstance(top.command, DocumentedGroup)
        near = top.command.suggestion(top, words[0]) or alike(words[0], list(_TOPICS))
        hint = f" (did you mean {near}?)" if near and len(words) == 1 else ""
        text = f"There is no command or topic '{' '.join(words)}'{hint}."
        if not hint and (mentioning := _commands_about(top, words[-1])):
            text += f" Commands about it: {', '.join(mentioning)}."
        raise click.UsageError(f"{text} The topics are {', '.join(_TOPICS)}.")
    if schema:
        write(_schema(found))
        return
    write((json.dumps(describe(found, _READ_ONLY)) if form == "json" else found.get_help()) + "\n")


def _schema(ctx: click.Context) -> str:
    """Return the JSON Schema of what a command prints. Raises UsageError: it prints no JSON."""
    schema = schema_of(ctx.command_path, ctx.command)
    if schema is None:
        raise click.UsageError(
            f"'{ctx.command_path}' has no --format json that it writes. The key schema_command of "
            "'qcli help --format json' says which commands have one."
        )
    return json.dumps(schema, indent=2) + "\n"


def _commands_about(top: click.Context, word: str) -> list[str]:
    """Return the commands whose help has a word, the best matches first: a name, a summary, an option, other text."""
    stem = word.lower().removesuffix("s")
    if len(stem) < _SHORTEST_SEARCHED:
        return []
    begins_word = re.compile(
        rf"\b(?:{re.escape(stem)}|{re.escape(stem.capitalize())})"
    ).search  # not HOST:PORT
    ranked: list[tuple[int, str]] = []
    for ctx in contexts_below(top):
        command = ctx.command
        if ctx is top or not isinstance(command, DocumentedCommand):
            continue
        options = " ".join(name for param in command.params for name in param.opts)
        texts = (ctx.command_path, command.get_short_help_str(200), options, ctx.get_help())
        if (rank := next((i for i, text in enumerate(texts) if begins_word(text)), None)) is not None:
            ranked.append((rank, ctx.command_path))
    return [path for _, path in sorted(ranked, key=lambda each: each[0])[:_MOST_FOUND]]


def _text(top: click.Context, topic: _Topic) -> str:
    formatter = top.make_formatter()
    formatter.write(f"{topic.title}\n")
    for paragraph in topic.paragraphs:
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(paragraph)
    if topic.rows is not None:
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_dl(topic.rows(top))
    return formatter.getvalue()
