"""The command line of `qcli to-parquet`: all values as one object, and checks."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...broker.address_options import (
    HTTP_OPTION,
    LOOKUPD_OPTION,
    TCP_OPTION,
    check_tcp_address,
)
from ...broker.connection_options import ConnectOptions
from ...contexts.choice import require_address
from ...framework import params
from ...framework.options import given, given_flags
from ...framework.positions import check_range
from ..shared.engine import check_engine
from ..shared.places import without_secrets
from .bodies import BodyOptions
from .field_options import TIME_LEVELS, time_level

if TYPE_CHECKING:
    from trio_nsq.spark.export.request import ExportRequest
    from trio_nsq.spark.logs import LogPlace
    from trio_nsq.spark.schemas.column_types import ColumnType
    from trio_nsq.spark.tables.target import TableTarget

TOPIC_PLACE = "{topic}"
"""What a topic's name replaces in FOLDER and in the name of an Iceberg table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToParquetOptions(BodyOptions):
    """The parameters of the command.

    `resolve` returns them with the final values of `consume`, `spool`, `engine` and `lookupd_addresses`.
    """

    topics: tuple[str, ...]
    folder: str
    topic_pattern: str | None
    topic_refresh_ms: int
    config: Path | None
    check_config: bool
    nsqd_http_addresses: tuple[str, ...]
    lookupd_addresses: tuple[str, ...]
    lookupd_allowed_hosts: tuple[str, ...]
    tcp_addresses: tuple[str, ...]
    from_segments: tuple[str, ...]
    first: str | None
    end: str | None
    channel: str | None
    follow: bool
    every_ms: int
    max_age_ms: int | None
    http_address: str | None
    max_lag_ms: int | None
    consume: bool
    spool: Path | None
    idle_timeout_ms: int
    max_in_flight: int
    contract: str | None
    dead_letter_topic: str | None
    print_schema: bool
    where: str
    masks: tuple[tuple[str, str], ...]
    partition_by: tuple[str, ...]
    event_time: tuple[str, ColumnType | None] | None
    sort_by: tuple[tuple[str, bool], ...]
    target_bytes: int
    row_group_bytes: int
    compression: str
    compression_level: int | None
    delta: bool
    iceberg: TableTarget | None
    compact: bool
    key: tuple[str, ...]
    op: str
    engine: str
    master: str | None
    processes: int | None
    form: str
    quiet: bool

    @property
    def is_of_one_topic(self) -> bool:
        """Whether FOLDER is that of the only topic."""
        return self.topic_pattern is None and len(self.topics) == 1

    @property
    def topic(self) -> str:
        """The only topic."""
        (topic,) = self.topics
        return topic

    @property
    def broker_addresses(self) -> tuple[str, ...]:
        """The brokers' HTTP addresses, or TCP addresses to consume a channel; unused with discovery services."""
        return self.tcp_addresses if self.consume else self.nsqd_http_addresses

    @property
    def interval_s(self) -> float | None:
        """The interval between the starts of two rounds; None: there is only one round."""
        return self.every_ms / 1000 if self.follow else None

    def check(self) -> None:
        """Raises UsageError for options that exclude each other in any mode."""
        self.check_bodies()
        self._check_schema()
        if not self.has_columns and (self.event_time or set(self.partition_by) - set(TIME_LEVELS)):
            raise click.UsageError("--partition-by and --event-time take fields of bodies: say --json.")
        if self.event_time and time_level(self.partition_by) == "none" and self.iceberg is None:
            raise click.UsageError("--event-time is for --partition-by date or hour.")
        if self.masks and self.form_of_bodies != "json":
            raise click.UsageError("--mask takes fields of JSON bodies: say --json.")
        if self.channel is not None and self.first is not None:
            raise click.UsageError(
                "--channel and --from exclude each other: the export begins at the channel's position. To move it, use "
                "'qcli channel seek'."
            )
        if self.follow and self.end is not None:
            raise click.UsageError("--follow and --to exclude each other: --follow has no end.")
        check_engine(self.engine, self.master, self.processes)
        if self.compression_level is not None and self.compression not in ("zstd", "gzip", "brotli"):
            raise click.UsageError(f"--compression-level has no effect with {self.compression}.")
        if self.delta and self.iceberg:
            raise click.UsageError("--delta and --iceberg exclude each other.")
        if self.compact and not self.delta and not self.iceberg:
            raise click.UsageError("--compact merges files of a table: give --delta or --iceberg.")
        self._check_key()
        if self.compact and self.sort_by:
            raise click.UsageError(
                "--compact and --sort-by exclude each other: the rows of merged files would not be sorted."
            )
        if self.key and self.sort_by:
            raise click.UsageError(
                "--key and --sort-by exclude each other: files are written again with the rows that they keep."
            )
        check_range(self.first, self.end)
        for topic in self.topics or ["any"]:
            if self.channel is not None:
                params.source(f"{topic}/{self.channel}")
        if self.max_age_ms is not None and not self.follow:
            raise click.UsageError(
                "--max-age is for --follow: without it, all messages are exported at once."
            )
        if given("every_ms") and not self.follow:
            raise click.UsageError("--every is for --follow: without it there is one round.")
        for flag in given_flags("http_address", "max_lag_ms"):
            if not self.follow:
                raise click.UsageError(f"{flag} is for --follow: other exports end, and tell the result.")
        if self.max_lag_ms is not None and self.http_address is None:
            raise click.UsageError("--max-lag is for /healthz: give --http-address.")
        self._check_topics()

    def _check_schema(self) -> None:
        """Raises UsageError for options that contradict those of the schema."""
        if self.schema and not self.has_columns:
            text = "--text" if self.text else f"--body-format {self.body_format}"
            raise click.UsageError(f"--schema describes columns, and {text} has none: leave one out.")
        if self.schema and self.columns and self.form_of_bodies == "json":
            raise click.UsageError("--schema and --columns exclude each other: both have the columns.")
        self.schema_fields()
        if self.contract and not self.has_columns:
            raise click.UsageError("--schema-contract is for columns of fields: give --json or --schema.")
        if self.dead_letter_topic is not None:
            self._check_dead_letters()
        if self.print_schema and (self.schema or self.text):
            raise click.UsageError("--print-schema infers a schema: leave out --schema and --text.")
        if self.print_schema and not self.is_of_one_topic:
            raise click.UsageError("--print-schema is for one topic.")

    def _check_key(self) -> None:
        """Raises UsageError for options that contradict a table with a key."""
        if self.op and not self.key:
            raise click.UsageError("--op says what a message does to the row of its key: give --key, too.")
        if not self.key:
            return
        if not self.delta and not self.iceberg:
            raise click.UsageError(
                "--key replaces and removes rows of a table, and files of a folder do not change: give --delta or "
                "--iceberg. Without a table, select the newest row of each key when reading the files."
            )
        if not self.has_columns:
            raise click.UsageError("--key takes fields of bodies: say --json.")
        if self.contract == "discard-value":
            raise click.UsageError(
                "--key and --schema-contract discard-value exclude each other: a row needs its key. Choose discard-row."
            )

    def _check_dead_letters(self) -> None:
        """Raises UsageError if messages cannot go to a dead-letter topic."""
        if not self.has_columns and not self.text:
            raise click.UsageError(
                "--dead-letter-topic is for messages that do not fit: give --json, --schema or --text."
            )
        if self.contract in ("freeze", "discard-value"):
            raise click.UsageError(
                f"--dead-letter-topic and --schema-contract {self.contract} exclude each other: no message is left out."
            )
        if self.masks:
            raise click.UsageError(
                "--dead-letter-topic and --mask exclude each other: a letter would have the values, or could not be "
                "replayed without them. Leave out one of them; without --dead-letter-topic, the masked body is in "
                "the column unparsed."
            )
        if self.from_segments:
            raise click.UsageError(
                "--dead-letter-topic and --from-segments exclude each other: it reads no broker."
            )
        from trio_nsq.spark.export.dead_letters import check_letters_topic, letters_topic
        from trio_nsq.spark.export.layout import LayoutError

        for topic in self.topics:
            found = letters_topic(self.dead_letter_topic or "", topic)
            if found is None:
                raise click.UsageError(
                    f"--dead-letter-topic: {topic} is a dead-letter topic itself. Export it without this option."
                )
            try:
                check_letters_topic(found, topic)
            except LayoutError as error:
                raise click.UsageError(f"{error}.") from None

    def _check_topics(self) -> None:
        """Raises UsageError for topics that contradict other options."""
        if not self.topics and self.topic_pattern is None:
            raise click.UsageError(
                "Missing argument 'TOPIC...' or 'FOLDER': name topics, or give --topic-pattern."
            )
        if not self.folder:
            raise click.UsageError("Missing argument 'FOLDER'.")
        if self.check_config:
            raise click.UsageError("--check-config is for --config.")
        for topic in self.topics:
            if self.topics.count(topic) > 1:
                raise click.UsageError(f"The topic {topic} is given twice.")
        if self.is_of_one_topic:
            return
        if self.iceberg is not None and TOPIC_PLACE not in self.iceberg.name:
            raise click.UsageError(
                f"--iceberg is one table, and each topic needs its own: write {TOPIC_PLACE} where its name belongs, "
                f"as in prod/events.{TOPIC_PLACE}."
            )

    def _check_segments(self) -> None:
        """Raises UsageError for options that need a broker."""
        for flag in given_flags(
            "nsqd_http_addresses",
            "lookupd_addresses",
            "tcp_addresses",
            "channel",
            "consume",
            "spool",
            "idle_timeout_ms",
            "max_in_flight",
        ):
            raise click.UsageError(f"--from-segments and {flag} exclude each other: it reads no broker.")

    def resolve(self) -> ToParquetOptions:
        """Decide whether to consume a channel, on which engine, and with which discovery services.

        Raises UsageError: the options contradict each other.
        """
        return self._with_name()._resolve()

    def _with_name(self) -> ToParquetOptions:
        """Return the options with the name of the only topic where its places say so."""
        if not self.is_of_one_topic:
            return self
        folder, table = _named(self.folder, self.topic), _named_table(self.iceberg, self.topic)
        return dataclasses.replace(self, folder=folder, iceberg=table)

    def _resolve(self) -> ToParquetOptions:
        engine = "spark" if self.master is not None else self.engine
        folder = without_secrets(self.folder)
        if self.from_segments:
            self._check_segments()
            return dataclasses.replace(self, folder=folder, lookupd_addresses=(), engine=engine)
        consume = self._consumes()
        if consume and not self.is_of_one_topic:
            raise click.UsageError(
                f"{TCP_OPTION}, --consume and --spool are for one topic: its messages go through a spool. Run the "
                "command once for each topic."
            )
        # A broker on the command line replaces services of the environment.
        asks = given("lookupd_addresses") or not given("tcp_addresses", "nsqd_http_addresses")
        lookupds = self.lookupd_addresses if asks else ()
        addresses = lookupds or (self.tcp_addresses if consume else self.nsqd_http_addresses)
        require_address(addresses, TCP_OPTION if consume else HTTP_OPTION, LOOKUPD_OPTION)
        return dataclasses.replace(
            self,
            folder=folder,
            consume=consume,
            lookupd_addresses=lookupds,
            spool=self._check_consuming(() if lookupds else self.tcp_addresses) if consume else self.spool,
            engine=engine,
        )

    def _consumes(self) -> bool:
        """Return whether to consume a channel instead of reading a log.

        The environment is ignored: it has both addresses of a broker, for all commands.
        """
        if self.consume or self.spool is not None:
            return True
        if given("tcp_addresses", "nsqd_http_addresses") == ["tcp_addresses"]:
            return True
        for flag in given_flags("idle_timeout_ms", "max_in_flight"):
            raise click.UsageError(f"{flag} is for consuming a channel: give {TCP_OPTION} or --consume.")
        return False

    def _check_consuming(self, tcp_addresses: tuple[str, ...]) -> Path:
        """Return the folder of the spool. Raises UsageError for options that contradict consuming a channel."""
        if self.dead_letter_topic is not None:
            raise click.UsageError(
                f"--dead-letter-topic is for brokers whose logs are read: leave out {TCP_OPTION} and --consume."
            )
        if self.channel is None:
            raise click.UsageError(
                f"{TCP_OPTION} and --consume take messages out of a channel: give it with --channel."
            )
        if self.channel.endswith("#ephemeral"):
            raise click.UsageError(
                f"--channel {self.channel} is ephemeral: it is deleted with its messages when its last consumer "
                "disconnects. Use a channel without #ephemeral."
            )
        if self.first or self.end:
            raise click.UsageError(
                "--from and --to are for reading a log: messages of a channel that are left out would be lost. "
                "Select by ts when reading the files."
            )
        if self.key:
            raise click.UsageError(
                "--key needs the order of a log, and a consumed channel delivers a message again after later ones: "
                f"leave out {TCP_OPTION}, --consume and --spool."
            )
        if self.max_age_ms is not None:
            raise click.UsageError(
                "--max-age is for reading a log: a consumed channel is exported at each --every, or when its spool "
                "is full."
            )
        if given("follow", "idle_timeout_ms") == ["follow", "idle_timeout_ms"]:
            raise click.UsageError("--follow and --idle-timeout exclude each other: --follow has no end.")
        if given("tcp_addresses", "lookupd_addresses") == ["tcp_addresses", "lookupd_addresses"]:
            raise click.UsageError(
                f"{TCP_OPTION} and --lookupd-http-address exclude each other. With the latter, use --consume."
            )
        if self.master is not None and not self.master.startswith("local"):
            raise click.UsageError(
                f"--master {self.master} uses other machines, which cannot read the spool on this machine's disk."
            )
        for address in tcp_addresses:
            check_tcp_address(address)
        if self.spool is not None:
            return self.spool

        from trio_nsq.spark.export.manifest import manifest_path
        from trio_nsq.storage import local_path, shown_place

        if (folder := local_path(self.folder)) is None:
            raise click.UsageError(
                f"{shown_place(self.folder)} is not on this machine: give a local folder for the spool with --spool."
            )
        return (folder / manifest_path(self.topic)).with_name("spool")

    def request(self) -> ExportRequest:
        """Return the request; for several topics, it is completed by `request_for`."""
        from trio_nsq.spark.export.layout import BodyFormat, Layout, PartitionBy
        from trio_nsq.spark.export.request import ExportRequest
        from trio_nsq.spark.schemas.column_types import JsonType
        from trio_nsq.spark.schemas.contracts import SchemaContract
        from trio_nsq.spark.tables.target import TableKind, TableTarget

        levels = self.partition_by
        if self.iceberg is not None and not self.key and not given("partition_by"):
            levels = ("hour",)
        time = PartitionBy(time_level(levels))
        event_time, kind = self.event_time or ("", None)
        has_fields = len(levels) > (time is not PartitionBy.NONE)
        level = self.compression_level
        if level is None and self.compression == "zstd":
            level = 1
        return ExportRequest(
            self.topic if self.is_of_one_topic else "",
            self.folder,
            first=self.first or "earliest",
            end=self.end or "latest",
            channel=None if self.consume else self.channel,
            layout=Layout(
                time,
                BodyFormat(self.form_of_bodies),
                keep_rest=self.form_of_bodies == "json" and self.schema is not None,
                keep_body=self.keep_body,
                headers=True,
                where=self.where.strip(),
                masks=self.masks,
                levels=levels if has_fields or event_time else (),
                event_time=event_time,
                keeps_levels=has_fields and self.iceberg is not None,
                key=self.key,
                operation=self.op,
                paths=tuple((each.field, each.path) for each in self.columns or () if each.path),
                sort_by=self.sort_by,
            ),
            event_time_type=kind or JsonType.TIMESTAMP,
            json_fields=self.schema_fields() or [(each.field, each.type) for each in self.columns or ()],
            contract=SchemaContract(self.contract) if self.contract else None,
            dead_letter_topic=self._letters_topic(),
            compression=self.compression,
            compression_level=level,
            row_group_bytes=self.row_group_bytes,
            target_bytes=self.target_bytes,
            max_age_s=None if self.max_age_ms is None else self.max_age_ms / 1000,
            table=TableTarget(TableKind.DELTA) if self.delta else self.iceberg,
            compact=self.compact,
            schemas=self.schema_source(),
        )

    def _letters_topic(self) -> str | None:
        """Return the dead-letter topic of the only topic; for several topics with `{topic}` in it."""
        template = self.dead_letter_topic
        if template is None or not self.is_of_one_topic:
            return template
        from trio_nsq.spark.export.dead_letters import letters_topic

        return letters_topic(template, self.topic)

    def place(self, address: str, topic: str = "") -> LogPlace:
        """Return the place of a log: a broker, or the folder of a log that `find_brokers` has found."""
        from trio_nsq.spark.logs import BrokerPlace

        topic = topic or self.topic
        if self.from_segments:
            from trio_nsq.spark.segments.places import parse_places

            (place,) = parse_places([address], topic)
            return place
        connecting = ConnectOptions.of_command()
        return BrokerPlace(address, topic, connecting.tls_files(), secret=connecting.secret)


def _named(place: str, topic: str) -> str:
    from trio_nsq.spark.export.layout import safe_name

    return place.replace(TOPIC_PLACE, safe_name(topic))


def _named_table(table: TableTarget | None, topic: str) -> TableTarget | None:
    if table is None:
        return None
    return dataclasses.replace(
        table, name=table.name.replace(TOPIC_PLACE, re.sub(r"\W", "_", topic, flags=re.A))
    )


def request_for(template: ExportRequest, topic: str, *, is_only: bool) -> ExportRequest:
    """Return the request for one of several topics.

    Args:
        template: The request for all of them; `{topic}` in its places stands for the name.
        is_only: Whether the folder is for this topic only, so that it needs no subfolder.
    """
    from trio_nsq.spark.export.dead_letters import letters_topic
    from trio_nsq.storage import place_below

    letters = template.dead_letter_topic
    folder = template.place
    if TOPIC_PLACE not in folder and not is_only:
        folder = place_below(folder, TOPIC_PLACE)
    return dataclasses.replace(
        template,
        topic=topic,
        place=_named(folder, topic),
        table=_named_table(template.table, topic),
        dead_letter_topic=None if letters is None else letters_topic(letters, topic),
    )
