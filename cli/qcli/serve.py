"""`qcli serve`: the broker."""

from __future__ import annotations

import dataclasses
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from trio_nsq._version import __version__

from .commands import Example, GoFlagsCommand
from .errors import Failure
from .exit_codes import ExitCode
from .output import talk
from .serve_config import CONFIG, ConfigFile
from .serve_options import LOG_LEVELS, SETTINGS, broker_options

if TYPE_CHECKING:
    from trio_nsq.broker import BoundAddresses, BrokerOptions


@click.command(
    "serve",
    cls=GoFlagsCommand,
    params=[CONFIG, *SETTINGS],
    short_help="Run a broker.",
    examples=[
        Example("on this machine only, with its messages in ./data", "qcli serve --data-path ./data"),
        Example(
            "for the whole network, on nsqd's ports",
            "qcli serve --data-path /var/lib/nsq --tcp-address 0.0.0.0:4150 --http-address 0.0.0.0:4151",
        ),
        Example(
            "for a test: free ports, told in a file",
            "qcli serve --data-path /tmp/d --tcp-address 127.0.0.1:0 --http-address 127.0.0.1:0 --address-file a.json",
        ),
        Example(
            "with nsqd's configuration file, but other addresses",
            "qcli serve --config /etc/nsqd.cfg --tcp-address 127.0.0.1:4250 --http-address 127.0.0.1:4251",
        ),
        Example(
            "faster, for messages that may be lost in a power cut",
            "qcli serve --data-path ./data --sync interval",
        ),
    ],
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
        "Configuration file": "TOML with nsqd's keys: the option with underscores, such as tcp_address, but id for "
        "--node-id, and nsqlookupd_tcp_addresses, auth_http_addresses and e2e_processing_latency_percentiles for the "
        'lists. A duration is a string such as "1m30s", or an integer, milliseconds. A key that is not known is named '
        "in the log and changes nothing.",
        "Differences from nsqd": "It listens on the loopback interface unless told otherwise; nsqd listens on all. "
        "A missing data folder is made. TLS below 1.2 has to be asked for. Options may be written in Go's way, as for "
        "nsqd: -name, --name=value; an option that is shown with [=...] takes a value behind '=' only. "
        "Durations are written in Go's way, such as 1m30s.",
    },
)
@click.version_option(
    __version__,
    "--version",
    prog_name="qcli",
    message="%(prog)s %(version)s",
    help="Show the version and exit.",
)
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> int:
    """Run a broker, until SIGINT or SIGTERM.

    It speaks NSQ's protocol, and takes nsqd's options and its configuration file: any NSQ client can use it. Each topic
    is a log on disk, each channel a position in it. Once it is ready, a line that begins with 'ready' and names the
    addresses is written to standard error.

    The first signal stops it in good order; a second one at once.
    """
    import trio

    from .serve_log import log_to_stderr

    # What the broker says about the folder is to be clear wherever it is read.
    values["data_path"] = (values["data_path"] or Path()).absolute()
    options = broker_options(values)
    log_to_stderr(LOG_LEVELS[values["log_level"]], values["log_prefix"])
    _tell_what_is_ignored(ctx, values["config"])
    trio.run(_serve, options, values["address_file"])
    return ExitCode.OK


def _tell_what_is_ignored(ctx: click.Context, config: ConfigFile | None) -> None:
    import logging

    # The broker's, so that its level holds.
    logger = logging.getLogger("trio_nsq.broker")
    for setting in SETTINGS:
        if setting.ignored and ctx.get_parameter_source(setting.name) is not ParameterSource.DEFAULT:
            logger.warning("%s has no effect here: %s", setting.opts[0], setting.ignored)
    for key in config.unknown if config else ():
        logger.warning("configuration: the key %s is not known", key)


async def _serve(options: BrokerOptions, address_file: Path | None) -> None:
    import trio

    from trio_nsq.broker import serve

    from .signals import watch_signals

    if address_file is not None:
        # Whoever waits for the file must not find that of an earlier broker.
        address_file.unlink(missing_ok=True)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(watch_signals, lambda _code: nursery.cancel_scope.cancel())
            bound: BoundAddresses = await nursery.start(serve, options)
            # What the broker has loaded stays: the garbage collector need not look through it again and again, which
            # with ten thousand channels takes so long that their messages would be late.
            gc.collect()
            gc.freeze()
            if address_file is not None:
                _write_addresses(address_file, bound)
            listening = f"tcp {bound.tcp_address}, http {bound.http_address or 'off'}"
            if bound.https_address:
                listening += f", https {bound.https_address}"
            talk(f"ready: {listening}, data {options.data_path}")
    finally:
        if address_file is not None:
            address_file.unlink(missing_ok=True)


def _write_addresses(path: Path, bound: BoundAddresses) -> None:
    import json

    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(json.dumps(dataclasses.asdict(bound)) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise Failure(f"--address-file: cannot write {path}: {os.strerror(error.errno or 0)}.") from error
