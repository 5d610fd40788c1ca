"""`qcli archive prune`: removes old states from an archive."""

from __future__ import annotations

import time

import click

from trio_nsq.text.wording import count_of

from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode
from ...framework.options import option
from ...framework.output import write_lines
from ...framework.params import long_duration
from .places import archive_errors, storage_of


@click.command(
    "prune",
    cls=DocumentedCommand,
    short_help="Remove old states from an archive.",
    examples={
        "keep what is needed to restore any state of the last month": "qcli archive prune s3://bucket/nsq --keep 30d",
        "see what that would remove": "qcli archive prune s3://bucket/nsq --keep 30d --dry-run",
    },
    exits={
        ExitCode.OK: "Older states are removed, or there were none.",
        ExitCode.FAILURE: "There is no archive, or it cannot be read or written. Run the same command again.",
        ExitCode.DAMAGED: "The manifest is damaged; nothing was removed.",
    },
    details={
        "Removed": "Checkpoints, and operations behind them, that no restore of a state since then needs; also what is"
        " left of checkpoints that were not finished. The newest checkpoint always stays. Archived segments"
        " stay: they are the history of topics, which 'qcli to-parquet --from-segments' reads. A broker may"
        " be writing to the archive.",
    },
)
@click.argument("archive", metavar="ARCHIVE")
@option(
    "Prune",
    "--keep",
    required=True,
    type=long_duration,
    metavar="DURATION",
    help="Keep what is needed to restore any state of this time until now, such as 30d.",
)
@option("Prune", "--dry-run", is_flag=True, help="Only say what would be removed.")
def command(archive: str, keep: int, dry_run: bool) -> int:
    """Remove what is not needed any more to restore the states of the last days.

    ARCHIVE is a folder, or a URL such as s3://bucket/nsq, as given to 'qcli serve --archive'.
    """
    from trio_nsq.archive.pruning import prune
    from trio_nsq.archive.restore import shown_time

    from_ms = int(time.time() * 1000) - keep
    with archive_errors():
        storage = storage_of(archive)
        pruned = prune(storage, from_ms, dry_run=dry_run)
    verb = "would be removed" if dry_run else "removed"
    what = f"{count_of(pruned.checkpoints, 'checkpoint')} and {count_of(pruned.objects, 'object')} {verb}"
    write_lines([f"{storage.shown}: {what}; states since {shown_time(pruned.from_ms)} can be restored"])
    return ExitCode.OK
