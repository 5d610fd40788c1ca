"""`qcli pipeline run`: writes the tables that topics declare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...broker.address_options import TCP_OPTION, http_addresses, lookupd_addresses, unused_tcp_addresses
from ...broker.connection_options import http_connection
from ...framework import params
from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode
from ...framework.options import option, several
from ...framework.params import parsed
from ...records.jobs import ExportRecord
from ..shared.consuming import SOURCE
from ..shared.engine import check_extra, engine_options
from ..to_parquet.pipeline import CommandWords, config_option, read_pipeline, typed_words
from .options import CHANNEL, MONITORING, TABLES, channel_option, status_address_option
from .sections import TableSections, export_context

if TYPE_CHECKING:
    from trio_nsq.fleet.allowed_tables import AllowedPlace

_REFRESH = "10s"
_OWN = frozenset(("--config", "--lease", "--iceberg-folder", "--allow-table", TCP_OPTION))
"""The options that an export does not have."""
_SECTIONS = "qcli.table_sections"


def _lease_folder(text: str) -> str:
    if not text:  # an unset variable: the lease would be in the current folder
        raise click.BadParameter("it is empty: name a folder or a URL, such as s3://bucket/pipeline.")
    return text


def _check_folder(origin: str, folder: str, beside: str, allowed: Sequence[AllowedPlace]) -> None:
    """Raises UsageError: a topic could declare its table in a folder of this command.

    Args:
        origin: What gives the folder, for the error.
        beside: A folder beside the tables of the example.
    """
    from trio_nsq.fleet.allowed_tables import may_have_table
    from trio_nsq.storage import shown_place

    if may_have_table(folder, Path.cwd(), allowed):
        raise click.UsageError(
            f"{origin} {shown_place(folder)} is in a place of --allow-table, so topics could declare tables there. "
            f"Use a folder beside the tables, such as {beside} with --allow-table s3://lake/tables."
        )


def _allowed_place(text: str) -> AllowedPlace:
    from trio_nsq.fleet.allowed_tables import AllowedPlace

    return parsed(lambda text: AllowedPlace.parse(text, Path.cwd()), text)


class RunCommand(DocumentedCommand):
    """The command with the keys of its file that are for the whole command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line, and what it and the file say about the exports."""
        if not ctx.resilient_parsing:
            typed = self.typed(ctx, args)
            words = typed_words(ctx, typed)
            exported = words.only(lambda name: name not in _OWN)
            config = typed.get("config")
            path, sections = None, {"": exported}
            if config is not None:
                path = Path(config)
                pipeline, general = read_pipeline(
                    export_context(ctx), path, exported, of_declared_tables=True
                )
                sections = pipeline.sections
                own = {name for param in self.get_params(ctx) for name in param.opts}
                args = words.over(general.only(lambda name: name in own)).line()
                args = [f"--config={config}", *args]
            defaults = CommandWords(
                {"--channel": [f"--channel={CHANNEL}"], "--topic-refresh": [f"--topic-refresh={_REFRESH}"]}
            )
            sections = {name: each.over(defaults) for name, each in sections.items()}
            ctx.meta[_SECTIONS] = TableSections(ctx, path, sections, typed.get("iceberg_folder"))
        return super().parse_args(ctx, args)


@click.command(
    "run",
    cls=RunCommand,
    short_help="Write the tables that topics declare.",
    examples={
        "declare the table of a topic": "qcli topic set clicks table=delta:s3://bucket/clicks",
        "write the tables of all topics of a broker": "qcli pipeline run --http-address 127.0.0.1:9151",
        "write those of all brokers": "qcli pipeline run --lookupd-http-address 127.0.0.1:4161",
        "read options of the tables from a file": "qcli pipeline run --config pipeline.toml",
        "run a stand-by on another machine": "qcli pipeline run --lease s3://bucket/pipeline",
        "write tables only below a folder of a bucket": "qcli pipeline run --allow-table s3://lake/tables",
        "write Iceberg tables, each to a folder of its own": "qcli pipeline run --iceberg-folder s3://bucket/iceberg",
    },
    exits={
        ExitCode.FAILURE: "pyarrow is not installed, --config cannot be read, or --http-address cannot be used.",
        ExitCode.INTERRUPTED: "Interrupted (SIGINT). Run the same command again to continue.",
        ExitCode.TERMINATED: "Terminated (SIGTERM). Run the same command again to continue.",
    },
    details={
        "Tables": "The setting table of a topic is delta:URL, iceberg:CATALOG/NAMESPACE.TABLE or parquet:URL, a folder "
        "of files. A URL is an absolute path or for example s3://bucket/clicks. It has no secrets: the keys of buckets "
        "are from the environment of this command, catalogs from pyiceberg's configuration. The topic is read from all "
        "brokers that have it, also if only one of them declares the table. If they declare different tables, or two "
        "topics the same one, these topics are an error and the others are written. Who may change the settings of "
        "a topic chooses its table: --allow-table says where this command may write.",
        "Changes": "Settings are read again at --topic-refresh. A new table gets all retained messages of its topic. "
        "If a topic changes its table, the old one has the messages up to the last round, and the new one gets all "
        "retained messages. If a topic declares no table any longer, its export ends, and the channel is deleted, so "
        "that it keeps no messages.",
        "Channel": "--channel keeps messages until they are in the table, also while this command does not run. It is "
        "created with the oldest retained message. No consumer may use it. The position is in the table's folder, not "
        "in the channel: see 'Files' of qcli to-parquet.",
        "Configuration file": "--config is that of qcli to-parquet. A section for a topic or a pattern has the options "
        "of these topics, such as json, columns, partition-by, mask and compact; keys above the first section are for "
        "all topics. No section is needed. A topic without a section has the options above them. folder is that of the "
        "files of Iceberg tables. The file must not have delta, iceberg and from-segments.",
        "Failures": "A topic that fails does not stop the others. It is tried again in the next round, then less "
        "and less often, every 10 minutes at last. Warnings tell when it fails and why; /healthz, /metrics and "
        "'qcli pipeline status' have the error.",
        "Stand-by": "With --lease, only one of several processes writes. The others wait, and one of them goes on when "
        "the lease is free: at once if its holder has ended in order or on the same machine, in a bucket 15 seconds "
        "after it was renewed last, and in a local folder when its process has ended. A holder that was suspended "
        "notices that it has lost the lease before it writes again. Each table also has a lock of its own, so that "
        "messages are not repeated without --lease either.",
        "Installation": "This needs the extra 'spark' or pyarrow, like qcli to-parquet; Delta tables need the extra "
        "'delta', Iceberg tables 'iceberg'.",
        "JSON": "One object for each topic that has something new in a round, as that of qcli to-parquet.",
    },
)
@config_option("Read options of topics from this TOML file; see 'man qcli-pipeline'.")
@option(
    SOURCE,
    "--topic-refresh",
    "topic_refresh_ms",
    type=params.positive_duration,
    default=_REFRESH,
    help="Look for changed settings, new topics and brokers at this interval.",
)
@http_addresses("Write the tables of topics at these brokers.")
@lookupd_addresses("Ask these nsqlookupd for brokers instead.")
@unused_tcp_addresses
@option(
    TABLES,
    "--every",
    "every_ms",
    type=params.positive_duration,
    default="1m",
    help="Write at this interval, each time to new files, in one version of each table.",
)
@channel_option
@option(
    TABLES,
    "--iceberg-folder",
    metavar="FOLDER",
    help="Write the files of Iceberg tables to FOLDER/TOPIC. {topic} stands for the name of the topic instead.",
)
@several(
    TABLES,
    "--allow-table",
    "allowed",
    type=_allowed_place,
    metavar="[FORMAT:]PLACE",
    help="Write only tables below this folder, such as s3://lake/, or in this catalog or namespace, such as "
    "iceberg:prod/events. Several: with commas, or repeat the option. By default, topics choose any place.",
)
@option(
    TABLES,
    "--lease",
    type=_lease_folder,
    metavar="FOLDER",
    help="Write only while this process has the lease in FOLDER, a path or a URL; wait for it otherwise.",
)
@status_address_option(
    "Serve /healthz, /metrics (Prometheus) and /stats here: HOST:PORT, :PORT, or a unix socket.",
    params.listen_address,
)
@option(
    MONITORING,
    "--max-lag",
    "max_lag_ms",
    type=params.positive_duration,
    help="Let /healthz answer 503 if a message that is this old is not in its table.",
)
@engine_options(
    "The tables and the brokers",
    "summary",
    "Each writes one range of messages at a time. Default: 1 for every two cores if there are 512 MiB or more.",
    records=[ExportRecord],
)
@http_connection
def run(config: Path | None, lease: str | None, allowed: tuple[AllowedPlace, ...], **_: object) -> int:
    """Write the tables that topics declare, until interrupted.

    Each topic with the setting table is exported continuously to its table, each message exactly once. Settings may
    change meanwhile. After a kill, the same command continues where it was.
    """
    check_extra("pipeline run")
    sections: TableSections = click.get_current_context().meta[_SECTIONS]
    sections.allowed = allowed
    sections.check()
    if lease is not None:
        _check_folder("--lease", lease, "s3://lake/pipeline", allowed)
    for origin, folder in sections.iceberg_folders:
        _check_folder(origin, folder, "s3://lake/iceberg", allowed)

    from .supervisor import supervise

    return supervise(sections, lease, config)
