"""`qcli to-file`: writes the messages of topics to files."""

import signal
from pathlib import Path

import click

from ...framework.errors import ExitCode
from ...framework.go_flags import GoFlagsCommand
from ...framework.options import delimiter_options, option, options_as
from ...framework.params import Boolean, Integer, duration, positive_duration
from ...records.messages import MessageRecord
from ..shared.consuming import consuming_options
from .options import COMPRESSIONS, FileCommand, file_size

FILES, NAMES, FORMAT = "Files", "Names", "Format"
_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command(
    "to-file",
    cls=GoFlagsCommand,
    short_help="Write the messages of topics to files.",
    examples={
        "write a file per hour, one message per line": "qcli to-file clicks --output-dir /var/spool/nsq",
        "compress, and begin a file at 1 GB": "qcli to-file clicks --output-dir /var/spool/nsq --compression zstd "
        "--rotate-size 1GB",
        "write all topics of a discovery service": "qcli to-file --topic-pattern . --output-dir /var/spool/nsq "
        "--lookupd-http-address 127.0.0.1:4161",
        "show only finished files, one per day": "qcli to-file clicks --output-dir /var/spool/nsq --work-dir "
        "/var/spool/nsq-open --datetime-format %Y-%m-%d --skip-empty-files",
        "keep bodies with line feeds, and publish them again": "qcli to-file clicks --output-dir ./archive --framing "
        "length",
        "write JSON objects with id, time and body": "qcli to-file clicks --output-dir ./archive --format json",
    },
    exits={
        ExitCode.FAILURE: "A folder cannot be written, another process writes the same files, or a broker refused.",
        ExitCode.PARTIAL: "A broker's log is a copy of another one, and both have got messages since.",
        ExitCode.DAMAGED: "A checkpoint is damaged; standard error says which.",
        ExitCode.INTERRUPTED: "Interrupted (SIGINT). All received messages are in files, and the files are finished.",
        ExitCode.TERMINATED: "Terminated (SIGTERM). All received messages are in files, and the files are finished.",
    },
    details={
        "Delivery": "A broker of this project is read by the position in its log, exactly once: the position is stored "
        "in OUTPUT/.qcli-to-file together with the length of the open file, after both file and folder are synced. "
        "After a kill or a power failure the next run removes what is not stored from the file, and reads it again. "
        "Only a power cut of a broker with --sync=interval, which loses its last messages, can make copies. "
        "The channel shows the position on the broker: its depth is the lag. An nsqd, or any broker with "
        "--at-least-once, is a consumer's channel: messages are finished after the sync, so that none is lost, and "
        "some may be written twice.",
        "Names": "In --filename-format <TOPIC>, <HOST>, <PID>, <DATETIME> and <REV> are replaced. The time is local. "
        "<REV> is a number such as -000000, which grows while a name is taken; it is left out unless --compression, "
        "--rotate-size, --rotate-interval or --work-dir is given, which need it. Slashes make folders. No file is ever "
        "replaced. A compressed file has the suffix .part until it is finished.",
        "Rotation": "A file ends when its name changes with the time, when it has more than --rotate-size bytes before "
        "compression, after --rotate-interval, at SIGHUP and at the end of the command. If another program renames or "
        "removes the open file, the next sync notices this, and the messages after it go to a new file.",
        "Failing disks": "If the disk is full or fails, the command warns once, receives no more messages, and waits. "
        "It writes nothing twice when the disk works again. Nothing is lost if it is ended meanwhile.",
        "Compression": "Each sync ends a gzip member or a zstd frame, so a file can be read up to the last sync. "
        "Tools such as zcat and zstdcat read the members one after the other. zstd needs the extra 'zstd'.",
        "Length framing": "With --framing length each body follows its length, an unsigned 32-bit big-endian integer, "
        "as in an NSQ message set: any bytes are safe. 'qcli pub --framing length' reads such files.",
        "JSON": "With --format json each line is an object with the fields of 'qcli tail --format json', which "
        "'qcli pub --format json' reads.",
        "nsq_to_file": "The options of nsq_to_file have the same names, with one dash or two. --gzip is --compression "
        "gzip. Other defaults: the current folder instead of /tmp, and --max-in-flight 2500 instead of 200.",
    },
)
@consuming_options("nsq_to_file", max_in_flight=2500)  # a sync costs the same for all messages in flight
@option(
    FILES,
    "--output-dir",
    type=_FOLDER,
    default=".",
    show_default=False,
    metavar="FOLDER",
    help="Write files to this folder, which is created if it is missing. The default is the current folder.",
)
@option(
    FILES,
    "--work-dir",
    type=_FOLDER,
    metavar="FOLDER",
    help="Write open files to this folder, on the same file system, and move them when they are finished.",
)
@option(
    FILES,
    "--rotate-size",
    type=file_size,
    default="0",
    metavar="SIZE",
    show_default=False,
    help="Begin another file when one has more than this many bytes before compression.",
)
@option(
    FILES,
    "--rotate-interval",
    "rotate_interval_ms",
    type=duration,
    default="0",
    show_default=False,
    help="Begin another file after this time.",
)
@option(
    FILES,
    "--sync-interval",
    "sync_interval_ms",
    type=positive_duration,
    default="30s",
    help="Sync files at least at this interval. Messages count as done after that.",
)
@option(
    FILES,
    "--skip-empty-files",
    type=Boolean(),
    default="false",
    alone="true",
    metavar="[=BOOL]",
    show_default=False,
    help="Create a file only when there is a message for it.",
)
@option(
    NAMES,
    "--filename-format",
    default="<TOPIC>.<HOST><REV>.<DATETIME>.log",
    metavar="FORMAT",
    help="Name files like this; <PID> is replaced too.",
)
@option(
    NAMES,
    "--datetime-format",
    default="%Y-%m-%d_%H",
    metavar="FORMAT",
    help="Replace <DATETIME> with the time in this strftime format.",
)
@option(
    NAMES,
    "--host-identifier",
    default="",
    metavar="TEXT",
    brief=True,
    help="Replace <HOST> with this text, in which <SHORT_HOST> and <HOSTNAME> are replaced. The default is "
    "<SHORT_HOST>.",
)
@option(
    FORMAT,
    "--compression",
    type=click.Choice(COMPRESSIONS),
    help="Compress files, and append .gz or .zst to their names.",
)
@option(
    FORMAT,
    "--compression-level",
    type=Integer(min=1),
    brief=True,
    help="Compress with this level. The default is 6 for gzip and 3 for zstd.",
)
@option(
    FORMAT, "--gzip", type=Boolean(), default="false", alone="true", hidden=True, help="--compression gzip."
)
@option(FORMAT, "--gzip-level", type=Integer(1, 9), hidden=True, help="--compression-level of gzip.")
@option(
    FORMAT,
    "--format",
    "form",
    type=click.Choice(["raw", "json"]),
    default="raw",
    help="raw: write bodies unchanged. json: write an object per line, as 'qcli tail' does.",
    records=(MessageRecord,),
)
@option(
    FORMAT,
    "--framing",
    type=click.Choice(["delimiter", "length"]),
    default="delimiter",
    help="delimiter: write --delimiter after each body. length: write its length before each body.",
)
@delimiter_options(FORMAT, "Write this text after each body", "for xargs -0")
@option("Output", "--quiet", "-q", is_flag=True, help="Print warnings and errors only.")
@option("Output", "--log-level", default="", metavar="LEVEL", hidden=True, help="Has no effect; see --quiet.")
@option("Output", "--log-prefix", default="", metavar="TEXT", hidden=True, help="Has no effect.")
@options_as(FileCommand)
def command(options: FileCommand) -> int:
    """Write the messages of topics to files until interrupted, each topic to its own files.

    Messages are read from the log of a broker of this project, exactly once, or from a channel of an nsqd, at least
    once. A kill at any moment loses nothing and leaves no incomplete file. SIGHUP finishes the open files.
    """
    before = signal.signal(
        signal.SIGHUP, signal.SIG_IGN
    )  # until files are open: logrotate may send it at any time
    try:
        sources = options.consuming.source_options()
        settings = options.options()

        from .run import run

        return run(options.consuming, sources, settings, quiet=options.quiet)
    finally:
        signal.signal(signal.SIGHUP, before)
