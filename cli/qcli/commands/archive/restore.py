"""`qcli archive restore`: brings back the data folder of a broker."""

from __future__ import annotations

import time
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import click

from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode
from ...framework.options import option
from ...framework.output import print_diagnostic, size, write_lines
from ...framework.positions import BrokerPosition, time_of
from ...terminal.progress import byte_progress
from ..shared.places import without_secrets
from .places import BytesRead, archive_errors

_NS_PER_MS = 1_000_000


@click.command(
    "restore",
    cls=DocumentedCommand,
    short_help="Bring back the data folder of a broker from its archive.",
    examples={
        "bring back a lost broker": "qcli archive restore s3://bucket/nsq --data-path ./data",
        "run it": "qcli serve --data-path ./data --archive s3://bucket/nsq",
        "see what a topic had yesterday": "qcli archive restore s3://bucket/nsq --data-path /tmp/then --topic clicks "
        "--until 24h",
    },
    exits={
        ExitCode.OK: "The data folder is complete.",
        ExitCode.FAILURE: "There is no archive, it begins later than --until, or the folder cannot be written.",
        ExitCode.USAGE: "The command line is wrong.",
        ExitCode.DAMAGED: "Objects are missing or damaged; messages say which, and what is lost. If stdout has a line, "
        "all else is restored, and brokers open the data folder. Otherwise they do not: give --before-damage.",
    },
    details={
        "Restored": "Topics with their messages, channels with their positions, deferred messages, dead letters, "
        "settings, and what the broker knows of its producers. Not restored: messages that the broker wrote later than "
        "the archive, at most those of the last --archive-interval, and ephemeral topics. Messages that were in flight "
        "are delivered again.",
        "Ids and sequences": "New messages get ids that none had before. Their sequences go on where the archive ends: "
        "if the broker had given out more, they repeat those. Exports and mirrors that have read further notice it by "
        "the ids, and say so.",
    },
)
@click.argument("archive", metavar="ARCHIVE")
@option(
    "Restore",
    "--data-path",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Restore into this folder, which is missing or empty, or has an interrupted restore.",
)
@option(
    "Restore",
    "--until",
    metavar="TIME",
    type=BrokerPosition(),
    help="Restore the state of this time, such as 2026-11-21T04:14 or 2h (ago), instead of the newest one.",
)
@option(
    "Restore",
    "--topic",
    "topics",
    multiple=True,
    metavar="PATTERN",
    help="Restore only topics that match this pattern, such as 'log*'. Repeat the option for several.",
)
@option(
    "Restore",
    "--before-damage",
    is_flag=True,
    help="If objects that the state needs are missing or damaged, restore the newest state before.",
)
def command(
    archive: str, data_path: Path, until: str | None, topics: tuple[str, ...], before_damage: bool
) -> int:
    """Bring back the data folder of a broker from its archive.

    ARCHIVE is a folder, or a URL such as s3://bucket/nsq, as given to 'qcli serve --archive'. A broker that still
    writes to it must not serve the same clients as the restored one.
    """
    from trio_nsq.archive.restore import shown_time
    from trio_nsq.broker.restoring import restore_folder

    until_ms = None if until is None else _time_ms(until)
    is_wanted = partial(_matches, topics) if topics else None
    began_s = time.monotonic()
    with archive_errors(), ExitStack() as stack:
        read = BytesRead()

        def show_bar(expected_bytes: int) -> None:
            read.progress = stack.enter_context(byte_progress(expected_bytes, "Restoring"))

        point, damage = restore_folder(
            without_secrets(archive),
            data_path.absolute(),
            until_ms=until_ms,
            is_wanted=is_wanted,
            before_damage=before_damage,
            on_begin=show_bar,
            on_read=read,
        )
    took_s = time.monotonic() - began_s
    write_lines(
        [f"{data_path}: the state of {shown_time(point.time_ms)}, {size(read.count)} read in {took_s:.1f} s"]
    )
    if until is not None or before_damage:
        print_diagnostic(
            "Note: a broker that goes on from this state needs an archive of its own: give --archive another place."
        )
    for what in damage:
        print_diagnostic(f"Error: {what}.")
    return ExitCode.DAMAGED if damage else ExitCode.OK


def _matches(patterns: tuple[str, ...], topic: str) -> bool:
    return any(fnmatchcase(topic, pattern) for pattern in patterns)


def _time_ms(until: str) -> int:
    now_ns = time.time_ns()
    found = time_of(until, now_ns)
    if found is None:
        raise click.UsageError(f"--until: {until} is no time.")
    return found // _NS_PER_MS
