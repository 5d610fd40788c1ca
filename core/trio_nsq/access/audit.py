"""The audit log: who did what with which result, a line of JSON each. docs/reference/audit-log.md lists the fields.

This module collects the lines and does no IO; `audit_writer` writes them. The amount is bounded: strangers can cause
only so many lines a minute, and if the writer falls behind, new lines are dropped. Both are counted.
"""

import json
import math
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

from ..protocol.address import host_of
from .policy import Identity

Event = Literal["action", "refused", "login", "login_failed", "logout", "closed", "reload", "expired"]

MAX_QUEUED_LINES = 10_000
MAX_TEXT_BYTES = 192
"""Longer texts are cut off. Names of topics and channels are shorter, but clients can also send invalid ones."""

WINDOW_S = 60.0
MAX_REFUSALS_OF_CLIENT = 20
MAX_REFUSALS = 100
"""Lines about refusals in one window: of one client, and of all clients. With those about suppressed refusals,
strangers can cause 200 lines a minute, at most 200 MB a day."""


class AuditLog:
    """Collects the lines of one server's audit log.

    Args:
        enabled: Whether there is an audit log. Without one, nothing is recorded.
        unix_time: Returns the time of a line in Unix seconds.
        clock_s: Returns the time in seconds by a clock that is never set.

    Attributes:
        on_change: Called after a line was queued, and when the time of the next summary changed. It must not raise.
        recorded: Lines queued since the start.
        dropped: Lines not queued, because the writer fell behind.
        suppressed: Refusals not recorded, because there were too many.
    """

    def __init__(
        self,
        *,
        enabled: bool = False,
        unix_time: Callable[[], float] = time.time,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.enabled = enabled
        self.on_change: Callable[[], None] = _do_nothing
        self.recorded: int = 0
        self.dropped: int = 0
        self.suppressed: int = 0
        self._unix_time = unix_time
        self._clock_s = clock_s
        self._lines: deque[bytes] = deque()
        self._new_dropped = 0  # since the last line about them
        # A stranger must not hide what authenticated clients are refused.
        self._limits = {False: _RefusalLimit(), True: _RefusalLimit()}

    def record(
        self,
        event: Event,
        peer: str,
        identity: Identity | None,
        *,
        subject: str = "",
        **details: str | int | None,
    ) -> None:
        """Record an event.

        Args:
            peer: The client's address as `format_peer` formats it; empty if no client caused the event.
            identity: The client, if it is authenticated.
            subject: The subject of the client's verified certificate; empty without one.
            details: Further fields. None and empty texts are left out.
        """
        if not self.enabled:
            return
        now_s = self._clock_s()
        self._summarize(now_s)
        name = identity.name if identity is not None else ""
        if event in ("refused", "login_failed"):
            limit = self._limits[identity is not None]
            had_suppressed = limit.has_suppressed
            if not limit.admit((host_of(peer), name), now_s):
                self.suppressed += 1
                if not had_suppressed:
                    self.on_change()
                return
        source = ""
        if identity is not None:
            source = identity.source
            subject = identity.key if source == "certificate" else subject
        self._queue(event, address=peer, name=name, source=source, subject=subject, **details)

    def take(self) -> bytes:
        """Return the queued lines, and remove them; empty without any."""
        self._summarize(self._clock_s())
        lines = b"".join(self._lines)
        self._lines.clear()
        if self._new_dropped:
            count, self._new_dropped = self._new_dropped, 0
            lines += self._line("dropped", count=count)
        return lines

    def seconds_to_summary(self) -> float:
        """Return how long until `take` has a line about suppressed refusals; math.inf if there are none."""
        ends_s = min(limit.ends_s for limit in self._limits.values())
        return max(0.0, ends_s - self._clock_s()) if ends_s < math.inf else math.inf

    def finish(self) -> None:
        """Queue the lines about suppressed refusals, at the end of the server."""
        self._summarize(math.inf)

    def _summarize(self, now_s: float) -> None:
        for limit in self._limits.values():
            for (host, name), count in limit.summarize(now_s):
                self._queue("suppressed", address=host, name=name, count=count)

    def _queue(self, event: str, **fields: str | int | None) -> None:
        if len(self._lines) >= MAX_QUEUED_LINES:
            self.dropped += 1
            self._new_dropped += 1
            return
        self._lines.append(self._line(event, **fields))
        self.recorded += 1
        self.on_change()

    def _line(self, event: str, **fields: str | int | None) -> bytes:
        moment = datetime.fromtimestamp(self._unix_time(), UTC).isoformat(timespec="microseconds")
        line: dict[str, str | int] = {"time": moment.replace("+00:00", "Z"), "event": event}
        for key, value in fields.items():
            if value is not None and value != "":
                line[key] = _cut_off(value) if isinstance(value, str) else value
        # ASCII, so that no reader meets control characters or invalid text of a client.
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"


_Client = tuple[str, str]  # host and name


class _RefusalLimit:
    """Limits the recorded refusals in a window of time, and counts the others.

    Attributes:
        ends_s: The end of the window, if refusals were suppressed in it; else math.inf.
    """

    def __init__(self) -> None:
        self._window_ends_s = -math.inf
        self._counts: dict[_Client, int] = {}  # of clients with a recorded refusal, so at most MAX_REFUSALS
        self._recorded = 0
        self._suppressed: dict[_Client, int] = {}

    @property
    def has_suppressed(self) -> bool:
        return bool(self._suppressed)

    @property
    def ends_s(self) -> float:
        return self._window_ends_s if self._suppressed else math.inf

    def admit(self, client: _Client, now_s: float) -> bool:
        """Count a refusal, and return whether to record it. The caller has called `summarize` at this time."""
        if now_s >= self._window_ends_s:
            self._window_ends_s = now_s + WINDOW_S
            self._counts.clear()
            self._recorded = 0
        count = self._counts.get(client, 0)
        if count < MAX_REFUSALS_OF_CLIENT and self._recorded < MAX_REFUSALS:
            self._counts[client] = count + 1
            self._recorded += 1
            return True
        # Clients without a recorded refusal are counted together.
        counted = client if client in self._counts else ("", "")
        self._suppressed[counted] = self._suppressed.get(counted, 0) + 1
        return False

    def summarize(self, now_s: float) -> list[tuple[_Client, int]]:
        """If the window has ended, return the number of suppressed refusals by client; ("", "") has all others."""
        if not self._suppressed or now_s < self._window_ends_s:
            return []
        found, self._suppressed = list(self._suppressed.items()), {}
        return found


def _cut_off(text: str) -> str:
    """Return the beginning of a text that takes at most `MAX_TEXT_BYTES` in JSON."""
    text = text[:MAX_TEXT_BYTES]
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return text  # the fast path of most texts
    # JSON writes a character beyond ASCII with up to 12 bytes.
    return text if len(json.dumps(text)) <= MAX_TEXT_BYTES + len('""') else text[: MAX_TEXT_BYTES // 12]


def _do_nothing() -> None:
    pass
