"""The command line of `qcli replay`: value types, all values as one object, and checks."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...broker.address_options import HTTP_OPTION, TCP_OPTION, check_tcp_address
from ...broker.brokers import Brokers, brokers_with_logs, chosen, is_as_near
from ...broker.name_completion import complete_topic
from ...contexts.choice import require_address
from ...framework.errors import Failure
from ...framework.options import given_flags
from ...framework.params import Source, source, topic_name
from ...framework.positions import check_range, time_of
from ..shared.engine import check_engine
from ..shared.places import without_secrets

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from trio_nsq.spark.replay.request import ReplayRequest


class Speed(click.ParamType[float]):
    """A speed factor, such as `2x` or `0.5x`."""

    name = "speed"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)x?", str(value))
        if found is None or not float(found[1]):
            self.fail(f"{value!r} is not a speed such as 1x, 2x or 0.5x.", param, ctx)
        return float(found[1])


class Pattern(click.ParamType["re.Pattern[bytes]"]):
    """A regular expression for bytes."""

    name = "regex"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> re.Pattern[bytes]:
        try:
            return re.compile(os.fsencode(value))
        except re.error as error:
            self.fail(f"{value!r} is not a regular expression: {error}.", param, ctx)


def is_place(text: str) -> bool:
    """Return whether the text is a place of files; names of topics have no slash."""
    return "/" in text or text in (".", "..")


def refuse_channel(place: str, topic: str) -> None:
    """Raises Failure if a place that does not exist looks like a channel."""
    if place.startswith(".") or Path(place).exists():
        return
    try:
        found: Source = source(place)
    except click.BadParameter:
        return
    raise Failure(
        f"There is no folder or file {place}. To replay a topic: 'qcli replay "
        f"{found.topic} {topic}'. To deliver messages to a channel again: 'qcli channel seek'."
    )


def replayed(text: str) -> str:
    """Parse the name of a topic, or a place of files."""
    return text if is_place(text) else topic_name(text)


def complete_replayed(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete topics, or files if the text begins with a dot or has a slash."""
    from click.shell_completion import CompletionItem

    if incomplete.startswith(".") or "/" in incomplete:
        return [CompletionItem(incomplete, type="file")]
    return complete_topic(ctx, param, incomplete)


def job_name(text: str) -> str:
    from trio_nsq.spark.replay.request import JOB_NAME

    if JOB_NAME.fullmatch(text) is None:
        raise click.BadParameter(
            f"{text!r} is not a job name: 1 to 40 of the characters A-Z a-z 0-9 . _ -, a letter or digit first."
        )
    return text


def destination(text: str) -> str:
    found: Source = source(text)
    if found.channel is not None:
        raise click.BadParameter(
            f"{text!r} is a channel. To deliver messages to it again, see 'qcli channel seek'."
        )
    return found.topic


_OF_FILES = (
    *("where", "from_topics", "body_column", "time_column", "max_msg_size", "job", "jobs_folder"),
    *("engine", "master", "processes", "delta", "iceberg", "table_version", "as_of", "publish_missing"),
    "allow_gaps",
)
"""Options for files only."""
_OF_JOBS = (
    *("first", "end", "count", "pattern", "rate", "speed", "ordered", "where", "from_topics", "body_column"),
    *("time_column", "max_msg_size", "dry_run"),
    *("delta", "iceberg", "table_version", "as_of"),
)
"""Options that are saved in a job. The address of the broker is saved, too, and may change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """The parameters of the command.

    `source` is a topic or a place of files; without it, and without `topic`, the job `job` is resumed.
    """

    source: str | None
    topic: str | None
    nsqd_tcp_addresses: tuple[str, ...]
    nsqd_http_addresses: tuple[str, ...]
    lookupd_addresses: tuple[str, ...]
    lookupd_allowed_hosts: tuple[str, ...]
    first: str | None
    end: str | None
    count: int | None
    pattern: re.Pattern[bytes] | None
    rate: float | None
    speed: float | None
    dry_run: bool
    where: str | None
    ordered: bool
    from_topics: tuple[str, ...]
    body_column: str | None
    time_column: str | None
    max_msg_size: int
    job: str | None
    jobs_folder: Path | None
    publish_missing: bool
    allow_gaps: bool
    delta: bool
    iceberg: bool
    table_version: int | None
    as_of: str | None
    engine: str
    master: str | None
    processes: int | None
    form: str
    quiet: bool

    @property
    def is_of_topic(self) -> bool:
        """Whether to replay a topic, and not files."""
        return self.source is not None and self.topic is not None and not is_place(self.source)

    @property
    def jobs(self) -> Path:
        return (self.jobs_folder or default_jobs_folder()).absolute()

    def check(self) -> None:
        """Raises UsageError for options that exclude each other or do not match the source."""
        if self.rate is not None and self.speed is not None:
            raise click.UsageError("--rate and --speed exclude each other.")
        check_range(self.first, self.end)
        self._check_table()
        if self.publish_missing and self.allow_gaps:
            raise click.UsageError("--publish-missing and --allow-gaps exclude each other.")
        if self.source is None and self.job is None:
            raise click.UsageError("Missing argument 'SOURCE'.")
        if self.source is not None and self.topic is None:
            raise click.UsageError("Missing argument 'DESTINATION'.")
        if self.source is None:
            if flags := given_flags(*_OF_JOBS):
                raise click.UsageError(
                    f"--job resumes a job with its original options: leave out {flags[0]}."
                )
        elif self.is_of_topic and (flags := given_flags(*_OF_FILES)):
            raise click.UsageError(
                f"{flags[0]} is for Parquet files, and {self.source} is a topic. For a folder, write ./{self.source}."
            )

    def _check_table(self) -> None:
        """Raises UsageError for options of tables that exclude each other, or do not match the source."""
        if self.delta and self.iceberg:
            raise click.UsageError("--delta and --iceberg exclude each other.")
        if self.table_version is not None and self.as_of is not None:
            raise click.UsageError("--table-version and --as-of exclude each other.")
        if not self.delta and not self.iceberg and (flags := given_flags("table_version", "as_of")):
            raise click.UsageError(f"{flags[0]} is for tables: give --delta or --iceberg.")
        if self.as_of is not None and time_of(self.as_of, 0) is None:
            raise click.UsageError(f"--as-of {self.as_of} is not a time.")
        if self.iceberg and self.source is not None:
            from trio_nsq.spark.tables.target import TableTarget

            try:
                TableTarget.iceberg(self.source)
            except ValueError as error:
                raise click.UsageError(f"{error}.") from None

    def brokers(self) -> Brokers:
        """Return the brokers whose logs to replay. Raises UsageError as `brokers_with_logs`."""
        return brokers_with_logs(self.lookupd_allowed_hosts, self.first, self.end)

    def destinations(self, brokers: Brokers) -> dict[str, str | None]:
        """Return the TCP address to which the messages of each broker go, by HTTP address; None: to the same broker.

        Raises UsageError: the numbers of addresses differ, or an address is wrong.
        """
        tcp, http = self.nsqd_tcp_addresses, brokers.addresses
        for address in tcp:
            check_tcp_address(address)
        if brokers.is_fleet and not is_as_near(
            "nsqd_tcp_addresses", "nsqd_http_addresses", "lookupd_addresses"
        ):
            return dict.fromkeys(http)
        if not self.dry_run:
            require_address(tcp, TCP_OPTION)
        if len(tcp) <= 1:
            return dict.fromkeys(http, *tcp)
        if len(tcp) != len(brokers.given) or brokers.lookupds:
            raise click.UsageError(
                f"{TCP_OPTION} names {len(tcp)} brokers: give one for all messages, or one for each address of "
                f"{HTTP_OPTION}, in the same order, or none."
            )
        pairs = dict(zip(brokers.given, tcp, strict=True))
        return {address: pairs[address] for address in http}

    def _broker_for_files(self) -> str:
        """Return the broker to which files are published. Raises UsageError: there are several."""
        brokers = Brokers(*chosen(click.get_current_context()))
        if brokers.is_fleet:
            raise click.UsageError(f"Files are published to one broker: give one address with {HTTP_OPTION}.")
        return brokers.addresses[0]

    def new_address(self) -> str | None:
        """Return the broker to which a resumed job publishes now; None: the same address. Raises UsageError."""
        if self.source is None and given_flags("nsqd_http_addresses"):
            return self._broker_for_files()
        return None

    def request(self) -> ReplayRequest | None:
        """Return the request to replay files; None: the saved request of the job.

        Raises:
            click.UsageError: The options do not match files.
            Failure: The source is a channel.
        """
        from trio_nsq.spark.replay.request import ReplayRequest
        from trio_nsq.storage import absolute_place

        request = None
        if self.source is not None and self.topic is not None:
            if not self.iceberg:
                refuse_channel(self.source, self.topic)
            if self.count is not None:
                raise click.UsageError("-n is for topics: files are read in parallel, without an order.")
            now_ns = time.time_ns()
            request = ReplayRequest(
                self.source if self.iceberg else absolute_place(without_secrets(self.source)),
                self.topic,
                self._broker_for_files(),
                self.from_topics,
                self.body_column,
                self.time_column,
                self.first,
                self.end,
                _time(self.first, now_ns, "earliest"),
                _time(self.end, now_ns, "latest"),
                self.where,
                None if self.pattern is None else os.fsdecode(self.pattern.pattern),
                self.ordered or self.speed is not None,
                self.rate,
                self.speed,
                self.max_msg_size,
                "delta" if self.delta else "iceberg" if self.iceberg else None,
                self.table_version,
                self.as_of,
                None if self.as_of is None else time_of(self.as_of, now_ns),
            )
        check_engine(self.engine, self.master, self.processes)
        if self.dry_run and self.job is not None:
            raise click.UsageError("--dry-run and --job exclude each other: a dry run begins no job.")
        return request


def default_jobs_folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "qcli" / "replay"


def _time(position: str | None, now_ns: int, no_bound: str) -> int | None:
    """Return the time of a position in files, Unix nanoseconds; None: no limit."""
    if position in (None, no_bound):
        return None
    if position == "latest":
        return now_ns
    if position == "earliest" or (found := time_of(position, now_ns)) is None:
        raise click.UsageError(
            f"{position} is not a time, and files have no positions. To select exported sequences: --where 'seq >= "
            "1000'."
        )
    return found
