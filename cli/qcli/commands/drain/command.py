"""`qcli drain`: takes a broker out of service without losing or delaying its messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from typing import TYPE_CHECKING, NoReturn

import click

from trio_nsq.api import broker as api
from trio_nsq.text.wording import count_of, is_or_are

from ...broker.address_options import HTTP_OPTION, http_address, unused_tcp_addresses
from ...broker.connection_options import http_connection, read_secret
from ...framework import params
from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode, Failure, Terminated
from ...framework.options import option, output_format
from ...framework.output import json_lines, print_diagnostic, write
from ...records.brokers import DrainRecord
from ..shared.job_reports import job_reports
from .advice import check_broker_is_named, stop_command
from .remaining import Remaining, named
from .report import Progress, Show, reporter

if TYPE_CHECKING:
    from ...broker.admin_client import AdminClient
    from .move import Mover

_POLL_S = 0.5

_secret_of_target = option(
    "Options",
    "--move-to-auth-secret-file",
    metavar="FILE",
    brief=True,
    help="Authenticate to the broker of --move-to with the secret in this file. By default both get the same.",
)
_force = option(
    "Options",
    "--force",
    is_flag=True,
    help="Continue or end a move although the other broker cannot tell what it has: messages may be delivered twice.",
)


@click.command(
    "drain",
    cls=DocumentedCommand,
    short_help="Take a broker out of service.",
    examples={
        "let consumers empty a broker, then stop it": "qcli drain --nsqd-http-address 10.0.0.7:4151 && "
        "ssh 10.0.0.7 systemctl stop trio-nsq",
        "move what is left to another broker": "qcli drain --nsqd-http-address 10.0.0.7:4151 --move-to 10.0.0.8:4151",
        "give consumers ten minutes, then move the rest": "qcli drain --timeout 10m; qcli drain --move-to "
        "10.0.0.8:4151",
        "accept publishes again": "qcli drain --stop",
    },
    exits={
        ExitCode.OK: "The broker is empty; with --stop: it accepts publishes again.",
        ExitCode.FAILURE: "The broker cannot drain, as an nsqd, or a broker refused.",
        ExitCode.UNREACHABLE: "The broker, or the one of --move-to, does not answer.",
        ExitCode.PARTIAL: "Messages are left: --timeout is over, or a move has stopped. Standard error says what to "
        "do.",
        ExitCode.INTERRUPTED: "Interrupted (SIGINT). The broker still drains.",
    },
    details={
        "Effect": "The broker refuses publishes, and clients publish to another broker. Consumers stay connected and "
        "get what is left: ready and deferred messages, and those in flight. The broker is empty when no topic or "
        "channel has a message, dead letters included. The command does not stop the broker. A restart of the "
        "broker, or --stop, ends the drain mode.",
        "Moving": "With --move-to, each durable channel stops delivering. When its messages in flight are answered "
        "or timed out, they go to the same channel of the other broker, which gets missing topics and channels. Each "
        "message is stored there exactly once per channel, also if a broker or this command is killed: run the same "
        "command again. Deferred messages keep their due time, and dead letters their origins; ids, timestamps and "
        "attempts are new. Settings and pauses are not moved. Ephemeral topics and channels stay. A move survives a "
        "restart of the broker: until it is continued or ended with --stop, its channels deliver nothing.",
        "Access": "The broker requires the role admin, and for --move-to also manage and read on each topic. The other "
        "broker requires manage and publish.",
        "Keys": "broker, state (draining, moving, empty, timeout), messages, moved (with --move-to), per_second, "
        "seconds_left, waits_for (if a move waits), left: topic, channel (null: messages that no channel has), depth, "
        "in_flight, deferred, clients; unavailable: topics whose messages cannot be counted.",
    },
)
@unused_tcp_addresses
@http_address("Drain the broker at this HTTP address.")
@http_connection
@option(
    "Options",
    "--move-to",
    type=params.http_address,
    metavar="[https://]HOST:PORT",
    help="Move what is left to the broker at this HTTP address, exactly once.",
)
@_secret_of_target
@option(
    "Options",
    "--timeout",
    type=params.positive_duration,
    help="If messages are left after this time, end with exit code 4 and list them. The broker still drains.",
)
@option("Options", "--stop", is_flag=True, help="End the drain mode and moves: accept and deliver again.")
@_force
@option("Output", "--quiet", "-q", is_flag=True, help="Show no progress.")
@output_format(
    "text: progress on standard error. json: an object per report.", "text", "json", records=[DrainRecord]
)
def command(
    nsqd_http_address: str,
    move_to: str | None,
    move_to_auth_secret_file: str | None,
    timeout: int | None,
    stop: bool,
    force: bool,
    quiet: bool,
    form: str,
) -> None:
    """Refuse publishes, and wait until consumers have emptied the broker.

    Shows what is left, and which channels have no consumer. With --move-to, moves what is left to another broker.
    """
    if stop and (move_to or timeout is not None):
        raise click.UsageError("--stop excludes --move-to and --timeout.")
    if move_to_auth_secret_file and not (move_to or stop):
        raise click.UsageError("--move-to-auth-secret-file needs --move-to or --stop.")
    if force and not (move_to or stop):
        raise click.UsageError("--force needs --move-to or --stop.")
    if stop:
        _stop(nsqd_http_address, move_to_auth_secret_file, force)
        return
    connect = _connector(nsqd_http_address, move_to_auth_secret_file)
    source = connect(nsqd_http_address)
    with _failures():
        source.check_broker()
        deadline_s = None if timeout is None else time.monotonic() + timeout / 1000
        progress = Progress(source.address, moved=None if move_to is None else 0)
        mover = None
        if move_to is not None:
            mover = _mover(source, connect(move_to), progress, force, deadline_s)
        _begin(source)
    name = f"{source.address} to {move_to}" if move_to else source.address
    reports = job_reports((source.address,), "drain", "", progress.of_job, name=name)
    try:
        with reports, reporter(form, quiet) as show:
            if mover is None:
                _wait(source, progress, show, deadline_s)
            else:
                mover.show = show
                _move(mover, progress)
    except (KeyboardInterrupt, Terminated):
        print_diagnostic(_still_draining(source.address, mover))
        raise
    if form == "json":
        write(json_lines([progress.record("empty")]))
    _report_end(progress, mover, quiet)


@click.command(
    "undrain",
    cls=DocumentedCommand,
    short_help="Return a drained broker to service.",
    examples={
        "accept publishes again": "qcli undrain --nsqd-http-address 10.0.0.7:4151",
    },
    exits={
        ExitCode.OK: "The broker accepts publishes, also if it did before.",
        ExitCode.FAILURE: "The broker cannot drain, as an nsqd, or a broker refused.",
        ExitCode.UNREACHABLE: "The broker, or the one that messages were moved to, does not answer.",
        ExitCode.PARTIAL: "A move could not be ended; standard error says what to do.",
    },
    details={
        "Effect": "As 'qcli drain --stop': the broker accepts publishes. If a move is not complete, it ends: the other "
        "broker keeps what it has, and what was not moved is delivered here.",
        "Access": "The broker requires the role admin, and for topics that move also manage. The other broker "
        "requires manage and publish.",
    },
)
@unused_tcp_addresses
@http_address("Return the broker at this HTTP address to service.")
@http_connection
@_secret_of_target
@_force
def undrain(nsqd_http_address: str, move_to_auth_secret_file: str | None, force: bool) -> None:
    """End the drain mode of a broker, and its moves: it accepts and delivers again."""
    _stop(nsqd_http_address, move_to_auth_secret_file, force)


def _connector(source: str, secret_file_of_others: str | None) -> Callable[[str], AdminClient]:
    """Return a function that connects to the source and, with the secret in this file, to other brokers."""
    from ...broker.admin_client import AdminClient

    check_broker_is_named(source)
    clients = ExitStack()
    click.get_current_context().call_on_close(clients.close)

    @cache
    def connect(address: str) -> AdminClient:
        secret = None
        if secret_file_of_others and address != source:
            from trio_nsq.access.secret import Secret

            secret = Secret(read_secret(secret_file_of_others))
        return clients.enter_context(closing(AdminClient(address, secret=secret, is_patient=True)))

    return connect


# ---------------------------------------------------------------------- draining


def _begin(source: AdminClient) -> None:
    from trio_nsq.client import RequestRefused

    try:
        source.make(api.set_draining(True))
    except RequestRefused as error:
        if error.text not in ("INVALID_OPTION", "NOT_FOUND"):
            raise
        raise _cannot_drain(source.address) from error


def _cannot_drain(address: str) -> Failure:
    return Failure(
        f"The broker at {address} cannot drain: it is an nsqd, or an older 'qcli serve'. Instead, have producers "
        f"publish to another broker, and stop it when 'qcli stat --once {HTTP_OPTION} {address}' shows no messages."
    )


def _wait(source: AdminClient, progress: Progress, show: Show, deadline_s: float | None) -> None:
    """Wait until consumers have emptied the broker. Raises Failure: the time is over, or the broker does not answer."""
    with _failures():
        started = None
        while True:
            stats = source.make(api.stats())
            if started not in (None, stats.get("start_time")):
                source.make(api.set_draining(True))  # a restart has ended the drain mode
            started = stats.get("start_time")
            progress.update(Remaining.of(stats), time.monotonic())
            if not progress.messages:
                return
            show(progress)
            if deadline_s is not None and time.monotonic() >= deadline_s:
                _time_out(progress, None)
            time.sleep(_POLL_S)


def _stop(address: str, secret_file_of_others: str | None, force: bool) -> None:
    connect = _connector(address, secret_file_of_others)
    with _failures():
        _end(connect(address), connect, force)


def _end(source: AdminClient, connect: Callable[[str], AdminClient], force: bool) -> None:
    from trio_nsq.client import RequestRefused

    from .move import end_moves, moving_topics

    source.check_broker()
    try:
        for topic in end_moves(source, connect, moving_topics(source.make(api.stats())), force=force):
            print_diagnostic(f"{topic}: the move has ended; what was not moved is delivered here.")
        source.make(api.set_draining(False))
    except RequestRefused as error:
        if error.text not in ("INVALID_OPTION", "NOT_FOUND"):
            raise
        raise _cannot_drain(source.address) from error
    print_diagnostic(f"{source.address} accepts publishes.")


# ---------------------------------------------------------------------- moving


def _mover(
    source: AdminClient, target: AdminClient, progress: Progress, force: bool, deadline_s: float | None
) -> Mover:
    """Check both brokers before anything is changed."""
    from trio_nsq.client import RequestRefused
    from trio_nsq.fleet.identity import BrokerIdentity

    from .move import Mover

    with _failures():
        target.check_broker()
        about = target.info()
    with _failures():
        here = source.info()
    if BrokerIdentity.of(here) == BrokerIdentity.of(about):
        raise Failure(f"{target.address} is the broker that drains. Name another one: --move-to.")
    if about.get("draining"):
        raise Failure(f"{target.address} drains too: it accepts no messages. Name another broker: --move-to.")
    for client in (source, target):
        try:
            with _failures():
                client.make(api.move_of("none"))
        except Failure as error:
            cause = error.__cause__
            text = cause.text if isinstance(cause, RequestRefused) else ""
            if text == "NOT_FOUND":  # that is, the endpoint
                raise Failure(
                    f"The broker at {client.address} cannot move messages: it is an nsqd, or an older 'qcli serve'."
                ) from error
            if text == "TOPIC_NOT_FOUND" or text.startswith("FORBIDDEN"):
                continue  # the role may be on some topics only
            raise
    return Mover(source, target, progress, lambda _progress: None, force, deadline_s)


def _move(mover: Mover, progress: Progress) -> None:
    from .move import TimedOut

    with _failures():
        try:
            mover.run()
        except TimedOut:
            _time_out(progress, mover)


# ---------------------------------------------------------------------- results


def _time_out(progress: Progress, mover: Mover | None) -> NoReturn:
    ctx = click.get_current_context()
    if ctx.params["form"] == "json":
        write(json_lines([progress.record("timeout")]))
    else:
        write(progress.table())
    waits = f" {progress.waits_for}." if progress.waits_for else ""
    still = _still_draining(progress.address, mover)
    left = f"{count_of(progress.messages, 'message')} {is_or_are(progress.messages)} left"
    raise Failure(f"{left} on {progress.address}.{waits} {still}", ExitCode.PARTIAL)


def _still_draining(address: str, mover: Mover | None) -> str:
    text = f"{address} still drains: it refuses publishes."
    if mover is not None and mover.begun:
        topics = ", ".join(sorted(mover.begun)[:3]) + (" and others" if len(mover.begun) > 3 else "")
        text += f" The move of {topics} is not complete: the channels deliver nothing until it is."
    return f"{text} Continue with the same command, or end it with {stop_command(address)}."


def _report_end(progress: Progress, mover: Mover | None, quiet: bool) -> None:
    """Report the end on standard error. Raises Failure: something is left that could not be moved or counted."""
    if mover is not None:
        if mover.damaged or mover.expired:
            print_diagnostic(
                f"Warning: {mover.damaged:,} damaged and {mover.expired:,} expired messages could not be moved."
            )
        if progress.left.rows:
            print_diagnostic(
                f"Note: ephemeral topics and channels are not moved; their messages are lost when the broker stops: "
                f"{named(progress.left.rows)}."
            )
    if progress.left.unavailable:
        raise Failure(
            f"All other topics of {progress.address} are empty, but these are unavailable, and may have messages: "
            f"{', '.join(progress.left.unavailable)}. See the broker's log.",
            ExitCode.PARTIAL,
        )
    if not quiet:
        moved = (
            f"{count_of(mover.progress.moved or 0, 'message')} moved to {mover.target.address}. "
            if mover
            else ""
        )
        print_diagnostic(
            f"{moved}{progress.address} is empty, and still refuses publishes: it can be stopped."
        )


@contextmanager
def _failures() -> Iterator[None]:
    """Turn the errors of requests into failures."""
    from trio_nsq.client import BrokerUnreachable, RequestRefused

    from .move import failure_of

    try:
        yield
    except (RequestRefused, BrokerUnreachable) as error:
        raise failure_of(error) from error
