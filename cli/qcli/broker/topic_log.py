"""Converts errors of reading a topic's log over HTTP to failures, and reports gaps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trio_nsq.protocol.address import is_unix_path

from ..framework.errors import leaf_exceptions, reason_of
from ..framework.output import print_diagnostic
from ..framework.params import is_https
from ..framework.positions import is_in_future
from .address_options import HTTP_OPTION
from .failures import NO_ANSWER, hung_up, not_a_broker, tls_failure, unreachable
from .refusals import read_failure
from .wrong_ports import what_listens

if TYPE_CHECKING:
    from trio_nsq.client.reading.topic_reader import TopicReader


@contextmanager
def reading_errors(address: str) -> Iterator[None]:
    """Convert errors of a `TopicReader` of this HTTP address inside the block to failures, also those of tasks."""
    from trio_nsq.client import ConnectionFailed, RequestRefused
    from trio_nsq.client.reading.topic_reader import AnswerSilent

    try:
        yield
    except Exception as group:
        for error in leaf_exceptions(group):
            if isinstance(error, RequestRefused):
                raise read_failure(error) from error
            if isinstance(error, ConnectionFailed):
                if failure := tls_failure(error.address, error):
                    raise failure from error
                cause = error.__cause__
                reason = reason_of(cause) if isinstance(cause, OSError) else error.reason
                if isinstance(cause, AnswerSilent):
                    reason = f"{NO_ANSWER}: {error.reason}"
                elif not (isinstance(cause, OSError) or is_https(address) or is_unix_path(address)):
                    if what_listens(address):
                        raise not_a_broker(address) from error
                    reason = hung_up(error.address)
                raise unreachable(error.address, HTTP_OPTION, reason) from error
        raise


def report_start(topic: str, reader: TopicReader, first: str | None) -> None:
    """Print a note if a new reader begins at another position than `first`, or if its range is empty.

    Sequences before the oldest message are reported later, as a gap.
    """
    from trio_nsq.log.positions import sequence_of

    why = ""
    sequence = None if first is None else sequence_of(first)
    if first is not None and is_in_future(first, time.time()):
        why = "--from is in the future"
    elif sequence is not None and sequence > reader.start_sequence:
        newest = (
            f"the newest message is {reader.start_sequence - 1}" if reader.start_sequence else "it is empty"
        )
        why = f"there is no message {first} yet, {newest}"
    if reader.end_sequence is None:
        if why:
            print_diagnostic(f"Note: {topic}: {why}; reading new messages.")
    elif reader.position >= reader.end_sequence:
        why = why or f"it begins and ends at message {reader.end_sequence}"
        print_diagnostic(f"Note: {topic}: the range is empty: {why}.")
    if reader.start_is_time and reader.start_sequence == reader.first_sequence > 0:
        print_diagnostic(f"Note: {topic}: the oldest retained message is {reader.first_sequence}.")


def report_gap(topic: str, first: int, end: int, reason: str) -> bool:
    """Report the missing messages [first, end) and the reason; return whether they are damaged."""
    many = end - first > 1
    which = f"messages {first} to {end - 1} are" if many else f"message {first} is"
    if reason == "damaged":
        print_diagnostic(f"Damage: {topic}: {which} damaged or missing in the log; skipped.")
        return True
    print_diagnostic(f"Note: {topic}: {which} no longer retained.")
    return False
