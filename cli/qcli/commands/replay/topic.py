"""How `replay` goes with a topic of a broker: what it connects to, and what is said of it."""

from __future__ import annotations

import re
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from trio_nsq.client import BrokerError, ConnectionFailed, Producer
from trio_nsq.client.reading.topic_reader import TopicReader

from ...broker.address_options import TCP_OPTION
from ...broker.connection_options import Connecting
from ...broker.topic_log import note_beginning, reading_errors
from ...framework.errors import Failure, not_connected
from ...framework.exit_codes import ExitCode
from ...framework.output import (
    count_of,
    hear_library,
    json_lines,
    quiet_library,
    rate,
    size,
    talk,
    talks_to_live_terminal,
    write,
)
from ...framework.params import without_scheme
from ...framework.signals import watch_signals
from ..shared.rate_limiter import Pace
from .publish import Replay, ReplayOutcome, Spacing

_MAX_BYTES = 2**30
"""Whether a message is too long is for the broker to say, whose limit we do not know."""


@dataclass(frozen=True, slots=True)
class TopicRequest:
    """The command line."""

    source: str
    topic: str
    http_address: str
    tcp_address: str
    first: str
    end: str | None
    count: int | None
    pattern: re.Pattern[bytes] | None
    rate: float | None
    speed: float | None
    dry_run: bool
    form: str
    quiet: bool


def replay_topic(request: TopicRequest) -> ExitCode:
    """Run the command; returns its exit code.

    Raises:
        Failure: It did not go well.
    """
    if (path := Path(request.source)).exists():
        kind = "folder" if path.is_dir() else "file"
        talk(f"Note: {request.source} is taken for a topic; the {kind} of this name is ./{request.source}")
    begun_s = time.monotonic()
    outcome = trio.run(_replay, request)
    return _conclude(request, outcome, time.monotonic() - begun_s)


async def _replay(request: TopicRequest) -> ReplayOutcome:
    quiet_library()
    connecting = Connecting.of_command()
    try:
        async with AsyncExitStack() as stack:
            producer = None
            if not request.dry_run:
                producer = await stack.enter_async_context(
                    Producer(
                        request.tcp_address,
                        max_msg_size=_MAX_BYTES,
                        max_body_size=_MAX_BYTES,
                        **connecting.options(),
                    )
                )
            with reading_errors(request.http_address):
                async with (
                    TopicReader(
                        without_scheme(request.http_address),
                        request.source,
                        tls=connecting.https_context(request.http_address),
                        start=request.first,
                        end=request.end,
                        max_messages=request.count if request.pattern is None else None,
                    ) as reader,
                    trio.open_nursery() as nursery,
                ):
                    hear_library()
                    note_beginning(request.source, reader, request.first)
                    replay = Replay(
                        request.source,
                        reader,
                        producer,
                        request.topic,
                        count=request.count,
                        pattern=request.pattern,
                        pace=Pace(request.rate, trio.current_time()) if request.rate else None,
                        spacing=Spacing(request.speed) if request.speed else None,
                    )
                    await nursery.start(watch_signals, replay.stop)
                    if not request.quiet and talks_to_live_terminal():
                        from ...terminal.progress_line import show_progress

                        nursery.start_soon(show_progress, replay.outcome, lambda: replay.outcome.share)
                    await replay.run()
                    nursery.cancel_scope.cancel()
    except ConnectionFailed as error:
        raise not_connected(request.tcp_address, TCP_OPTION, error) from error
    return replay.outcome


def _conclude(request: TopicRequest, outcome: ReplayOutcome, elapsed_s: float) -> ExitCode:
    """Report, and say how the command ends.

    Raises:
        Failure: It did not go well.
    """
    if request.form == "json":
        write(json_lines([_as_json(request, outcome, elapsed_s)]))
    elif not request.quiet:
        talk(_report(request, outcome, elapsed_s))
    going_on = f"Go on with --from {outcome.position} --to {outcome.end}"
    if request.count is not None:
        going_on += f" -n {request.count - outcome.acknowledged}"
    if outcome.failure is not None:
        fate = f"{count_of(outcome.acknowledged, 'message')} acknowledged"
        if outcome.maybe_stored:
            fate += f", up to {outcome.maybe_stored:,} more may have been stored"
        code = ExitCode.PARTIAL if outcome.acknowledged else ExitCode.FAILURE
        if not outcome.acknowledged and not isinstance(outcome.failure.__cause__, BrokerError):
            code = ExitCode.UNREACHABLE
        raise Failure(
            f"The broker at {request.tcp_address}: {outcome.failure.reason}; {fate}. {going_on}.", code
        )
    if outcome.stopped is not None:
        if outcome.position < outcome.end:
            talk(f"{going_on}.")
        return outcome.stopped
    return ExitCode.DAMAGED if outcome.damaged else ExitCode.OK


def _as_json(request: TopicRequest, outcome: ReplayOutcome, elapsed_s: float) -> dict[str, Any]:
    return {
        "source": request.source,
        "topic": request.topic,
        "dry_run": request.dry_run,
        "published": outcome.acknowledged,
        "published_bytes": outcome.acknowledged_bytes,
        "left_out": outcome.left_out,
        "missing": outcome.missing,
        "damaged": outcome.damaged,
        "first_sequence": outcome.begun,
        "next_sequence": outcome.position,
        "end_sequence": outcome.end,
        "elapsed_s": round(elapsed_s, 3),
    }


def _report(request: TopicRequest, outcome: ReplayOutcome, elapsed_s: float) -> str:
    text = f"{count_of(outcome.acknowledged, 'message')} ({size(outcome.acknowledged_bytes)}) of {request.source} "
    if request.dry_run:
        text += f"would be published to {request.topic}"
    else:
        text += (
            f"published to {request.topic} in {elapsed_s:.2f} s: "
            f"{rate(outcome.acknowledged / elapsed_s)} messages/s"
        )
    if outcome.position > outcome.begun:
        text += f"; sequences {outcome.begun} to {outcome.position - 1}"
    if outcome.left_out:
        text += f"; {outcome.left_out:,} left out, which do not match"
    if outcome.missing:
        text += f"; {outcome.missing:,} missing"
    return text
