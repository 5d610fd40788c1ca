"""`replay` of a topic: connects to both brokers, and reports."""

import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import trio

from trio_nsq.client import AuthRefused, BrokerError, ConnectionFailed, Producer
from trio_nsq.client.reading.topic_reader import TopicReader
from trio_nsq.wording import count_of

from ...broker.address_options import note_default_tcp_address
from ...broker.connection_options import ConnectOptions
from ...broker.failures import connection_failure, refused
from ...broker.topic_log import reading_errors, report_start
from ...framework import output
from ...framework.errors import ExitCode, Failure
from ...framework.params import without_scheme
from ...framework.signals import watch_signals
from .options import ReplayOptions
from .publish import TopicReplay, TopicReplayResult

_MAX_BYTES = 2**30
"""The client's limit: large, because the broker checks its own limit."""


def replay_topic(options: ReplayOptions) -> ExitCode:
    """Run the command and return its exit code. Raises Failure: not all messages were published."""
    assert options.source is not None
    if (path := Path(options.source)).exists():
        kind = "folder" if path.is_dir() else "file"
        output.print_diagnostic(
            f"Note: {options.source} is a topic here; for the {kind} of this name, write ./{options.source}"
        )
    if not options.dry_run:
        note_default_tcp_address("messages go to")
    begun_s = time.monotonic()
    result = trio.run(_replay, options)
    return _conclude(options, result, time.monotonic() - begun_s)


async def _replay(options: ReplayOptions) -> TopicReplayResult:
    assert options.source is not None
    output.silence_library()
    connecting = ConnectOptions.of_command()
    try:
        async with AsyncExitStack() as stack:
            producer = None
            if not options.dry_run:
                producer = await stack.enter_async_context(
                    Producer(
                        options.nsqd_tcp_address,
                        max_msg_size=_MAX_BYTES,
                        max_body_size=_MAX_BYTES,
                        **connecting.options(),
                    )
                )
            with reading_errors(options.nsqd_http_address):
                async with (
                    TopicReader(
                        without_scheme(options.nsqd_http_address),
                        options.source,
                        tls=connecting.https_context(options.nsqd_http_address),
                        auth_secret=connecting.auth_secret,
                        start=options.first or "earliest",
                        end=options.end,
                        max_messages=options.count if options.pattern is None else None,
                    ) as reader,
                    trio.open_nursery() as nursery,
                ):
                    output.show_library_warnings()
                    report_start(options.source, reader, options.first)
                    replay = TopicReplay(options, reader, producer)
                    await nursery.start(watch_signals, replay.stop)
                    if not options.quiet and output.is_live_terminal(sys.stderr):
                        from ...terminal.progress import show_progress

                        result = replay.result
                        nursery.start_soon(
                            show_progress,
                            lambda: (result.acknowledged, result.acknowledged_bytes, result.share),
                        )
                    await replay.run()
                    nursery.cancel_scope.cancel()
    except ConnectionFailed as error:
        raise connection_failure(error, options.nsqd_tcp_address) from error
    return replay.result


def _conclude(options: ReplayOptions, result: TopicReplayResult, elapsed_s: float) -> ExitCode:
    """Report, and return the exit code. Raises Failure: not all messages were published."""
    if options.form == "json":
        output.write(output.json_lines([_result_as_json(options, result, elapsed_s)]))
    elif not options.quiet:
        output.print_diagnostic(_report(options, result, elapsed_s))
    resume = f"Continue with --from {result.position} --to {result.end}"
    if options.count is not None:
        resume += f" -n {options.count - result.acknowledged}"
    if result.failure is not None:
        fate = f"{count_of(result.acknowledged, 'message')} acknowledged"
        if result.maybe_stored:
            fate += f", up to {result.maybe_stored:,} more may have been stored"
        code = ExitCode.PARTIAL if result.acknowledged else ExitCode.FAILURE
        if not result.acknowledged and not isinstance(result.failure.__cause__, BrokerError | AuthRefused):
            code = ExitCode.UNREACHABLE
        broker, cause = f"The broker at {options.nsqd_tcp_address}", result.failure.__cause__
        reason = f"{broker}: {result.failure.reason}."
        if isinstance(cause, BrokerError):
            reason = refused(broker, cause)
        elif isinstance(cause, AuthRefused):
            reason = connection_failure(cause).message
        raise Failure(f"{reason} {fate}. {resume}.", code)
    if result.stopped is not None:
        if result.position < result.end:
            output.print_diagnostic(f"{resume}.")
        return result.stopped
    return ExitCode.DAMAGED if result.damaged else ExitCode.OK


def _result_as_json(options: ReplayOptions, result: TopicReplayResult, elapsed_s: float) -> dict[str, Any]:
    return {
        "source": options.source,
        "topic": options.topic,
        "dry_run": options.dry_run,
        "published": result.acknowledged,
        "published_bytes": result.acknowledged_bytes,
        "left_out": result.left_out,
        "missing": result.missing,
        "damaged": result.damaged,
        "first_sequence": result.begun,
        "next_sequence": result.position,
        "end_sequence": result.end,
        "elapsed_s": round(elapsed_s, 3),
    }


def _report(options: ReplayOptions, result: TopicReplayResult, elapsed_s: float) -> str:
    text = f"{count_of(result.acknowledged, 'message')} ({output.size(result.acknowledged_bytes)}) of {options.source} "
    if options.dry_run:
        text += f"would be published to {options.topic}"
    else:
        text += (
            f"published to {options.topic} in {elapsed_s:.2f} s: "
            f"{output.rate(result.acknowledged / elapsed_s)} messages/s"
        )
    if result.position > result.begun:
        text += f"; sequences {result.begun} to {result.position - 1}"
    if result.left_out:
        text += f"; {result.left_out:,} do not match"
    if result.missing:
        text += f"; {result.missing:,} missing"
    return text
