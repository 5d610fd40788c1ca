"""What `pub` says at its end, and with which exit code."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from trio_nsq.wording import count_of

from ...framework.errors import Failure
from ...framework.exit_codes import ExitCode
from ...framework.output import print_diagnostic, size
from ...framework.output import rate as per_second
from ...framework.params import duration_text
from .options import PubOptions

if TYPE_CHECKING:
    from .publish import BrokerResult, PublishResult

_OUT_OF_RANGE = re.compile(r"^DPUB timeout \d+ out of range 0-(\d+)")


def conclude(options: PubOptions, result: PublishResult, elapsed_s: float) -> ExitCode:
    """Report, and say how the command ends.

    Raises:
        Failure: It did not go well.
    """
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
    """How much was acknowledged and what became of the rest, at each broker if they differ."""
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
    """Whether the terminal has written ^C into the line that comes next. The line of progress took it along."""
    return sys.stderr is not None and sys.stderr.isatty() and not options.shows_progress


def _is_gone(broker: BrokerResult) -> bool:
    from trio_nsq.client import BrokerError

    return broker.failure is not None and not isinstance(broker.failure.__cause__, BrokerError)


def _failure(options: PubOptions, broker: BrokerResult) -> str:
    from trio_nsq.client import BrokerError

    error = broker.failure
    assert error is not None
    if _is_gone(broker):
        return f"The broker at {broker.address} went away ({error.reason})."
    name = "The broker" if len(options.nsqd_tcp_addresses) == 1 else f"The broker at {broker.address}"
    cause = error.__cause__
    if isinstance(cause, BrokerError) and cause.code == "INVALID_DEFER":
        return (
            f"{name} does not defer for that long (--max-defer of 'qcli serve'), and --defer is "
            f"{duration_text(options.defer_ms)}."
        )
    if options.defer_ms and isinstance(cause, BrokerError) and (most := _OUT_OF_RANGE.search(cause.text)):
        return (
            f"{name} defers for no longer than {duration_text(int(most[1]))} (--max-defer of 'qcli serve', "
            f"--max-req-timeout of nsqd), and --defer is {duration_text(options.defer_ms)}."
        )
    if isinstance(cause, BrokerError) and cause.code == "E_TOPIC_FULL":
        limit = cause.text.partition(" failed ")[2] or cause.text
        return f"{name} refused: {limit}."  # which says that nothing of it was stored
    hint = " Say --tls." if isinstance(cause, BrokerError) and "TLS required" in cause.text else ""
    return f"{name} refused: {error.reason}.{hint}"


def _report(options: PubOptions, result: PublishResult, elapsed_s: float) -> str:
    brokers = f" on {len(result.brokers)} brokers" if len(result.brokers) > 1 else ""
    text = (
        f"{count_of(result.acknowledged, 'message')} ({size(result.acknowledged_bytes)}) published to "
        f"{options.topic}{brokers} in {elapsed_s:.2f} s: {per_second(result.acknowledged / elapsed_s)} messages/s, "
        f"{size(result.acknowledged_bytes / elapsed_s)}/s"
    )
    if result.empty:
        text += f"; {result.empty:,} empty skipped"
    if result.unfinished_bytes and result.stopped:
        text += f"; a message that was read only in part ({size(result.unfinished_bytes)}) was not published"
    if result.held_back:
        text += f"; {count_of(result.held_back, 'message')} read and not published"
    return text
