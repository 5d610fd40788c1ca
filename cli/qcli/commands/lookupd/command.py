"""`qcli lookupd`: the discovery service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ...framework.command import Example
from ...framework.daemon.config_file import CONFIG
from ...framework.daemon.run import log_ignored_settings, reload_log_level, run_server
from ...framework.daemon.setting import LOG_LEVELS
from ...framework.exit_codes import ExitCode
from ...framework.go_flags import GoFlagsCommand
from ...framework.options import version_option
from .settings import SETTINGS, lookupd_options

if TYPE_CHECKING:
    from trio_nsq.lookup.service.options import LookupdOptions
    from trio_nsq.lookup.service.server import LookupdAddresses


@click.command(
    "lookupd",
    cls=GoFlagsCommand,
    params=[CONFIG, *SETTINGS],
    short_help="Run a discovery service.",
    examples=[
        Example("on this machine only", "qcli lookupd"),
        Example("a broker that registers with it", "qcli serve --lookupd-tcp-address 127.0.0.1:4160"),
        Example(
            "for the whole network, on nsqlookupd's ports",
            "qcli lookupd --tcp-address 0.0.0.0:4160 --http-address 0.0.0.0:4161",
        ),
        Example(
            "one that remembers topics which no broker has at the time",
            "qcli lookupd --data-path /var/lib/qcli-lookupd",
        ),
    ],
    exits={
        ExitCode.OK: "It was stopped by SIGINT or SIGTERM, in good order.",
        ExitCode.FAILURE: "It could not start (an address is taken, the folder is in use or cannot be written, the "
        "configuration file is wrong), or it failed.",
        ExitCode.USAGE: "The command line is wrong, or a variable of the environment.",
        ExitCode.INTERRUPTED: "A second signal, SIGINT, cut the stop short.",
        ExitCode.TERMINATED: "A second signal, SIGTERM, cut the stop short.",
    },
    notes={
        "Questions": "GET /lookup?topic=NAME tells which brokers have a topic, GET /topics which topics there are, GET "
        "/nodes which brokers; docs/discovery.md has the other requests.",
        "Several of them": "They know nothing of each other. Brokers register with each of them, and consumers ask "
        "each of them, so that one is enough to go on with. A service that comes back is told everything anew by the "
        "brokers, within seconds if they are ours, and by nsqd with its next ping.",
        "What is kept": "A topic or channel that has been there once is listed until it is deleted over HTTP, also "
        "while no broker has it; ephemeral ones go with the last broker that has them. With --data-path the others "
        "are written down within a second, and known again after a restart.",
        "Environment": "Each option can also be given by a variable named QCLI_ and the option in capitals with "
        "underscores, such as QCLI_TCP_ADDRESS, as for 'qcli serve'; an empty variable counts as none. A flag wins "
        "over the environment, and that over the configuration file.",
        "Reloading": "SIGHUP has it read log_level in the configuration file again, unless a flag or a variable says "
        "another. All else holds from a restart on.",
        "Configuration file": "TOML with nsqlookupd's keys: the option with underscores, such as tcp_address. A "
        'duration is a string such as "1m30s", or an integer, milliseconds. A key that is not known is named in the '
        "log and changes nothing.",
        "Differences from nsqlookupd": "It listens on the loopback interface unless told otherwise; nsqlookupd "
        "listens on all. Options may be written in Go's way, as for nsqlookupd: -name, --name=value; an option that "
        "is shown with [=...] takes a value behind '=' only.",
    },
)
@version_option
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> int:
    """Run a discovery service, until SIGINT or SIGTERM.

    It does the job of nsqlookupd, for any NSQ broker and client: brokers tell it which topics and channels they have,
    and consumers ask it which brokers have a topic. Once it is ready, a line that begins with 'ready' and names the
    addresses is written to standard error.

    The first signal stops it in good order; a second one at once.
    """
    import logging

    import trio

    from trio_nsq.lookup.service.server import serve

    from ...framework.daemon.log_format import log_to_stderr

    if values["data_path"] is not None:
        # What is said about the folder is to be clear wherever it is read.
        values["data_path"] = values["data_path"].absolute()
    options = lookupd_options(values)
    log_to_stderr(LOG_LEVELS[values["log_level"]], values["log_prefix"])
    logger = logging.getLogger("trio_nsq.lookup")
    log_ignored_settings(ctx, values["config"], logger)

    async def reload() -> None:
        reload_log_level(ctx, values["config"], logger)

    trio.run(
        run_server, serve, options, values["address_file"], lambda bound: _described(bound, options), reload
    )
    return ExitCode.OK


def _described(bound: LookupdAddresses, options: LookupdOptions) -> str:
    data = f", data {options.data_path}" if options.data_path is not None else ""
    return f"tcp {bound.tcp_address}, http {bound.http_address}{data}"
