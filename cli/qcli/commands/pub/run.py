"""Connects to the brokers, publishes, and reports the result."""

import re
import sys
from contextlib import AsyncExitStack

import trio

from trio_nsq.client import AuthRefused, BrokerError, ConnectionFailed, Producer
from trio_nsq.protocol import Limits
from trio_nsq.wording import count_of

from ...broker.connection_options import ConnectOptions
from ...broker.failures import connection_failure, refused
from ...framework.errors import ExitCode, Failure
from ...framework.output import is_terminal, print_diagnostic, silence_library, size
from ...framework.output import rate as per_second
from ...framework.params import duration_text
from ...framework.signals import watch_signals
from ..shared.rate_limiter import RateLimiter
from .batches import BatchSource, Lines
from .input import READ_BYTES, Splitter
from .options import PubOptions
from .pipeline import PublishPipeline
from .records import RecordParser, Records
from .results import BrokerResult, PublishResult
from .send import Sender, TCPSender, numbered_sender

_ANY_TOPIC = "qcli-pub"
"""A topic name to ask a broker for the numbers of, which creates nothing."""

RATED_READ_BYTES = 4096
"""With --rate: read little ahead, so that few messages are unpublished when a signal arrives."""


async def publish(options: PubOptions, brokers: dict[str, str]) -> PublishResult:
    """Publish all input to each broker. `brokers` has their HTTP addresses by TCP address.

    Raises Failure: a broker is unreachable; nothing was published.
    """
    silence_library()
    connecting = ConnectOptions.of_command()
    async with AsyncExitStack() as stack:
        senders = {}
        for address, http_address in brokers.items():
            senders[address] = await _connect(options, address, http_address, connecting, stack)
        batch_size = min(sender.batch_size for sender in senders.values())
        limiter = RateLimiter(options.rate, trio.current_time()) if options.rate else None
        async with trio.open_nursery() as nursery:
            pipeline = PublishPipeline(
                senders,
                _source(options, batch_size, limiter),
                retry=not options.no_retry,
                limiter=limiter,
            )
            await nursery.start(watch_signals, pipeline.stop)
            if options.shows_progress:
                from ...terminal.progress import show_progress

                result = pipeline.result
                nursery.start_soon(
                    show_progress, lambda: (result.acknowledged, result.acknowledged_bytes, result.share)
                )
            await pipeline.run(options.inputs, RATED_READ_BYTES if options.rate else READ_BYTES)
            for broker in pipeline.result.brokers:
                if broker.failure is None:
                    await senders[broker.address].end()
            nursery.cancel_scope.cancel()
    return pipeline.result


def _source(options: PubOptions, batch_size: int, limiter: RateLimiter | None) -> BatchSource:
    """Return the maker of batches; `batch_size` counts unless the user or the limiter sets another size."""
    batch_size = options.batch_size or batch_size
    if limiter is not None:
        batch_size = min(batch_size, limiter.max_messages)
    if options.reads_json:
        parser = RecordParser(options.common_topic, options.common_defer_ms, options.max_msg_size)
        return Records(parser, options.max_msg_size, batch_size, skip_bad=options.skip_bad)
    assert options.topic is not None
    splitter = Splitter(options.delimiter, options.max_msg_size, strip_cr=options.strip_cr)
    return Lines(splitter, batch_size, options.topic, options.defer_ms)


async def _connect(
    options: PubOptions, address: str, http_address: str, connecting: ConnectOptions, stack: AsyncExitStack
) -> Sender:
    """Connect to a broker, until the stack is closed. Raises Failure: it is unreachable, or refuses."""
    producer = Producer(
        address,
        max_msg_size=options.max_msg_size,
        # An MPUB with one message has 8 more bytes.
        max_body_size=max(Limits().max_body_size, options.max_msg_size + 8),
        ordered=True,  # acknowledged messages are the first ones, without a gap
        **connecting.options(),
    )
    try:
        await stack.enter_async_context(producer)
    except ConnectionFailed as error:
        failure = connection_failure(error, address)
        if len(options.nsqd_tcp_addresses) > 1:
            failure = Failure(f"{failure.message} Nothing was published to any broker.", failure.exit_code)
        raise failure from error
    over_tcp = TCPSender(producer)
    if options.no_retry:
        return over_tcp
    return (
        await numbered_sender(address, http_address, options.common_topic or _ANY_TOPIC, connecting, over_tcp)
        or over_tcp
    )


_OUT_OF_RANGE = re.compile(r"^DPUB timeout \d+ out of range 0-(\d+)")


def conclude(options: PubOptions, result: PublishResult, elapsed_s: float) -> ExitCode:
    """Report, and return the exit code. Raises Failure: not all messages were acknowledged."""
    failed = [broker for broker in result.brokers if broker.failure is not None]
    reason = " ".join(_failure(options, broker) for broker in failed) or result.input_failure
    if not options.quiet and (result.acknowledged or reason is None):
        if result.stopped == ExitCode.INTERRUPTED and _stands_after_echo(options):
            print_diagnostic("")
        print_diagnostic(_report(options, result, elapsed_s))
    if reason is None:
        return result.stopped or ExitCode.OK
    code = ExitCode.FAILURE
    if any(broker.acknowledged for broker in result.brokers):
        code = ExitCode.PARTIAL
    elif failed and all(map(_is_gone, failed)):
        code = ExitCode.UNREACHABLE
    raise Failure(f"{reason} {_fates(result)}.", code)


def _fates(result: PublishResult) -> str:
    """Return the numbers of acknowledged and other messages, for each broker if they differ."""
    fates = {}
    for broker in result.brokers:
        fate = f"{count_of(broker.acknowledged, 'message')} acknowledged"
        if broker.maybe_stored:
            fate += f", up to {broker.maybe_stored:,} more may have been stored"
        if unsent := broker.not_stored + result.held_back:
            fate += f", {unsent:,} more had been read"
        fates[broker.address] = fate
    if len(set(fates.values())) > 1:
        return "; ".join(f"{address}: {fate}" for address, fate in fates.items())
    (fate,) = set(fates.values())
    return f"At each broker: {fate}" if len(fates) > 1 else fate


def _stands_after_echo(options: PubOptions) -> bool:
    """Return whether the terminal has echoed ^C into the current line. Removing a status line removes ^C too."""
    return is_terminal(sys.stderr) and not options.shows_progress


def _is_gone(broker: BrokerResult) -> bool:
    """Return whether the broker's failure is a lost connection: it did not refuse."""
    cause = broker.failure and broker.failure.__cause__
    return broker.failure is not None and not isinstance(cause, BrokerError | AuthRefused)


def _failure(options: PubOptions, broker: BrokerResult) -> str:
    error = broker.failure
    assert error is not None
    if _is_gone(broker):
        return f"The connection to the broker at {broker.address} was lost ({error.reason})."
    name = "The broker" if len(options.nsqd_tcp_addresses) == 1 else f"The broker at {broker.address}"
    delay = f"--defer {duration_text(options.defer_ms)}" if options.defer_ms else "the delay of a record"
    cause = error.__cause__
    if isinstance(cause, AuthRefused):
        return connection_failure(cause, broker.address).message
    if isinstance(cause, BrokerError) and cause.code == "INVALID_DEFER":
        return f"{name} does not allow {delay}: see --max-defer of 'qcli serve'."
    if isinstance(cause, BrokerError) and (most := _OUT_OF_RANGE.search(cause.text)):
        return (
            f"{name} does not allow {delay}: the maximum is "
            f"{duration_text(int(most[1]))} (--max-defer of 'qcli serve', --max-req-timeout of nsqd)."
        )
    if isinstance(cause, BrokerError) and cause.code == "E_TOPIC_FULL":
        limit = cause.text.partition(" failed ")[2] or cause.text
        return f"{name} refused: {limit}."  # this text says that nothing was stored
    assert isinstance(cause, BrokerError)
    return refused(name, cause)


def _report(options: PubOptions, result: PublishResult, elapsed_s: float) -> str:
    topic = options.common_topic
    if topic is None:
        topic = (
            next(iter(result.topics)) if len(result.topics) == 1 else count_of(len(result.topics), "topic")
        )
    brokers = f" on {len(result.brokers)} brokers" if len(result.brokers) > 1 else ""
    text = (
        f"{count_of(result.acknowledged, 'message')} ({size(result.acknowledged_bytes)}) published to "
        f"{topic}{brokers} in {elapsed_s:.2f} s: {per_second(result.acknowledged / elapsed_s)} messages/s, "
        f"{size(result.acknowledged_bytes / elapsed_s)}/s"
    )
    if result.skipped:
        text += f"; {count_of(result.skipped, 'bad line')} skipped"
    if result.empty:
        text += f"; {result.empty:,} empty skipped"
    if result.unfinished_bytes and result.stopped:
        text += f"; an incomplete message ({size(result.unfinished_bytes)}) was not published"
    if result.held_back:
        text += f"; {count_of(result.held_back, 'message')} read and not published"
    return text
