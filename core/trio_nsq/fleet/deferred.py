"""Cancels the deferred messages of a channel on one broker, in pages. Procedures, without IO."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..api import broker as api
from ..api.request import Procedure, ask

_IDS_AT_ONCE = 500
"""What a broker accepts in a request."""


@dataclass(slots=True)
class Cancelled:
    """What one broker cancelled.

    Attributes:
        ids: The messages.
        missed: The number of messages that were not deferred any more.
        is_finished: Whether there is nothing left to cancel.
    """

    ids: list[str] = field(default_factory=list)
    missed: int = 0
    is_finished: bool = True


def cancel(topic: str, channel: str, ids: Sequence[str], cancelled: Cancelled) -> Procedure[None]:
    """Cancel these messages; `cancelled` gets what was done, also if a request fails."""
    for at in range(0, len(ids), _IDS_AT_ONCE):
        page = ids[at : at + _IDS_AT_ONCE]
        done = yield from ask(api.cancel_deferred(topic, channel, page))
        cancelled.ids += done
        cancelled.missed += len(page) - len(done)


def cancel_all(
    topic: str, channel: str, cancelled: Cancelled, goes_on: Callable[[], bool]
) -> Procedure[None]:
    """Cancel all messages, as `cancel`; `goes_on` is asked after each page."""
    while True:
        lines = yield from ask(api.deferred(topic, channel, _IDS_AT_ONCE))
        before = len(cancelled.ids)
        yield from cancel(topic, channel, [line["id"] for line in lines if "id" in line], cancelled)
        if len(cancelled.ids) == before:
            return  # there are none, or the rest is due by now
        if not goes_on():
            cancelled.is_finished = False
            return
