"""`qcli replay`: publishes the messages of a topic's log, or of Parquet files, to another topic."""

from pathlib import Path

import click

from ...broker.address_options import (
    HTTP_OPTION,
    TCP_OPTION,
    http_addresses,
    lookupd_addresses,
    tcp_addresses,
)
from ...broker.connection_options import tcp_connection
from ...broker.name_completion import complete_topic
from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode
from ...framework.options import count_option, max_msg_size_option, option, options_as, rate_option
from ...framework.params import Integer, topic_name
from ...framework.positions import POSITIONS_NOTE, BrokerPosition, range_options
from ...records.jobs import FilesReplayRecord, TopicReplayRecord
from ..shared.engine import engine_options
from .options import Pattern, ReplayOptions, Speed, complete_replayed, destination, job_name, replayed

SELECTION, SENDING, FILES = "Which messages", "Sending", "Parquet files"
TABLES = "Tables"


@click.command(
    "replay",
    cls=DocumentedCommand,
    short_help="Publish messages of a topic or of Parquet files again.",
    examples={
        "publish the last two hours to a topic of their own": "qcli replay clicks clicks.again --from 2h",
        "publish a day's messages in an hour, with their original spacing": "qcli replay clicks test --from 24h "
        "--speed 24x",
        "replay what all brokers of a cluster received in the last hour": "qcli replay clicks clicks.again --from 1h "
        "--lookupd-http-address 127.0.0.1:4161",
        "copy to another broker": "qcli replay clicks clicks --from 1h --nsqd-http-address prod:4151 "
        "--nsqd-tcp-address test:4150",
        "publish the files that to-parquet wrote": "qcli replay ./archive clicks.again --since 7d --until 6d",
        "publish a range of time at 500 messages per second": "qcli replay clicks test --from "
        "2026-11-21T04:00 --to 2026-11-21T05:00 --rate 500",
        "publish only matching messages": "qcli replay clicks errors --match '\"status\": *5..'",
        "count the rows of files that a condition selects": 'qcli replay ./archive errors --where "body LIKE '
        "'%error%'\" --dry-run",
        "publish other Parquet files, a day in an hour": "qcli replay ./events test --body-column payload "
        "--time-column created --speed 24x",
        "publish a Delta table as it was at noon": "qcli replay ./table clicks.again --delta --as-of 2026-11-21T12:00",
        "publish an Iceberg table": "qcli replay prod/events.clicks clicks.again --iceberg",
        "resume an interrupted job": "qcli replay --job 20261121-181500-3f9a1c",
    },
    exits={
        ExitCode.OK: "All messages were published and acknowledged.",
        ExitCode.FAILURE: "Nothing was published: there is no such topic, there are no suitable files, or a broker "
        "refused.",
        ExitCode.UNREACHABLE: f"{ExitCode.UNREACHABLE.meaning} Or the connection was lost before any message was "
        "acknowledged.",
        ExitCode.PARTIAL: "Some messages were acknowledged before a failure; standard error says how to continue. Or "
        "some messages were too long, and all others were published.",
        ExitCode.DAMAGED: "Damaged messages were skipped; standard error says which. All others were published.",
        ExitCode.INTERRUPTED: "Interrupted (SIGINT). Standard error says how to continue.",
        ExitCode.TERMINATED: "Terminated (SIGTERM). Standard error says how to continue.",
    },
    details={
        "Published messages": "Bodies are published as new messages, with new ids and times, to all channels of the "
        "destination, without their original delays. Messages are read from the topic's log, whether or not they "
        "were finished, and the topic's channels do not change. The end is fixed at the start, so a topic may be "
        "replayed into itself. To redeliver messages to one channel, see 'qcli channel seek'.",
        "Interruption": "At a signal, or if the destination fails, the command waits for outstanding "
        "acknowledgements and prints the command line that continues from there. If the connection to the source is "
        "lost, it reconnects. If an acknowledgement was lost, messages may be published twice.",
        "Several brokers": "The topic is replayed from one broker after the other. The messages of each return to the "
        f"same broker, unless {TCP_OPTION} names one broker for all of them, or as many as {HTTP_OPTION}, in "
        "the same order. -n is the number for all. If a broker fails, the others are replayed all the same; standard "
        "error says how to continue with each.",
        "Topic or files": "A SOURCE with a slash is a folder, a file or a URL. Without a slash it is a topic, even if "
        "a folder has this name: write ./NAME for the folder. '.' and '..' are folders, too; to replay a topic with "
        "such a name, pipe 'qcli tail . --from earliest --to latest --format json' into 'qcli pub --format json "
        "DESTINATION'. A folder is read with all files below it that end in .parquet: exports of to-parquet, or other "
        "files with a column of bodies. If a folder holds several topics, --from-topic selects one.",
        "Tables": "Without --delta or --iceberg, the folder of a table is refused: files of its older versions have "
        "the same messages again. Deleted rows that are still in files (deletion vectors, delete files) are refused. "
        "--delta needs the extra 'delta' (deltalake), --iceberg the extra 'iceberg' (pyiceberg).",
        "Jobs": "A replay of files is a job: before it begins, its messages and batches are saved under a name, which "
        "is printed. --job NAME resumes it after any interruption. Batches are numbered, and 'qcli serve' stores each "
        "batch once, even if it is sent again. With --nsqd-http-address, the job goes on "
        "at another address of the same broker. nsqd ignores the numbers: there, delivery is at least once. Data of "
        "a complete job is kept for 7 days.",
        "Order of files": "Several parts of the files are published in parallel, without an order. With --ordered or "
        "--speed they are published one after the other, by time and sequence.",
        "--where": "A condition in SQL on the columns of the files: body, ts, seq, ..., those of JSON exports, and "
        "date and hour of folders. It is evaluated once, when the job begins; binary columns are text, times are UTC. "
        "DuckDB evaluates it (pip install duckdb). With --engine spark or --master it is Spark SQL.",
        "Positions": POSITIONS_NOTE + " Files have times only.",
        "JSON": "For files, one object: job, source, topic, engine, dry_run, published, published_bytes, before and "
        "before_bytes (published by an earlier run), maybe_twice, unmatched, without_body, too_long, left_out, rows, "
        "files, pieces, pieces_done, remembered (whether the broker stores numbered batches once), elapsed_s. For "
        "topics, an object for each broker: broker (only if there are several), source, topic, dry_run, published, "
        "published_bytes, left_out, missing, damaged, first_sequence, next_sequence, end_sequence, elapsed_s.",
    },
)
@click.argument("source", metavar="SOURCE", required=False, type=replayed, shell_complete=complete_replayed)
@click.argument(
    "topic", metavar="DESTINATION", required=False, type=destination, shell_complete=complete_topic
)
@tcp_addresses("Publish a topic's messages to this broker; files are published over HTTP.")
@http_addresses("Read a topic from these brokers, or publish files to one.")
@lookupd_addresses("Read a topic from all brokers that these nsqlookupd list.")
@tcp_connection
@range_options(SELECTION)
@count_option(SELECTION, "End after publishing N messages (topics only).")
@option(
    SELECTION,
    "--match",
    "pattern",
    type=Pattern(),
    metavar="REGEX",
    help="Publish only messages in whose body this regular expression is found.",
)
@rate_option(SENDING)
@option(
    SENDING,
    "--speed",
    type=Speed(),
    metavar="FACTOR",
    help="Keep the original spacing in time: 1x, or 2x for half the time.",
)
@option(SENDING, "--dry-run", is_flag=True, help="Count messages, and publish nothing.")
@option(
    FILES,
    "--where",
    metavar="SQL",
    help="Publish only rows that meet this condition in SQL, such as \"body LIKE '%error%'\".",
)
@option(
    FILES,
    "--ordered",
    is_flag=True,
    help="Publish in the order of time and sequence, and not in parallel. Topics are always in order.",
)
@option(
    FILES,
    "--from-topic",
    "from_topics",
    type=topic_name,
    multiple=True,
    metavar="TOPIC",
    help="Publish only messages of this topic. May be repeated.",
)
@option(
    FILES,
    "--body-column",
    metavar="NAME",
    brief=True,
    help="Read bodies from this column, binary or strings. The default is body.",
)
@option(
    FILES,
    "--time-column",
    metavar="NAME",
    brief=True,
    help="Read times from this column, timestamps or Unix nanoseconds, of files that to-parquet did not write.",
)
@max_msg_size_option(FILES, "Longer messages are counted and not published.")
@option(
    FILES,
    "--job",
    type=job_name,
    metavar="NAME",
    help="Resume this job. With SOURCE and DESTINATION, begin a new job under this name.",
)
@option(
    FILES,
    "--jobs-folder",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    envvar="QCLI_JOBS_FOLDER",
    brief=True,
    help="Keep jobs in this folder. The default is ~/.local/state/qcli/replay.",
)
@option(
    FILES,
    "--publish-missing",
    is_flag=True,
    brief=True,
    help="With --job, publish again what the broker has lost since: it was restored from a backup, or the topic was "
    "deleted. Without this option or --allow-gaps, that ends the command.",
)
@option(
    FILES,
    "--allow-gaps",
    is_flag=True,
    brief=True,
    help="With --job, go on without the messages that the broker has lost since.",
)
@option(TABLES, "--delta", is_flag=True, help="SOURCE is a Delta table: publish the rows of its files.")
@option(
    TABLES,
    "--iceberg",
    is_flag=True,
    help="SOURCE is an Iceberg table, CATALOG/NAMESPACE.TABLE, in a catalog that pyiceberg is configured for.",
)
@option(
    TABLES,
    "--table-version",
    type=Integer(min=0),
    metavar="N",
    help="Publish this version of a Delta table, or this snapshot (its id) of an Iceberg table.",
)
@option(
    TABLES,
    "--as-of",
    type=BrokerPosition(),
    metavar="TIME",
    help="Publish the version of the table that was current at this time: 2026-11-21T12:00, or 2h for two hours ago.",
)
@engine_options(
    "the files and the broker",
    "report",
    "Each publishes one piece at a time. Default: 1.",
    records=[TopicReplayRecord, FilesReplayRecord],
)
@options_as(ReplayOptions)
def command(options: ReplayOptions) -> int:
    """Publish messages of a topic, from its log, or of Parquet files, to another topic.

    SOURCE is a topic, or files if it has a slash in it. A topic is published in order, files in parallel. At the end
    the command reports the numbers of messages on standard error.
    """
    options.check()
    if options.is_of_topic:
        from .topic import replay_topic

        return replay_topic(options)
    request = options.request()

    from ..shared.engine import check_extra

    check_extra("replay of files")

    from .files import replay_files

    return replay_files(request, options)
