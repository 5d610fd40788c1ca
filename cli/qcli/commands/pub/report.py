"""Reports the result of `pub`, and returns its exit code."""

import re

from trio_nsq.client import AuthRefused, BrokerError, HeadersRefused
from trio_nsq.text.durations import duration_text
from trio_nsq.text.wording import count_of

from ...broker.failures import connection_failure, refused
from ...framework.errors import ExitCode, Failure
from ...framework.output import end_echoed_line, print_diagnostic, size
from ...framework.output import rate as per_second
from .options import PubOptions
from .results import BrokerResult, PublishResult

_OUT_OF_RANGE = re.compile(r"^DPUB timeout \d+ out of range 0-(\d+)")


def conclude(options: PubOptions, result: PublishResult, elapsed_s: float) -> ExitCode:
    """Report, and return the exit code. Raises Failure: not all messages were acknowledged."""
    failed = [broker for broker in result.brokers if broker.failure is not None]
    reason = " ".join(_failure(options, broker) for broker in failed) or result.input_failure
    if not options.quiet and (result.acknowledged or reason is None):
        if result.stopped == ExitCode.INTERRUPTED and not options.shows_progress:
            end_echoed_line()  # removing a status line removes ^C, too
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
        if broker.not_stored:
            fate += f", {broker.not_stored:,} more had been read"
        fates[broker.address] = fate
    if len(set(fates.values())) > 1:
        return "; ".join(f"{address}: {fate}" for address, fate in fates.items())
    (fate,) = set(fates.values())
    return f"At each broker: {fate}" if len(fates) > 1 else fate


def _is_gone(broker: BrokerResult) -> bool:
    """Return whether the broker's failure is a lost connection: it did not refuse."""
    cause = broker.failure and broker.failure.__cause__
    return broker.failure is not None and not isinstance(cause, BrokerError | AuthRefused | HeadersRefused)


def _failure(options: PubOptions, broker: BrokerResult) -> str:
    error = broker.failure
    assert error is not None
    if _is_gone(broker):
        return f"The connection to the broker at {broker.address} was lost ({error.reason})."
    name = f"The broker at {broker.address}"
    delay = f"--defer {duration_text(options.defer_ms)}" if options.defer_ms else "the delay of a record"
    cause = error.__cause__
    if isinstance(cause, AuthRefused):
        return connection_failure(cause, broker.address).message
    if isinstance(cause, HeadersRefused):
        return (
            f"{name} does not know headers of messages: it is an nsqd, or an older 'qcli serve'. Leave out --header, "
            "or remove the headers of records: jq -c 'del(.headers)'."
        )
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
    if brokers and result.is_spread:
        brokers += f" ({', '.join(f'{each.address}: {each.acknowledged:,}' for each in result.brokers)})"
    text = (
        f"{count_of(result.acknowledged, 'message')} ({size(result.acknowledged_bytes)}) published to "
        f"{topic}{brokers} in {elapsed_s:.2f} s: {per_second(result.acknowledged / elapsed_s)} messages/s, "
        f"{size(result.acknowledged_bytes / elapsed_s)}/s"
    )
    if result.skipped:
        text += f"; {count_of(result.skipped, 'bad line')} skipped"
    if result.empty:
        text += f"; {result.empty:,} empty skipped"
    if moved := sum(broker.moved_in_doubt for broker in result.brokers):
        text += f"; up to {moved:,} may be stored at two brokers"
    if result.unfinished_bytes and result.stopped:
        text += f"; an incomplete message ({size(result.unfinished_bytes)}) was not published"
    return text
