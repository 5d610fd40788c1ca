"""What can go wrong beyond the bytes themselves. All derive from `trio_nsq.protocol.NSQError`.

    ConnectionFailed    no connection could be made: is the broker there, is it the right address?
    ConnectionLost      a connection ended that was not meant to: the broker or the network
    BrokerError         the broker refused something, in its own words
    PublishFailed       messages were not acknowledged; says whether they may have been stored all the same
    ProducerClosed      the program published through a producer that is not open: a mistake of the caller
    AlreadyAnswered     the program answered a message twice: a mistake of the caller
    BrokerUnreachable   a request over HTTP got no answer; its subclasses: NotABroker, PublishInDoubt
    RequestRefused      a request over HTTP was answered with an error

Arguments that can never work (a bad name, an empty or oversized message) are `ValueError`s, raised before
anything is sent.
"""

from collections.abc import Sequence
from typing import Any

from trio_nsq.protocol import NSQError


class ConnectionFailed(NSQError):
    """No usable connection could be made.

    Attributes:
        address: The broker, `host:port`; several, separated by commas, if none of them could be reached.
        reason: What happened. The original error is the `__cause__`, where there is a single one.
    """

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"could not connect to {address}: {reason}")
        self.address = address
        self.reason = reason


def none_reached(failures: Sequence[ConnectionFailed]) -> ConnectionFailed:
    """One error for several, at least one: no broker could be reached."""
    if len(failures) == 1:
        return failures[0]
    reasons = "; ".join(f"{failure.address}: {failure.reason}" for failure in failures)
    return ConnectionFailed(", ".join(failure.address for failure in failures), reasons)


class ConnectionLost(NSQError):
    """A connection ended and the client had not closed it.

    Attributes:
        address: The broker, `host:port`.
        reason: What happened.
    """

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"lost the connection to {address}: {reason}")
        self.address = address
        self.reason = reason


class BrokerError(NSQError):
    """The broker answered with an error frame.

    Attributes:
        address: The broker, `host:port`.
        code: NSQ's code, such as `E_BAD_TOPIC`.
        text: What the broker says about it; may be empty.
    """

    def __init__(self, address: str, code: str, text: str) -> None:
        super().__init__(f"{address} answered {code} {text}".rstrip())
        self.address = address
        self.code = code
        self.text = text


class PublishFailed(NSQError):
    """Messages were not acknowledged. Whether to publish them again is for the caller to decide.

    The cause (`ConnectionFailed`, `ConnectionLost`, `BrokerError` or `ProducerClosed`) is the `__cause__`: the last
    one, if several brokers were tried.

    Attributes:
        maybe_stored: True: messages that were not acknowledged may be stored, so publishing them again may store them
            twice. False: none of those was stored, and publishing them again cannot duplicate anything.
        acknowledged: How many messages of this call, counted from its first, were acknowledged before the
            failure: always 0 but for `publish_many`.
    """

    def __init__(self, reason: str, *, maybe_stored: bool, acknowledged: int = 0) -> None:
        fate = "it may have been stored" if maybe_stored else "it was not stored"
        super().__init__(f"publish not acknowledged, {fate}: {reason}")
        self.reason = reason
        self.maybe_stored = maybe_stored
        self.acknowledged = acknowledged


class ProducerClosed(NSQError):
    """A publish through a producer that is not open: publish inside its `async with` block."""


class AlreadyAnswered(NSQError):
    """A message or batch was finished or requeued a second time; only the first answer counts."""


class BrokerUnreachable(NSQError):
    """A request over HTTP got no answer, or not all of it.

    Attributes:
        address: The broker, as it was given.
        reason: What happened.
        cause: The error of the system, if it was one.
        unanswered: The request was sent, and may have been carried out.
    """

    def __init__(
        self, address: str, reason: str, cause: OSError | None = None, *, unanswered: bool = False
    ) -> None:
        super().__init__(f"the broker at {address} cannot be reached: {reason}")
        self.address = address
        self.reason = reason
        self.cause = cause
        self.unanswered = unanswered

    def __reduce__(self) -> tuple[Any, ...]:  # Spark's tasks send their errors to the driver
        return type(self), (self.address, self.reason)


class NotABroker(BrokerUnreachable):
    """What answers over HTTP is not an NSQ broker.

    Attributes:
        status: The HTTP status; 0 if it was not an HTTP error.
        text: What the answer said.
    """

    def __init__(self, address: str, status: int = 0, text: str = "", *, unanswered: bool = False) -> None:
        error = f" (HTTP status {status})" if status else ""
        super().__init__(address, f"what answers is not an NSQ broker{error}", unanswered=unanswered)
        self.status = status
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.address, self.status, self.text)


class PublishInDoubt(BrokerUnreachable):
    """The connection was lost after a batch was sent to a broker that does not deduplicate.

    The caller has to decide between sending the batch again, which may publish it twice, and losing it.
    """

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason, unanswered=True)
        self.args = (
            f"the broker at {address} may have published a batch or not: {reason}, and it does not remember what it "
            "has published; sending it again may publish it twice",
        )


class RequestRefused(NSQError):
    """A broker answered a request over HTTP with an error.

    Attributes:
        address: The broker, as it was given.
        topic: What the request was about.
        status: The HTTP status.
        text: What the broker said, such as `TOPIC_NOT_FOUND`.
    """

    def __init__(self, address: str, topic: str, status: int, text: str) -> None:
        super().__init__(f"the broker at {address} refused: {text} (topic {topic}, HTTP status {status})")
        self.address = address
        self.topic = topic
        self.status = status
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.address, self.topic, self.status, self.text)
