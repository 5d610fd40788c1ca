"""`qcli serve`: the broker."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .commands import DocumentedCommand, Example, option
from .errors import Failure
from .exit_codes import ExitCode
from .output import talk
from .params import duration, listen_address, optional_listen_address, positive_duration

if TYPE_CHECKING:
    from trio_nsq.broker import BoundAddresses, BrokerOptions

ADDRESSES = "Addresses"
STORAGE = "Storage"
LIMITS = "What clients may ask for"
TIMES = "Message timeouts"
LOGGING = "Logging"

LOG_LEVELS = {"debug": 10, "info": 20, "warn": 30, "error": 40, "fatal": 50}

COUNT = click.IntRange(min=0)
POSITIVE = click.IntRange(min=1)


class _Folder(click.Path):
    """Folders, for completion. Whether one can be used is for the broker to say, in one way for all reasons."""

    def __init__(self) -> None:
        super().__init__(file_okay=False)

    def convert(self, value: Any, _param: click.Parameter | None, _ctx: click.Context | None) -> Path:
        """Look at nothing."""
        return Path(value)


@click.command(
    "serve",
    cls=DocumentedCommand,
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
            "faster, for messages that may be lost in a power cut",
            "qcli serve --data-path ./data --sync interval",
        ),
    ],
    exits={
        ExitCode.OK: "It was stopped by SIGINT or SIGTERM, in good order.",
        ExitCode.FAILURE: "It could not start (the folder is in use or cannot be written, an address is taken, the "
        "data is damaged), or it failed.",
        ExitCode.INTERRUPTED: "A second signal, SIGINT, cut the stop short. What was acknowledged is safe.",
        ExitCode.TERMINATED: "A second signal, SIGTERM, cut the stop short, likewise.",
    },
    notes={
        "Durability": "With --sync always, the default, an OK to a publisher means that the message is on stable "
        "storage; publishes that arrive together share one sync. With --sync interval it means that the message is "
        "in the file: it survives the death of the process, but not a power cut.",
        "Differences from nsqd": "It listens on the loopback interface unless told otherwise; nsqd listens on all. "
        "A missing data folder is made. Options are written with two dashes, and durations in Go's way, such as 1m30s.",
    },
)
@option(
    ADDRESSES,
    "--tcp-address",
    type=listen_address,
    default="127.0.0.1:4150",
    metavar="HOST:PORT",
    show_default=True,
    help="Where clients connect. Port 0 picks a free one.",
)
@option(
    ADDRESSES,
    "--http-address",
    type=optional_listen_address,
    default="127.0.0.1:4151",
    metavar="HOST:PORT",
    show_default=True,
    help="Where HTTP is served. Port 0 picks a free one; '' serves none.",
)
@option(
    ADDRESSES,
    "--broadcast-address",
    metavar="HOST",
    help="The address others are told. Not given: this machine's host name.",
)
@option(
    ADDRESSES,
    "--address-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Once ready, write the bound addresses here, as JSON with the keys tcp_address and http_address. The file "
    "appears whole, and goes away with the broker.",
)
@option(
    ADDRESSES,
    "--node-id",
    type=click.IntRange(0, 1023),
    metavar="N",
    help="Part of every message id, 0 to 1023. Not given: derived from the host name.",
)
@option(
    STORAGE,
    "--data-path",
    type=_Folder(),
    default=".",
    metavar="FOLDER",
    show_default=True,
    help="Where messages are kept. Made if it is missing; its parent has to exist.",
)
@option(
    STORAGE,
    "--sync",
    type=click.Choice(["always", "interval"]),
    default="always",
    show_default=True,
    help="always: every OK is on stable storage. interval: see --sync-every and --sync-timeout.",
)
@option(
    STORAGE,
    "--sync-every",
    type=POSITIVE,
    default=2500,
    metavar="N",
    show_default=True,
    help="With --sync interval: sync a topic's file after so many messages.",
)
@option(
    STORAGE,
    "--sync-timeout",
    "sync_timeout_ms",
    type=positive_duration,
    default="2s",
    metavar="DURATION",
    show_default=True,
    help="With --sync interval: sync after so long, if there is anything to sync.",
)
@option(
    STORAGE,
    "--checkpoint-interval",
    "checkpoint_interval_ms",
    type=positive_duration,
    default="2s",
    metavar="DURATION",
    show_default=True,
    help="How often the positions of channels are written. After a crash, what was finished since is delivered again.",
)
@option(
    STORAGE,
    "--mem-queue-size",
    type=COUNT,
    default=10_000,
    metavar="N",
    show_default=True,
    help="Messages of each topic, the newest, that are kept in memory besides the file.",
)
@option(
    STORAGE,
    "--cache-bytes",
    type=COUNT,
    default=64 * 1024**2,
    metavar="BYTES",
    show_default=True,
    help="Bytes of messages kept in memory, over all topics, whatever --mem-queue-size says.",
)
@option(
    STORAGE,
    "--max-bytes-per-file",
    type=POSITIVE,
    default=100 * 1024**2,
    metavar="BYTES",
    show_default=True,
    help="Size at which a topic's log goes on in a new file.",
)
@option(
    TIMES,
    "--msg-timeout",
    "msg_timeout_ms",
    type=positive_duration,
    default="1m",
    metavar="DURATION",
    show_default=True,
    help="A message not finished in this time is delivered again, unless the client asks for another time.",
)
@option(
    TIMES,
    "--max-msg-timeout",
    "max_msg_timeout_ms",
    type=positive_duration,
    default="15m",
    metavar="DURATION",
    show_default=True,
    help="The longest such time a client may ask for, also by touching a message.",
)
@option(
    TIMES,
    "--max-req-timeout",
    "max_req_timeout_ms",
    type=duration,
    default="1h",
    metavar="DURATION",
    show_default=True,
    help="How long a message may be deferred at most.",
)
@option(
    LIMITS,
    "--max-msg-size",
    type=POSITIVE,
    default=1024**2,
    metavar="BYTES",
    show_default=True,
    help="Size of one message.",
)
@option(
    LIMITS,
    "--max-body-size",
    type=POSITIVE,
    default=5 * 1024**2,
    metavar="BYTES",
    show_default=True,
    help="Size of one command's body, such as that of an MPUB.",
)
@option(
    LIMITS,
    "--max-rdy-count",
    type=POSITIVE,
    default=2500,
    metavar="N",
    show_default=True,
    help="Messages one connection may have in flight.",
)
@option(
    LIMITS,
    "--max-channel-consumers",
    type=COUNT,
    default=0,
    metavar="N",
    show_default=True,
    help="Consumers of one channel; 0: any number.",
)
@option(
    LIMITS,
    "--max-heartbeat-interval",
    "max_heartbeat_interval_ms",
    type=positive_duration,
    default="1m",
    metavar="DURATION",
    show_default=True,
    help="Longest time between heartbeats.",
)
@option(
    LIMITS,
    "--max-output-buffer-size",
    type=POSITIVE,
    default=64 * 1024,
    metavar="BYTES",
    show_default=True,
    help="Largest output buffer of a connection.",
)
@option(
    LIMITS,
    "--max-output-buffer-timeout",
    "max_output_buffer_timeout_ms",
    type=positive_duration,
    default="30s",
    metavar="DURATION",
    show_default=True,
    help="Longest time messages may wait in that buffer.",
)
@option(
    LIMITS,
    "--min-output-buffer-timeout",
    "min_output_buffer_timeout_ms",
    type=positive_duration,
    default="25ms",
    metavar="DURATION",
    show_default=True,
    help="Shortest such time.",
)
@option(
    LIMITS,
    "--output-buffer-timeout",
    "output_buffer_timeout_ms",
    type=positive_duration,
    default="250ms",
    metavar="DURATION",
    show_default=True,
    help="That time for a client that does not ask for another.",
)
@option(
    LOGGING,
    "--log-level",
    type=click.Choice(list(LOG_LEVELS), case_sensitive=False),
    default="info",
    show_default=True,
    help="How much is logged, on standard error.",
)
@option(
    LOGGING,
    "--log-prefix",
    default="[qcli] ",
    metavar="TEXT",
    show_default=True,
    help="What every line of the log begins with.",
)
def command(address_file: Path | None, log_level: str, log_prefix: str, **flags: Any) -> int:
    """Run a broker, until SIGINT or SIGTERM.

    It speaks NSQ's protocol, and takes nsqd's options: any NSQ client can use it. Each topic is a log on disk, each
    channel a position in it. Once it is ready, a line that begins with 'ready' and names the addresses is
    written to standard error.

    The first signal stops it in good order; a second one at once.
    """
    import trio

    from .serve_log import log_to_stderr

    # What the broker says about the folder is to be clear wherever it is read.
    flags["data_path"] = flags["data_path"].absolute()
    log_to_stderr(LOG_LEVELS[log_level], log_prefix)
    trio.run(_serve, broker_options(flags), address_file)
    return ExitCode.OK


def broker_options(flags: dict[str, Any]) -> BrokerOptions:
    """Put the values of the flags where the broker expects them: parameters are named as its fields are."""
    from trio_nsq.broker import BrokerOptions
    from trio_nsq.protocol import Limits

    names = {field.name for field in dataclasses.fields(Limits)}
    limits = Limits(**{name: value for name, value in flags.items() if name in names})
    return BrokerOptions(limits=limits, **{name: value for name, value in flags.items() if name not in names})


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
            if address_file is not None:
                _write_addresses(address_file, bound)
            http = bound.http_address or "off"
            talk(f"ready: tcp {bound.tcp_address}, http {http}, data {options.data_path}")
    finally:
        if address_file is not None:
            address_file.unlink(missing_ok=True)


def _write_addresses(path: Path, bound: BoundAddresses) -> None:
    import json

    addresses = {"tcp_address": bound.tcp_address, "http_address": bound.http_address}
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(json.dumps(addresses) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise Failure(f"--address-file: cannot write {path}: {os.strerror(error.errno or 0)}.") from error
