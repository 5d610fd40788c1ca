"""Batches that a broker publishes once, however often they are sent (docs/publishing-once.md), with blocking calls.

Whoever may have to send a batch again names himself, and numbers his batches: a broker of ours publishes a number of a
producer's only if it is greater than all before. A stock nsqd knows nothing of this: into it is at least once.
"""

import http.client
import json
import random
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from struct import pack
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlencode

from ..protocol.errors import NSQError
from ..protocol.messages import pack_messages
from ..untrusted_json import decode_json
from .broker_log import PATIENCE_S, SILENCE_S, RequestRefused, TLSFiles, connection_to

BATCH_HEADER = "NSQ-Batch"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_RESTED_S = 30.0
"""A connection that was used for nothing for so long is made anew: whoever is between may have dropped it."""
_HTTPS = "https://"

_Answer = TypeVar("_Answer")


class Outcome(StrEnum):
    """What became of a batch.

    PUBLISHED: It was published.
    REPEATED: It was published before, and is not again.
    UNKNOWN: It was published; whether that was so before, too, this broker does not know.
    """

    PUBLISHED = "published"
    REPEATED = "repeated"
    UNKNOWN = "unknown"


class BrokerAway(NSQError):
    """A broker does not answer, or what answers is none. A batch that was on its way may be stored or not.

    Attributes:
        address: Where it is, as it was given.
        reason: Why.
    """

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"the broker at {address} cannot be published to: {reason}")
        self.address = address
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:  # tasks send their errors to whoever started them
        return type(self), (self.address, self.reason)


class PublishInDoubt(BrokerAway):
    """The connection was lost after a batch was sent, to a broker that does not remember what it has published.

    Only who sent it can decide: not to send it again, and perhaps to lose it, or to perhaps have it twice.
    """

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason)
        self.args = (
            f"the broker at {address} may have published a batch or not: {reason}, and it does not remember what it "
            "has published; sending it again may publish it twice",
        )


class BatchPublisher:
    """Publishes one producer's batches to one topic, one after the other, over one connection that is kept.

    A broker that goes away, or cannot store a batch now, is tried again if it remembers what it has published, or was
    not sent anything yet.

    Args:
        address: `host:port` of the broker's HTTP, `https://host:port`, or the path of a unix socket.
        topic: Its name.
        producer: Who publishes: 1 to 64 of A-Z a-z 0-9 . _ : -; no two who run at once may have the same.
        tls: For https.
        patience_s: How long one batch is tried for, before its error is raised.

    Raises:
        OSError: A file of `tls` cannot be used.
        ValueError: The address names no port.
    """

    def __init__(
        self,
        address: str,
        topic: str,
        producer: str,
        tls: TLSFiles | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._address = address
        self._topic = topic
        self._patience_s = patience_s
        self._names = {"topic": topic, "producer": producer}
        context = (tls or TLSFiles()).context() if address.startswith(_HTTPS) else None
        self._connection = connection_to(address, context)
        self._used_s = 0.0
        self._remembers: bool | None = None  # None: it was not asked yet
        self._last = -1  # the greatest number that it has published, as far as is known

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the next call makes it anew."""
        self._connection.close()

    @property
    def remembers(self) -> bool:
        """Whether the broker remembers what it has published; false as long as it was asked for nothing."""
        return bool(self._remembers)

    def last_number(self) -> int | None:
        """The greatest number that the broker has published; None: none, or it does not remember. Raises as `publish`.

        So whoever begins again may go on behind it.
        """
        self._persist(self._meet)
        return self._last if self._last >= 0 else None

    def forget(self) -> None:
        """Let the broker forget this producer, which has published its last batch. Raises as `publish`.

        A producer with a new name for each run does so at its end: a broker remembers 10,000 at a time.
        """
        if self._remembers:
            self._persist(lambda: self._ask("POST", f"/topic/producer/forget?{urlencode(self._names)}"))
            self._last = -1

    def publish(self, bodies: Sequence[bytes], number: int, defer_ms: int = 0) -> Outcome:
        """Publish a batch, all of it or nothing; returns once it is stored.

        Args:
            bodies: The messages, at least one, together no more than the broker's --max-body-size.
            number: 0 to 2**63 - 1, greater than that of the batch before; numbers may be left out. The same batch has
                the same number whenever it is sent.
            defer_ms: Deliver the messages so much later; 0: at once. nsqd up to 1.3.0 takes no notice of it here.

        Raises:
            BrokerAway: It was away for longer than our patience.
            PublishInDoubt: See there.
            RequestRefused: The broker does not take it: too large, or the topic is full and remains so, or the like.
        """
        parameters = self._names | {"binary": "true", "number": str(number)}
        if defer_ms:
            parameters["defer"] = str(defer_ms)
        target = f"/mpub?{urlencode(parameters)}"
        content = b"%s%s" % (pack(">i", len(bodies)), pack_messages(bodies).data)
        return self._persist(lambda: self._publish(target, content, number))

    def _publish(self, target: str, content: bytes, number: int) -> Outcome:
        if self._remembers is None:
            self._meet()
        if number <= self._last:
            return Outcome.REPEATED
        told = self._ask("POST", target, content)[1]
        try:
            outcome = Outcome(told) if told is not None else Outcome.UNKNOWN
        except ValueError:
            raise self._no_broker() from None
        self._remembers = outcome is not Outcome.UNKNOWN
        self._last = number if self._remembers else -1
        return outcome

    def _meet(self) -> None:
        """Find out whether the broker remembers, and what."""
        self._remembers, self._last = True, -1  # to ask does no harm, however often
        try:
            content, _ = self._ask("GET", f"/topic/producer?{urlencode(self._names)}")
            number = json.loads(content)["number"]
            self._last = -1 if number is None else int(number)
        except RequestRefused as exc:
            if exc.status != http.client.NOT_FOUND:
                self._remembers = None
                raise
            self._remembers = exc.text == "TOPIC_NOT_FOUND"  # nsqd knows no such path
        except (ValueError, KeyError, TypeError):
            self._remembers = None
            raise self._no_broker() from None
        except BrokerAway:
            self._remembers = None
            raise

    # ------------------------------------------------------------------ requests

    def _persist(self, attempt: Callable[[], _Answer]) -> _Answer:
        """Have something done, in spite of what passes by itself."""
        pause_s, given_up_at_s = _FIRST_PAUSE_S, time.monotonic() + self._patience_s
        while True:
            try:
                return attempt()
            except PublishInDoubt:
                raise
            except (BrokerAway, RequestRefused) as exc:
                passes = isinstance(exc, BrokerAway) or (self._remembers and exc.status == 503)
                if not passes or time.monotonic() + pause_s > given_up_at_s:
                    raise
            time.sleep(pause_s * random.uniform(0.5, 1))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _ask(self, method: str, target: str, content: bytes | None = None) -> tuple[bytes, str | None]:
        """The body of a successful answer, and what it says of a batch.

        Raises:
            BrokerAway, PublishInDoubt, RequestRefused: There is none.
        """
        connection = self._connection
        if time.monotonic() - self._used_s > _RESTED_S:
            connection.close()
        sent = False
        try:
            if connection.sock is None:
                _connect(connection)
            sent = True
            connection.request(method, target, content)
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as exc:
            connection.close()
            lost = PublishInDoubt if sent and not self._remembers else BrokerAway
            raise lost(self._address, _reason(exc, sent=sent)) from exc
        self._used_s = time.monotonic()
        if answer.status != http.client.OK:
            raise RequestRefused(self._address, self._topic, answer.status, self._error_in(data))
        return data, answer.headers.get(BATCH_HEADER)

    def _error_in(self, data: bytes) -> str:
        try:
            return str(decode_json(data)["message"])
        except (ValueError, KeyError, TypeError):
            raise self._no_broker() from None

    def _no_broker(self) -> BrokerAway:
        return BrokerAway(self._address, "what answers is not an NSQ broker")


def _connect(connection: http.client.HTTPConnection) -> None:
    connection.connect()
    connection.sock.settimeout(SILENCE_S)


def _reason(error: OSError | http.client.HTTPException, *, sent: bool) -> str:
    if isinstance(error, TimeoutError):
        return f"connected, but no answer within {SILENCE_S:g} s" if sent else "it took too long"
    if isinstance(error, http.client.RemoteDisconnected | ConnectionResetError | BrokenPipeError):
        return "the connection was lost"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "the connection was lost, or what answers is not an NSQ broker"
