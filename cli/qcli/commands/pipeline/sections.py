"""The options of each declared table: those of the command line, and of the file's section that has the topic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..to_parquet.options import ToParquetOptions, request_for
from ..to_parquet.pipeline import OTHER_TOPICS, CommandWords

if TYPE_CHECKING:
    from trio_nsq.connectors.source.topic_choice import TopicChoice
    from trio_nsq.fleet.allowed_tables import AllowedPlace
    from trio_nsq.protocol.tables import DeclaredTable, TableFormat
    from trio_nsq.spark.export.request import ExportRequest

_PATTERN = "--topic-pattern"
_NO_FOLDER = "-"
_TABLE_OF: dict[TableFormat, list[str]] = {
    "delta": ["--delta"],
    "iceberg": ["--iceberg=catalog/namespace.{topic}"],
    "parquet": [],
}
"""The options of an export to a table of each format; the name of the table is replaced."""


def export_context(ctx: click.Context) -> click.Context:
    """Return a context of `to-parquet` beside that of this command, for what its options mean."""
    from ..to_parquet.command import command

    return command.context_class(command, info_name="to-parquet", parent=ctx.parent)


class TableSections:
    """What the exports of all declared tables do.

    Args:
        ctx: That of the command.
        path: The configuration file; None: there is none.
        sections: The words of each section; the last one, `OTHER_TOPICS`, is for all topics that no other has.
        iceberg_folder: The folder for Iceberg tables of the command line.

    Attributes:
        allowed: The places where tables may be; empty: anywhere.
    """

    allowed: Sequence[AllowedPlace] = ()

    def __init__(
        self,
        ctx: click.Context,
        path: Path | None,
        sections: Mapping[str, CommandWords],
        iceberg_folder: str | None,
    ) -> None:
        self._ctx = ctx
        self._path = path
        self._sections = sections
        self._iceberg_folder = iceberg_folder
        self._choices: dict[str, TopicChoice] = {}
        self._parsed: dict[tuple[str, TableFormat], tuple[ToParquetOptions, ExportRequest]] = {}

    @property
    def options(self) -> ToParquetOptions:
        """The options of the whole command, as those of an export of all topics."""
        return self._export(OTHER_TOPICS, "delta")[0]

    @property
    def iceberg_folders(self) -> list[tuple[str, str]]:
        """The folders for Iceberg tables, each with what gives it, for errors."""
        of_file = (words.folder for words in self._sections.values())
        found = [("--iceberg-folder", self._iceberg_folder)]
        found += [(f"--config: {self._path}: the folder", folder) for folder in dict.fromkeys(of_file)]
        return [(option, folder) for option, folder in found if folder is not None]

    def check(self) -> None:
        """Raises UsageError: a section is wrong."""
        from trio_nsq.connectors.source.topic_choice import TopicChoice

        named: dict[str, str] = {}
        for name, words in self._sections.items():
            for topic in words.topics or ():
                if topic in named:
                    raise self._error(name, f"the topic {topic} is in the section [{named[topic]}], too.")
                named[topic] = name
        for name, words in self._sections.items():
            patterns = [word.removeprefix(f"{_PATTERN}=") for word in words.options.get(_PATTERN, ())]
            pattern = "." if name == OTHER_TOPICS else patterns[0] if patterns else None
            self._choices[name] = TopicChoice(words.topics or (), pattern, named.__contains__)
            self._export(name, "delta")  # options for tables, such as `key`, may be for all topics

    def options_of(self, topic: str, table: DeclaredTable) -> ToParquetOptions:
        """Return the options of a topic. Raises UsageError."""
        return self._export(self._section_of(topic), table.format)[0]

    def request(self, topic: str, table: DeclaredTable) -> ExportRequest:
        """Return the request for a topic. Raises UsageError: its section does not fit its table."""
        from trio_nsq.spark.tables.target import TableTarget

        template = self._export(self._section_of(topic), table.format)[1]
        if table.format != "iceberg":
            template = replace(template, place=table.target)
        elif template.place == _NO_FOLDER:
            raise click.UsageError(
                "An Iceberg table needs a folder for its files: give --iceberg-folder, or folder in the file."
            )
        else:
            template = replace(template, table=TableTarget.iceberg(table.target))
        request = request_for(template, topic, is_only=table.format != "iceberg")
        return replace(request, channel_only_keeps=True)

    def _section_of(self, topic: str) -> str:
        named = (name for name, words in self._sections.items() if topic in (words.topics or ()))
        matching = (name for name in self._sections if topic in self._choices[name])
        return next(named, None) or next(matching, OTHER_TOPICS)

    def _export(self, name: str, kind: TableFormat) -> tuple[ToParquetOptions, ExportRequest]:
        """Return the options of a section for tables of a format. Raises UsageError: they contradict each other."""
        if (name, kind) not in self._parsed:
            words = self._sections[name]
            options = dict(words.options)
            if kind == "parquet":
                options.pop("--compact", None)  # a folder of files is not compacted
            options[_PATTERN] = [f"{_PATTERN}=."]
            folder = words.folder if words.folder is not None else self._iceberg_folder
            place = folder if kind == "iceberg" and folder is not None else _NO_FOLDER
            line = CommandWords(options, None, place).line()
            self._parsed[name, kind] = self._parse(name, [*line, "--follow", *_TABLE_OF[kind]])
        return self._parsed[name, kind]

    def _parse(self, name: str, line: list[str]) -> tuple[ToParquetOptions, ExportRequest]:
        command = export_context(self._ctx).command
        try:
            with command.make_context("to-parquet", line, self._ctx.parent) as own:
                options = ToParquetOptions(**own.params)
                options.check()
                options = options.resolve()
                return options, options.request()
        except click.UsageError as error:
            raise self._error(name, error.format_message()) from error

    def _error(self, section: str, text: str) -> click.UsageError:
        if self._path is None:
            return click.UsageError(text)
        where = f"[{section}]: " if section != OTHER_TOPICS else ""
        return click.UsageError(f"--config: {self._path}: {where}{text}")
