"""Reports the progress of a long job to the brokers that it uses, which list it at `/jobs`.

Reports are sent by a thread of their own, and their failures are ignored: a report never slows the job, and never ends
it. A job that ends within a second is not reported.
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...access.secret import NO_SECRET, Secret
from ...api.broker import report_job
from ...protocol.address import without_secrets
from ...protocol.errors import NSQError
from ..connection.tls import TLSFiles
from ..errors import BrokerUnreachable, NotABroker, RequestRefused
from .broker_http import BrokerHTTP

logger: logging.Logger = logging.getLogger("trio_nsq.client")

REPORT_INTERVAL_S = 2.0
_TIMEOUT_S = 1.0
"""Of a connection and of an answer: the next report is soon due."""
_LAST_REPORT_S = 2.0
"""The longest wait at the end of a job for its last report."""
_KEEP_ALIVE_S = 4.0
_MAX_ANSWER_BYTES = 64 * 1024
_RATE_WINDOW_S = 10.0
_LONGEST = {"name": 200, "message": 500}
"""What the broker accepts."""

Outcome = Literal["succeeded", "failed", "stopped"]


@dataclass(slots=True)
class JobProgress:
    """The progress of a job. One thread changes it, another one reads it.

    Attributes:
        done, total: Messages so far and in the end; total None: not known.
        message: What the job does or waits for.
        lag: Messages that are known and not done yet; None: not known.
        lag_s: How old the messages that are not done may be, in seconds; None: not known.
        failures: What has failed and is tried again, since the start; None: not counted.
    """

    done: int = 0
    total: int | None = None
    message: str = ""
    lag: int | None = None
    lag_s: float | None = None
    failures: int | None = None

    def and_then(self, show: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Return a function that counts messages, and calls `show` with their number and the size of their bodies."""

        def advance(messages: int, size: int) -> None:
            self.done += messages
            show(messages, size)

        return advance


class JobReporter:
    """Reports one job from `start` to `end`.

    Args:
        addresses: The HTTP addresses of brokers: `host:port`, `https://host:port`, or the path of a unix socket.
        kind: The command, such as `replay`.
        topic: The topic that it reads or publishes to; empty: all topics.
        name: What people call it, such as `clicks to ./archive`. Secrets in a URL are not reported.
        progress: Returns the current progress; it is called by the reporting thread.
        tls, secret: Those of the job's own requests.
        interval_s: The time between two reports. The first one is sent after half of it.

    Attributes:
        addresses: May be replaced while the job runs.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        kind: str,
        topic: str,
        progress: Callable[[], JobProgress],
        *,
        channel: str = "",
        name: str = "",
        tls: TLSFiles | None = None,
        secret: Secret = NO_SECRET,
        interval_s: float = REPORT_INTERVAL_S,
    ) -> None:
        self.addresses = addresses
        self._id = secrets.token_hex(16)
        self._about = {
            "kind": kind,
            "topic": topic,
            "channel": channel,
            "name": without_secrets(name)[: _LONGEST["name"]],
            "host": socket.gethostname()[:255],
            "pid": os.getpid(),
            "started_at": round(time.time(), 3),
            "unit": "messages",
        }
        self._progress = progress
        self._tls, self._secret = tls, secret
        self._interval_s = interval_s
        self._outcome: tuple[Outcome, str] | None = None
        self._ended = threading.Event()
        self._seen: deque[tuple[float, int]] = deque()  # times and counts, for the rate
        self._brokers: dict[str, BrokerHTTP | None] = {}  # None: the broker does not take reports
        self._thread = threading.Thread(target=self._run, name="job reports", daemon=True)

    def start(self) -> None:
        """Begin to report."""
        self._thread.start()

    def end(self, outcome: Outcome, message: str = "") -> None:
        """Report the outcome and stop. Waits two seconds at most. Only the first call has an effect."""
        if self._outcome is None:
            self._outcome = (outcome, message)
            self._ended.set()
            self._thread.join(_LAST_REPORT_S)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            if self._ended.wait(self._interval_s / 2):
                return
            while not self._ended.is_set():
                self._report_to_all()
                self._ended.wait(self._interval_s)
            self._report_to_all()
        except Exception:  # a bug in this file: it must not disturb the job
            logger.debug("reporting the job has failed", exc_info=True)
        finally:
            for broker in self._brokers.values():
                if broker is not None:
                    broker.close()

    def _report_to_all(self) -> None:
        report = report_job(self._id, self._report(time.monotonic()))
        for address in self.addresses:
            broker = None
            try:
                if address not in self._brokers:
                    self._brokers[address] = self._connect(address)
                broker = self._brokers[address]
                if broker is not None:
                    broker.ask(report)
            except (NSQError, ValueError, OSError) as error:
                logger.debug("the job was not reported to %s: %s", address, error)
                if not _may_pass(error):
                    self._brokers[address] = None
                    if broker is not None:
                        broker.close()

    def _connect(self, address: str) -> BrokerHTTP:
        return BrokerHTTP(
            address,
            self._tls,
            self._secret,
            connect_timeout_s=_TIMEOUT_S,
            answer_timeout_s=_TIMEOUT_S,
            keep_alive_s=_KEEP_ALIVE_S,
            max_answer_bytes=_MAX_ANSWER_BYTES,
        )

    def _report(self, now_s: float) -> dict[str, Any]:
        progress = self._progress()
        state, message = self._outcome or ("running", progress.message)
        return self._about | {
            "done": progress.done,
            "total": progress.total,
            "per_second": self._per_second(now_s, progress.done),
            "lag": progress.lag,
            "lag_s": None if progress.lag_s is None else round(progress.lag_s, 1),
            "failures": progress.failures,
            "state": state,
            "message": message[: _LONGEST["message"]],
        }

    def _per_second(self, now_s: float, done: int) -> float | None:
        """Record the count, and return its growth per second over the last ten seconds."""
        self._seen.append((now_s, done))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - _RATE_WINDOW_S:
            self._seen.popleft()
        since_s, before = self._seen[0]
        return round(max(0, done - before) / (now_s - since_s), 1) if now_s > since_s else None


def _may_pass(error: Exception) -> bool:
    """Whether a later report may be taken. An nsqd, or a broker where the client lacks the role, never takes one."""
    if isinstance(error, RequestRefused):
        return error.status == 503  # it lists too many jobs at the moment
    return isinstance(error, BrokerUnreachable) and not isinstance(error, NotABroker)
