"""What `to-parquet` is told of a channel that it is to consume, as an nsqd has no log to be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ...broker.address_options import TCP_OPTION, check_tcp_address
from ...framework import params
from ...framework.command import option

_F = TypeVar("_F", bound=Callable[..., Any])

RECEIVING = "Out of a channel, at least once"
MAX_IN_FLIGHT = 2500
"""What brokers allow by default."""

_OPTIONS = (
    option(
        RECEIVING,
        "--consume",
        is_flag=True,
        help="Consume --channel over TCP, as any NSQ client does, and do not read logs. Not needed with "
        "--nsqd-tcp-address; for --lookupd-http-address, say.",
    ),
    option(
        RECEIVING,
        "--spool",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="PATH",
        help="A folder on a local disk, for messages that are finished and not in files yet. If it is not given, "
        "FOLDER/_nsq/TOPIC/spool; it has to be if FOLDER is not on this machine.",
    ),
    option(
        RECEIVING,
        "--idle-timeout",
        "idle_timeout_ms",
        type=params.positive_duration,
        default="2s",
        metavar="DURATION",
        show_default=True,
        help="Without --follow: end after so long without a message that was published before the command began.",
    ),
    option(
        RECEIVING,
        "--max-in-flight",
        type=click.IntRange(min=1),
        default=MAX_IN_FLIGHT,
        metavar="N",
        show_default=True,
        help="Messages under way at most; fewer, if they are large: about 64 MiB.",
    ),
)


def receiving_options(command: _F) -> _F:
    """The options that are for this only."""
    for each in reversed(_OPTIONS):  # the last decorator is the first option
        command = each(command)
    return command


def given(*names: str) -> list[str]:
    """Which of these parameters are on the command line."""
    ctx = click.get_current_context()
    source = click.core.ParameterSource.COMMANDLINE
    return [name for name in names if ctx.get_parameter_source(name) is source]


def consumes(asked: bool) -> bool:
    """Whether a channel is consumed, and no log read. Raises UsageError: that is contradictory.

    The environment does not count: it names both addresses of a broker, for all commands.
    """
    if asked or given("tcp_addresses", "nsqd_http_addresses") == ["tcp_addresses"]:
        return True
    for name in given("idle_timeout_ms", "max_in_flight"):
        flag = {"idle_timeout_ms": "--idle-timeout"}.get(name, "--max-in-flight")
        raise click.UsageError(
            f"{flag} is for a channel that is consumed: name {TCP_OPTION}, or say --consume."
        )
    return False


def check_consuming(
    topic: str,
    folder: str,
    channel: str | None,
    position: str | None,
    tcp_addresses: tuple[str, ...],
    spool: Path | None,
    master: str | None,
) -> Path:
    """Where the spool is. Raises UsageError for what does not go with a channel that is consumed."""
    if channel is None:
        raise click.UsageError(
            f"{TCP_OPTION} and --consume take messages out of a channel, as an nsqd has no log: name it with --channel."
        )
    if channel.endswith("#ephemeral"):
        raise click.UsageError(
            f"--channel {channel} goes away whenever nobody is connected to it, with all that it has: name one "
            "without #ephemeral."
        )
    if position is not None:
        raise click.UsageError(
            "--from and --to are for a log: a channel gives what it has, and what is left out would be lost. Select "
            "from the files, by ts."
        )
    if given("follow", "idle_timeout_ms") == ["follow", "idle_timeout_ms"]:
        raise click.UsageError(
            "--follow and --idle-timeout exclude each other: it goes on until it is interrupted."
        )
    if given("tcp_addresses", "lookupd_addresses") == ["tcp_addresses", "lookupd_addresses"]:
        raise click.UsageError(
            f"{TCP_OPTION} and --lookupd-http-address exclude each other; the latter takes --consume."
        )
    if master is not None and not master.startswith("local"):
        raise click.UsageError(
            f"--master {master} has others work, who do not see the spool on this machine's disk."
        )
    for address in tcp_addresses:
        check_tcp_address(address)
    if spool is not None:
        return spool

    from trio_nsq.spark.export.job import spool_folder

    found = spool_folder(folder, topic)
    if found is None:
        raise click.UsageError(
            f"{folder} is not on this machine: name a folder that is, for a spool, with --spool."
        )
    return found
