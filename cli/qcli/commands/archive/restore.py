"""`qcli archive restore`: brings back the data folder of a broker."""

from __future__ import annotations

import time
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
from .places import BytesRead, archive_errors, storage_of

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
        ExitCode.DAMAGED: "Objects are missing or damaged; the message says which. If these are archived segments, the "
        "data folder is complete but for their messages. Otherwise no broker opens it: 'qcli archive status' shows "
        "other states that can be restored.",
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
def command(archive: str, data_path: Path, until: str | None, topics: tuple[str, ...]) -> int:
    """Bring back the data folder of a broker from its archive.

    ARCHIVE is a folder, or a URL such as s3://bucket/nsq, as given to 'qcli serve --archive'. A broker that still
    writes to it must not serve the same clients as the restored one.
    """
    from trio_nsq.archive.restore import shown_time
    from trio_nsq.broker.restoring import restore_folder

    until_ms = None if until is None else _time_ms(until)
    is_wanted = partial(_matches, topics) if topics else None
    began_s = time.monotonic()
    with archive_errors(), byte_progress(_expected_bytes(archive), "Restoring") as progress:
        read = BytesRead(progress)
        point, damage = restore_folder(
            without_secrets(archive),
            data_path.absolute(),
            until_ms=until_ms,
            is_wanted=is_wanted,
            on_read=read,
        )
    took_s = time.monotonic() - began_s
    write_lines(
        [f"{data_path}: the state of {shown_time(point.time_ms)}, {size(read.count)} read in {took_s:.1f} s"]
    )
    for what in damage:
        print_diagnostic(f"Error: {what}: messages are missing.")
    return ExitCode.DAMAGED if damage else ExitCode.OK


def _matches(patterns: tuple[str, ...], topic: str) -> bool:
    return any(fnmatchcase(topic, pattern) for pattern in patterns)


def _time_ms(until: str) -> int:
    now_ns = time.time_ns()
    found = time_of(until, now_ns)
    if found is None:
        raise click.UsageError(f"--until: {until} is no time.")
    return found // _NS_PER_MS


def _expected_bytes(archive: str) -> int:
    """Return about how many bytes are read."""
    from trio_nsq.archive.manifest import complete_checkpoints
    from trio_nsq.archive.segments import read_segments

    storage = storage_of(archive)
    newest = complete_checkpoints(storage)[-1]
    return newest.size_bytes + sum(each.size for each in read_segments(storage, newest).values())
