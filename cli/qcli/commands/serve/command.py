"""`qcli serve`: the broker."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...framework.daemon.config_file import CONFIG
from ...framework.errors import ExitCode
from ...framework.go_flags import GoFlagsCommand
from ...framework.options import version_option
from .settings import SETTINGS, broker_options

if TYPE_CHECKING:
    from trio_nsq.broker import BoundAddresses


@click.command(
    "serve",
    cls=GoFlagsCommand,
    params=[CONFIG, *SETTINGS],
    short_help="Run a broker.",
    examples={
        "on this machine only, with its messages in ./data": "qcli serve --data-path ./data",
        "for the whole network, on nsqd's ports": "qcli serve --data-path /var/lib/nsq --tcp-address "
        "0.0.0.0:4150 --http-address 0.0.0.0:4151",
        "for a test: free ports, told in a file": "qcli serve --data-path /tmp/d --tcp-address 127.0.0.1:0 "
        "--http-address 127.0.0.1:0 --address-file a.json",
        "with nsqd's configuration file, but other addresses": "qcli serve --config /etc/nsqd.cfg "
        "--tcp-address 127.0.0.1:4250 --http-address 127.0.0.1:4251",
        "faster, for messages that may be lost in a power cut": "qcli serve --data-path ./data --sync interval",
    },
    exits={
        ExitCode.OK: "It was stopped by SIGINT or SIGTERM, in good order.",
        ExitCode.FAILURE: "It could not start (the folder is in use or cannot be written, an address is taken, the "
        "data is damaged, the configuration file is wrong), or it failed.",
        ExitCode.USAGE: "The command line is wrong, or a variable of the environment.",
        ExitCode.INTERRUPTED: "A second signal, SIGINT, cut the stop short. What was acknowledged is safe.",
        ExitCode.TERMINATED: "A second signal, SIGTERM, cut the stop short, likewise.",
    },
    notes={
        "Durability": "With --sync always, the default, an OK to a publisher means that the message is on stable "
        "storage; publishes that arrive together share one sync. With --sync interval it means that the message is "
        "in the file: it survives the death of the process, but not a power cut.",
        "Environment": "Each option can also be given by a variable named QCLI_ and the option in capitals with "
        "underscores, such as QCLI_TCP_ADDRESS. Several values are separated by commas; an empty variable counts as "
        "none. A flag wins over the environment, and that over the configuration file.",
        "Reloading": "SIGHUP has it read files again, and nothing is interrupted: the certificate, its key and CAs, "
        "for new sessions, and log_level in the configuration file, unless a flag or variable says another. A file "
        "that cannot be used is named in the log, and what was read before stays in use. All else needs a restart.",
        "Configuration file": "TOML with nsqd's keys: the option with underscores, such as tcp_address, but id for "
        "--node-id, and nsqlookupd_tcp_addresses, auth_http_addresses and e2e_processing_latency_percentiles for the "
        'lists. A duration is a string such as "1m30s", or an integer, milliseconds. A key that is not known is named '
        "in the log and changes nothing.",
        "Differences from nsqd": "It listens on the loopback interface unless told otherwise; nsqd listens on all. "
        "A missing data folder is made. TLS below 1.2 has to be asked for. Options may be written in Go's way, as for "
        "nsqd: -name, --name=value; an option that is shown with [=...] takes a value behind '=' only. "
        "Durations are written in Go's way, such as 1m30s. These options are accepted and have no effect: "
        "--queue-scan-worker-pool-max, --queue-scan-selection-count, --worker-id (see --node-id) and --verbose (see "
        "--log-level).",
    },
)
@version_option
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> int:
    """Run a broker, until SIGINT or SIGTERM.

    It speaks NSQ's protocol, and takes nsqd's options and its configuration file: any NSQ client can use it. Each topic
    is a log on disk, each channel a position in it. Once it is ready, a line that begins with 'ready' and names the
    addresses is written to standard error.

    The first signal stops it in good order; a second one at once.
    """
    import trio

    from trio_nsq.broker import serve

    from ...framework.daemon.run import run_server

    # What the broker says about the folder is to be clear wherever it is read.
    values["data_path"] = (values["data_path"] or Path()).absolute()
    options = broker_options(values)
    _raise_file_limit()
    send, receive = trio.open_memory_channel[None](1)
    with send, receive:
        run_server(
            ctx,
            partial(serve, reloads=receive),
            options,
            "trio_nsq.broker",
            lambda bound: _described(bound, options.data_path),
            lambda: send.send(None),
        )
    return ExitCode.OK


def _raise_file_limit() -> None:
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # then there are fewer, and so may be clients
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _described(bound: BoundAddresses, data_path: Path) -> str:
    listening = f"tcp {bound.tcp_address}, http {bound.http_address or 'off'}"
    if bound.https_address:
        listening += f", https {bound.https_address}"
    return f"{listening}, data {data_path}"
