"""What the result of a request means for its messages and for the receiver. No IO; time is a parameter."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from enum import Enum

from ...event_loop.retries import doubled_s

RETRIED_STATUSES = frozenset({408, 425, 429})
"""Retried besides 500 and above, which excludes 501 and 505: these say that the server will never do it."""
_NEVER = frozenset({501, 505})
_BUSY = frozenset({429, 503})
SPLIT_STATUSES = frozenset({400, 413, 422})
"""Refusals that may be about one message of a batch: its halves are sent again."""


class Verdict(Enum):
    """The result of a request.

    - DONE: the receiver accepted it.
    - FINAL: the receiver refused it for good. Another attempt would have the same result.
    - FAILED: it failed; the message is tried again later.
    - UNAVAILABLE: the receiver takes no requests now, whichever message: it cannot be reached, or is busy.
    """

    DONE = "done"
    FINAL = "final"
    FAILED = "failed"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a request.

    Attributes:
        reason: Why it did not succeed; empty for DONE.
        status: The HTTP status; None: there was no complete answer.
        retry_after_s: How long the receiver asked to wait; None: it did not say.
    """

    verdict: Verdict
    reason: str = ""
    status: int | None = None
    retry_after_s: float | None = None

    @property
    def was_not_sent(self) -> bool:
        """Whether the request is invalid, so that it says nothing about the receiver."""
        return self.verdict is Verdict.FINAL and self.status is None


@dataclass(frozen=True, slots=True)
class StatusRules:
    """Which statuses are final.

    Attributes:
        retried: Retry these, whatever the default is.
        final: Do not retry these, whatever the default is.
    """

    retried: Collection[int] = ()
    final: Collection[int] = ()

    def verdict(self, status: int) -> Verdict:
        if 200 <= status < 300:
            return Verdict.DONE
        if status in self.final:
            return Verdict.FINAL
        if status in _BUSY:
            return Verdict.UNAVAILABLE
        if status in self.retried or status in RETRIED_STATUSES or (status >= 500 and status not in _NEVER):
            return Verdict.FAILED
        return Verdict.FINAL


def retry_after_s(value: str, now_s: float) -> float | None:
    """Return how long a Retry-After header (RFC 9110 10.2.3) asks to wait; None: it is invalid.

    Args:
        value: Seconds, or a date.
        now_s: Unix seconds.
    """
    value = value.strip()
    if re.fullmatch(r"[0-9]{1,9}", value):
        return float(value)
    try:
        at = parsedate_to_datetime(value)
        return max(0.0, (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - now_s)
    except (ValueError, OverflowError):
        return None


@dataclass(frozen=True, slots=True)
class RetryDelays:
    """The delay before a failed message is delivered again.

    Attributes:
        first_s: The delay after the first attempt; it doubles with each attempt.
        max_s: The longest delay.
    """

    first_s: float = 1.0
    max_s: float = 300.0

    def delay_ms(self, attempts: int, random: Callable[[], float]) -> int:
        """Return the delay after this attempt: at random between half of it and all of it, at least 1 ms."""
        delay_s = doubled_s(self.first_s, max(attempts, 1) - 1, self.max_s)
        return max(1, round(1000 * delay_s * (1 - random() / 2)))
