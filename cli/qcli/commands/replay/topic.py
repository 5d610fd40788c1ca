"""`replay` of a topic: connects to both brokers, and reports."""

import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import trio

from trio_nsq.api import broker as api
from trio_nsq.client import AuthRefused, BrokerError, ConnectionFailed, HeadersRefused, Producer
from trio_nsq.client.http.job_reporter import JobProgress
from trio_nsq.client.reading.topic_reader import TopicReader
from trio_nsq.protocol.address import is_unix_path
from trio_nsq.text.wording import count_of

from ...broker.address_options import HTTP_OPTION, TCP_OPTION, check_default_tcp_address
from ...broker.admin_client import AdminClient
from ...broker.brokers import Brokers, combined
from ...broker.connection_options import ConnectOptions
from ...broker.failures import connection_failure, refused
from ...broker.requests import ask
from ...broker.topic_log import reading_errors, report_start
from ...framework import output
from ...framework.errors import ExitCode, Failure
from ...framework.params import without_scheme
from ...framework.signals import at_first_signal, run_trio
from ...records.jobs import TopicReplayRecord
from ..shared.job_reports import job_reports
from .options import ReplayOptions
from .publish import TopicReplay, TopicReplayResult

_MAX_BYTES = 2**30
"""The client's limit: large, because the broker checks its own limit."""


@dataclass(frozen=True, slots=True)
class _Route:
    """The replay from one broker.

    Attributes:
        source: The broker's HTTP address.
        destination: The TCP address to publish to.
        count: The maximum of messages; None: no limit.
        brokers: All brokers of the command.
    """

    source: str
    destination: str
    count: int | None
    brokers: Brokers


def replay_topic(options: ReplayOptions) -> ExitCode:
    """Run the command and return its exit code. Raises Failure: not all messages were published."""
    assert options.source is not None
    if (path := Path(options.source)).exists():
        kind = "folder" if path.is_dir() else "file"
        output.print_diagnostic(
            f"Note: this replays the topic {options.source}. To replay the {kind} of this name, write "
            f"./{options.source}"
        )
    brokers = options.brokers()
    destinations = options.destinations(brokers)
    if not options.dry_run and not brokers.is_fleet:
        check_default_tcp_address("messages go to")
    if not brokers.is_fleet:
        ((address, destination),) = destinations.items()
        return _replay_from(options, _Route(address, destination or "", options.count, brokers))[0]
    return _replay_from_all(options, brokers, destinations)


def _replay_from_all(
    options: ReplayOptions, brokers: Brokers, destinations: dict[str, str | None]
) -> ExitCode:
    """Replay the topic from one broker after the other, also after a failure of another one."""
    # Brokers that do not answer, or do not have the topic, are found at once.
    answers = brokers.read(lambda address: _tcp_address(address, str(options.source), destinations[address]))
    failures = list(answers.failures.values())
    left, worst, published = options.count, ExitCode.OK, False
    for address, destination in answers.results.items():
        if left == 0:
            break
        try:
            code, count = _replay_from(options, _Route(address, destination, left, brokers))
        except Failure as failure:
            failures.append(brokers.named(address, failure))
            published |= failure.exit_code == ExitCode.PARTIAL
            continue
        if code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
            return code
        worst, published = max(worst, code), True
        left = None if left is None else left - count
    if failures:
        raise combined(failures, partial=published)
    return worst


def _tcp_address(address: str, topic: str, destination: str | None) -> str:
    """Return where to publish the messages of a broker that has the topic. Raises Failure."""
    ask(address, api.bounds(topic))
    if destination is not None:
        return destination
    port = AdminClient(address).info().get("tcp_port")
    host = "localhost" if is_unix_path(address) else without_scheme(address).rpartition(":")[0]
    return f"{host}:{port}"


def _replay_from(options: ReplayOptions, route: _Route) -> tuple[ExitCode, int]:
    """Replay the topic from one broker; return the exit code and the number of messages. Raises Failure."""
    begun_s = time.monotonic()
    assert options.source is not None
    current = TopicReplayResult()

    def show(begun: TopicReplayResult) -> None:
        nonlocal current
        current = begun

    brokers = () if options.dry_run else (route.source,)
    name = f"{options.source} to {options.topic}"
    with job_reports(
        brokers, "replay", options.source, lambda: _progress(current, options, route), name=name
    ) as reporter:
        result = run_trio(_replay, options, route, show)
        if result.failure is not None:
            reporter.end("failed", str(result.failure))
        elif result.stopped is not None:
            reporter.end("stopped")
    return _conclude(options, route, result, time.monotonic() - begun_s), result.acknowledged


def _progress(result: TopicReplayResult, options: ReplayOptions, route: _Route) -> JobProgress:
    total = result.end - result.begun
    if route.count is None:
        return JobProgress(result.position - result.begun, total)
    is_known = options.pattern is None
    return JobProgress(result.position - result.begun, min(total, route.count) if is_known else None)


async def _replay(
    options: ReplayOptions, route: _Route, show: Callable[[TopicReplayResult], None]
) -> TopicReplayResult:
    assert options.source is not None
    output.silence_library()
    connecting = ConnectOptions.of_command()
    try:
        async with AsyncExitStack() as stack:
            producer = None
            if not options.dry_run:
                producer = await stack.enter_async_context(
                    Producer(
                        route.destination,
                        max_msg_size=_MAX_BYTES,
                        max_body_size=_MAX_BYTES,
                        **connecting.options(),
                    )
                )
            with reading_errors(route.source):
                async with (
                    TopicReader(
                        without_scheme(route.source),
                        options.source,
                        tls=connecting.https_context(route.source),
                        auth_secret=connecting.auth_secret,
                        start=options.first or "earliest",
                        end=options.end,
                        max_messages=route.count if options.pattern is None else None,
                    ) as reader,
                    trio.open_nursery() as nursery,
                ):
                    output.show_library_warnings()
                    report_start(options.source, reader, options.first)
                    replay = TopicReplay(options, reader, producer, route.count)
                    show(replay.result)
                    at_first_signal(replay.stop)
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
        raise connection_failure(error, route.destination) from error
    return replay.result


def _conclude(options: ReplayOptions, route: _Route, result: TopicReplayResult, elapsed_s: float) -> ExitCode:
    """Report, and return the exit code. Raises Failure: not all messages were published."""
    if options.form == "json":
        record = _result_as_json(options, result, elapsed_s)
        output.write(output.json_lines(route.brokers.records([record], route.source)))
    elif not options.quiet:
        output.print_diagnostic(_report(options, result, elapsed_s) + route.brokers.suffix(route.source))
    resume = f"Continue with --from {result.position} --to {result.end}"
    if route.count is not None:
        resume += f" -n {route.count - result.acknowledged}"
    if route.brokers.is_fleet:
        resume += f" {HTTP_OPTION} {route.source} {TCP_OPTION} {route.destination}"
    if result.failure is not None:
        fate = f"{count_of(result.acknowledged, 'message')} acknowledged"
        if result.maybe_stored:
            fate += f", up to {result.maybe_stored:,} more may have been stored"
        code = ExitCode.PARTIAL if result.acknowledged else ExitCode.FAILURE
        answered = isinstance(result.failure.__cause__, BrokerError | AuthRefused | HeadersRefused)
        if not result.acknowledged and not answered:
            code = ExitCode.UNREACHABLE
        broker, cause = f"The broker at {route.destination}", result.failure.__cause__
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


def _result_as_json(options: ReplayOptions, result: TopicReplayResult, elapsed_s: float) -> TopicReplayRecord:
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
    return output.with_counts(text, (result.left_out, "{} do not match"), (result.missing, "{} missing"))
