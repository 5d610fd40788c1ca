"""The configuration file of `to-parquet`: each section is the command line of some topics.

A key is the name of an option, and its value the text of that option on a command line, so that the declarations of the
options check both. Keys above the first section are for all sections. The command line wins over both.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trio_nsq.protocol.address import without_secrets as hide_secrets
from trio_nsq.protocol.names import is_valid_name

from ...broker.address_options import HTTP_OPTION, LOOKUPD_OPTION, TCP_OPTION
from ...framework.command import DocumentedCommand, alike
from ...framework.errors import Failure
from ...framework.options import CONNECTION_OPTIONS, Decorator, GroupedOption, option
from ..shared.consuming import SOURCE
from .options import TOPIC_PLACE, ToParquetOptions

if TYPE_CHECKING:
    from .topic_finder import TopicSection

TOPICS, FOLDER = "topics", "folder"
"""Keys for the arguments of the command."""
_OF_THE_COMMAND = frozenset(
    (
        "--follow",
        "--every",
        "--http-address",
        "--max-lag",
        "--topic-refresh",
        "--engine",
        "--master",
        "--jobs",
        "--format",
        "--quiet",
        "--verbose",
    )
)
_NOT_IN_FILES = frozenset(
    (
        "--config",
        "--check-config",
        "--context",
        "--help",
        "--consume",
        "--spool",
        "--print-schema",
        TCP_OPTION,
    )
)
OTHER_TOPICS = ""
"""The name of the section for all topics that no other section has."""
_DECLARED = {
    **dict.fromkeys(
        ("delta", "iceberg"),
        "the topic declares its table: qcli topic set TOPIC table=delta:URL, iceberg:CATALOG/NAMESPACE.TABLE or "
        "parquet:URL",
    ),
    "from-segments": "tables are written from brokers; qcli to-parquet reads archives.",
}
"""Keys that a file for declared tables must not have, and why."""
_SOURCES = frozenset((HTTP_OPTION, LOOKUPD_OPTION, TCP_OPTION, "--from-segments"))
_PIPELINE = "qcli.pipeline"


def config_option(text: str) -> Decorator:
    """Return the option of the file."""
    return option(
        SOURCE,
        "--config",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help=text,
    )


@dataclass(frozen=True, slots=True)
class CommandWords:
    """A part of a command line: the words of each option, by its first name, and the arguments."""

    options: dict[str, list[str]] = field(default_factory=dict)
    topics: tuple[str, ...] | None = None
    folder: str | None = None

    def over(self, others: CommandWords) -> CommandWords:
        """Return both; these words win. An address of any kind replaces those of all kinds."""
        kept = others.options
        if self.options.keys() & _SOURCES:
            kept = {name: words for name, words in kept.items() if name not in _SOURCES}
        return CommandWords(
            {**kept, **self.options},
            others.topics if self.topics is None else self.topics,
            others.folder if self.folder is None else self.folder,
        )

    def only(self, is_wanted: Callable[[str], bool]) -> CommandWords:
        return CommandWords({name: words for name, words in self.options.items() if is_wanted(name)})

    def line(self) -> list[str]:
        options = [word for words in self.options.values() for word in words]
        return [*(self.topics or ()), *([] if self.folder is None else [self.folder]), *options]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A configuration file with what the command line adds.

    Attributes:
        sections: The complete command line of each section, by its name.
        with_own_folder: The sections that have a folder of their own.
    """

    path: Path
    sections: dict[str, CommandWords]
    with_own_folder: frozenset[str]

    def open(self, ctx: click.Context) -> list[TopicSection]:
        """Return the sections, with their options checked. Raises UsageError, Failure."""
        found = [self._open(ctx, name, words) for name, words in self.sections.items()]
        named: dict[str, str] = {}
        for section in found:
            for topic in section.options.topics:
                if topic in named:
                    raise self._error(
                        section.name, f"the topic {topic} is in the section [{named[topic]}], too."
                    )
                named[topic] = section.name
        return found

    def _open(self, ctx: click.Context, name: str, words: CommandWords) -> TopicSection:
        from .topic_finder import TopicSection  # not above: the help needs no library

        if words.folder is None:
            raise self._error(name, f"{FOLDER}: it is missing.")
        try:
            with ctx.command.make_context(ctx.info_name, words.line(), ctx.parent) as own:
                options = ToParquetOptions(**own.params)
                options.check()
                options = options.resolve()
                if options.consume:
                    raise click.UsageError("messages are consumed by a command of their own, without a file.")
                table = words.options.get("--iceberg")
                tables = [each.options.get("--iceberg") for each in self.sections.values()]
                if options.iceberg and TOPIC_PLACE not in options.iceberg.name and tables.count(table) > 1:
                    raise click.UsageError(
                        f"--iceberg is that of several sections, so it needs {TOPIC_PLACE}."
                    )
                is_only = options.is_of_one_topic and name in self.with_own_folder
                return TopicSection(options, options.request(), name, is_only)
        except click.UsageError as error:
            raise self._error(name, error.format_message()) from error

    def _error(self, section: str, text: str) -> click.UsageError:
        return click.UsageError(f"--config: {self.path}: [{section}]: {text}")

    def lines(self) -> list[str]:
        """Return the command line of each section, without secrets."""
        lines = {name: ["qcli", "to-parquet", *_shown(words).line()] for name, words in self.sections.items()}
        return [f"[{name}] {shlex.join(words)}" for name, words in lines.items()]


def _shown(words: CommandWords) -> CommandWords:
    from ..shared.places import without_secrets

    shown = {name: [_word_without_secrets(word) for word in given] for name, given in words.options.items()}
    hidden = {"--auth-secret": ["--auth-secret=***"]} if "--auth-secret" in shown else {}
    folder = None if words.folder is None else without_secrets(words.folder)
    return CommandWords({**shown, **hidden}, words.topics, folder)


def _word_without_secrets(word: str) -> str:
    """Return `--option=value` without the secrets of a URL in the value."""
    option, equals, value = word.partition("=")
    is_url = "://" in value and option != "--where"
    return f"{option}{equals}{hide_secrets(value) if is_url else value}"


class PipelineCommand(DocumentedCommand):
    """A command whose options may be in a configuration file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line, with the keys of the file that are for the whole command."""
        if not ctx.resilient_parsing:
            typed = self.typed(ctx, args)
            if typed.get("config") is not None:
                words = typed_words(ctx, typed)
                pipeline, general = read_pipeline(ctx, Path(typed["config"]), words)
                ctx.meta[_PIPELINE] = pipeline
                check = ["--check-config"] if typed.get("check_config") else []
                args = ["--config", typed["config"], *check, *words.over(general).line()]
        return super().parse_args(ctx, args)


def pipeline_of(ctx: click.Context) -> Pipeline | None:
    """Return the configuration file of a command; None: it has none."""
    found: Pipeline | None = ctx.meta.get(_PIPELINE)
    return found


def typed_words(ctx: click.Context, typed: Mapping[str, Any]) -> CommandWords:
    """Return the words of a parsed command line."""
    if any(isinstance(typed.get(name), str | tuple | list) and typed[name] for name in (TOPICS, FOLDER)):
        raise click.UsageError("--config has the topics and the folders: leave them out.")
    options: dict[str, list[str]] = {}
    for param in ctx.command.get_params(ctx):  # with --help
        if (
            isinstance(param, click.Option)
            and typed.get(param.name or "") is not None
            and param.opts[0] != "--config"
        ):
            options |= _words_of(param, typed[param.name or ""])
    options.pop("--check-config", None)
    return CommandWords(options)


def _words_of(param: click.Option, value: Any) -> dict[str, list[str]]:
    """Return the words of an option for the value that click's parser has for it."""
    name = param.opts[0]
    if param.is_flag:
        # No word at all still replaces those above the sections.
        return {name: [name] if value else param.secondary_opts[:1]}
    values = value if isinstance(value, list | tuple) else [value]
    return {name: [f"{name}={each}" for each in values]}


def read_pipeline(
    ctx: click.Context, path: Path, typed: CommandWords, *, of_declared_tables: bool = False
) -> tuple[Pipeline, CommandWords]:
    """Read a file. Return its sections, and what is for the whole command.

    Args:
        ctx: Of `to-parquet`.
        typed: What the command line has.
        of_declared_tables: The topics declare their tables, so the file has only options: it needs no section, its last
            section, `OTHER_TOPICS`, is for all other topics, and all have the same channel.

    Raises:
        Failure: It cannot be read.
        UsageError: It has a key or a value that is wrong.
    """
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise Failure(f"--config: cannot read {path}: {error.strerror}.") from error
    except ValueError as error:  # TOMLDecodeError or UnicodeDecodeError
        raise click.UsageError(f"--config: {path} is not valid TOML: {error}.") from error
    tables = {name: value for name, value in data.items() if isinstance(value, dict)}
    if not tables and not of_declared_tables:
        raise click.UsageError(f"--config: {path} has no section: write [TOPIC], and its options below.")
    reader = _Reader(ctx, path, of_declared_tables=of_declared_tables)
    top = reader.words({name: value for name, value in data.items() if name not in tables}, "")
    general = top.only(reader.is_of_the_command)
    sections: dict[str, CommandWords] = {}
    own: set[str] = set()
    for name, table in tables.items():
        words = reader.words(table, name)
        if words.folder is not None:
            own.add(name)
        merged = typed.over(words).over(top)
        if words.topics is None and "--topic-pattern" not in words.options:
            if not is_valid_name(name):
                raise click.UsageError(
                    f"--config: {path}: [{name}]: this is no name of a topic: give {TOPICS} or topic-pattern."
                )
            merged = CommandWords(merged.options, (name,), merged.folder)
        sections[name] = merged
    if of_declared_tables:
        sections[OTHER_TOPICS] = typed.over(top)
    return Pipeline(path, sections, frozenset(own)), general


class _Reader:
    """Converts the tables of a file."""

    def __init__(self, ctx: click.Context, path: Path, *, of_declared_tables: bool) -> None:
        self._ctx = ctx
        self._path = path
        self._refused = _DECLARED if of_declared_tables else {}
        self._options = {
            name.removeprefix("--"): param
            for param in ctx.command.get_params(ctx)
            if isinstance(param, GroupedOption) and param.opts[0] not in _NOT_IN_FILES
            for name in param.opts
            if name.startswith("--")
        }
        self._general = {
            param.opts[0]
            for param in self._options.values()
            if param.section == CONNECTION_OPTIONS
            or param.opts[0] in _OF_THE_COMMAND
            or (of_declared_tables and param.opts[0] == "--channel")
        }

    def is_of_the_command(self, name: str) -> bool:
        """Whether an option is for the whole command, not for a section."""
        return name in self._general

    def words(self, table: Mapping[str, Any], section: str) -> CommandWords:
        """Return the words of a section, or of what is above the first one. Raises UsageError."""
        options: dict[str, list[str]] = {}
        topics: tuple[str, ...] | None = None
        folder: str | None = None
        for key, value in table.items():
            try:
                if key == TOPICS and section:
                    topics = tuple(_texts(value))
                elif key == FOLDER:
                    folder = _text(value)
                else:
                    options |= self._option(key, value, section)
            except click.BadParameter as error:
                where = f"[{section}]: " if section else ""
                raise click.UsageError(f"--config: {self._path}: {where}{key}: {error.message}") from error
        return CommandWords(options, topics, folder)

    def _option(self, key: str, value: Any, section: str) -> dict[str, list[str]]:
        param = self._options.get(key)
        if key in self._refused:
            raise click.BadParameter(self._refused[key])
        if param is None:
            near = alike(key, [*self._options, TOPICS, FOLDER])
            raise click.BadParameter("there is no such key." + (f" Did you mean {near}?" if near else ""))
        if section and self.is_of_the_command(param.opts[0]):
            raise click.BadParameter("it is for all sections: write it above the first one.")
        if param.is_flag:
            if not isinstance(value, bool):
                raise click.BadParameter(f"{_json(value)} is not true or false.")
            return _words_of(param, value)
        values = _texts(value) if param.multiple else [",".join(_texts(value))]
        param.type_cast_value(self._ctx, values if param.multiple else values[0])
        return _words_of(param, values)


def _texts(value: Any) -> list[str]:
    return [_text(each) for each in value] if isinstance(value, list) else [_text(value)]


def _text(value: Any) -> str:
    if type(value) not in (str, int, float):  # a bool is an int
        raise click.BadParameter(f"{_json(value)} is neither a text nor a number.")
    return str(value)


def _json(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)
