"""The errors of the client. All derive from `trio_nsq.protocol.NSQError`.

    ConnectionFailed    connecting failed: the broker is down, or the address is wrong
    AuthRefused         the same, because the broker refused the secret, or requires one
    ConnectionLost      the broker or the network closed a connection
    BrokerError         the broker answered with an error; has its code and text
    HeadersRefused      the broker does not know headers of messages; nothing was sent
    PublishFailed       messages were not acknowledged; says whether they may be stored
    ProducerClosed      the caller published through a producer that is not open
    ConsumerClosed      the caller waited for a message of a consumer that is closed
    MessagesLost        a broker no longer has messages that it had acknowledged to a producer with a name
    ProducerFenced      a producer with the same name, started later, publishes to the topic


    DecodeFailed        the body of a message could not be decoded
    AlreadyAnswered     the caller answered a message twice
    BrokerUnreachable   an HTTP request got no answer; its subclasses: NotABroker, PublishInDoubt
    RequestRefused      the broker answered an HTTP request with an error

Invalid arguments (a bad name, an empty or oversized message) raise `ValueError` before anything is sent.
"""

import re
from collections.abc import Sequence

from trio_nsq.protocol import NSQError

WRONG_PORT = "Is this the port of the TCP protocol? The HTTP API has another one, by default 4151"
"""The hint for an answer that is not HTTP."""


_MEANINGS = {
    "AUTH_REQUIRED": "the request needs a token",
    "AUTH_UNAVAILABLE": "the broker's auth servers do not answer",
    "INVALID_TOKEN": "the token is unknown, expired or revoked",
    "BAD_BODY": "the body is not a batch of messages, or a batch is longer than the broker's --max-body-size",
    "BAD_MESSAGE": "a message is empty, longer than the broker's --max-msg-size, or cut off",
    "BODY_TOO_BIG": "the body is longer than the broker's --max-body-size",
    "CHANNEL_NOT_FOUND": "the channel does not exist",
    "EXITING": "the broker is stopping",
    "INTERNAL_ERROR": "an error in the broker; see its log",
    "METHOD_NOT_ALLOWED": "the path has no such method",
    "MSG_EMPTY": "a message must not be empty",
    "MSG_TOO_BIG": "the message is longer than the broker's --max-msg-size",
    "NOT_FOUND": "the path does not exist; the broker may be an nsqd, or an older 'qcli serve'",
    "TLS_REQUIRED": "the broker requires TLS; use its HTTPS address",
    "TOPIC_NOT_FOUND": "the topic does not exist; create it, or publish to it",
}
_ARGUMENT = re.compile("(MISSING_ARG|INVALID_ARG|INVALID)_([A-Z_]+)")


def meaning_of(code: str) -> str:
    """Return a clause that explains the error code of an HTTP answer; empty if the code has a text of its own."""
    match = _ARGUMENT.fullmatch(code)
    if code in _MEANINGS or match is None:
        return _MEANINGS.get(code, "")
    return f"{match[2].lower()} is {'missing' if match[1] == 'MISSING_ARG' else 'invalid'}"


class ConnectionFailed(NSQError):
    """Connecting to a broker failed.

    Attributes:
        address: The broker, `host:port`. If several brokers failed: their addresses, separated by commas.
        reason: The reason, as text. If one error caused the failure, it is the `__cause__`.
    """

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"could not connect to {address}: {reason}")
        self.address = address
        self.reason = reason


class AuthRefused(ConnectionFailed):
    """A broker refused the client's secret or its permissions, or requires a secret. Retrying does not help.

    If the broker refused it, the `__cause__` is its `BrokerError`.
    """


def is_auth_refusal(error: "BrokerError") -> bool:
    """Whether a broker refused a client's secret for good, and not because its auth servers do not answer."""
    if error.code == "E_AUTH_FAILED":
        return error.text.startswith(
            "AUTH failed: the token "
        )  # nsqd sends this code for unreachable servers
    return error.code in ("E_AUTH_FIRST", "E_UNAUTHORIZED")


def none_reached(failures: Sequence[ConnectionFailed]) -> ConnectionFailed:
    """Combine one or more failures into a single error that names all brokers. A refused secret counts alone."""
    refusals = [failure for failure in failures if isinstance(failure, AuthRefused)]
    if refusals or len(failures) == 1:
        return (refusals or failures)[0]
    reasons = "; ".join(f"{failure.address}: {failure.reason}" for failure in failures)
    return ConnectionFailed(", ".join(failure.address for failure in failures), reasons)


class ConnectionLost(NSQError):
    """The broker or the network closed a connection.

    Attributes:
        address: The broker, `host:port`.
        reason: The reason, as text.
    """

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"lost the connection to {address}: {reason}")
        self.address = address
        self.reason = reason


_HINTS = {
    "(TLS required)": "set tls_v1=True",
    "IDENTIFY msg timeout (": "msg_timeout_s is above the broker's --max-msg-timeout",
    "DPUB timeout ": "the delay, in ms, is above the broker's --max-defer, or --max-req-timeout of nsqd",
}
"""What to do, by a part of a broker's text, which is nsqd's, too."""


class BrokerError(NSQError):
    """The broker answered with an error frame.

    Attributes:
        address: The broker, `host:port`.
        code: NSQ's code, such as `E_BAD_TOPIC`.
        text: The broker's description; may be empty.
    """

    def __init__(self, address: str, code: str, text: str) -> None:
        hints = [hint for part, hint in _HINTS.items() if part in text]
        super().__init__("; ".join([f"{address} answered {code} {text}".rstrip(), *hints]))
        self.address = address
        self.code = code
        self.text = text


class HeadersRefused(NSQError):
    """A message with headers was not sent, because the broker does not know headers.

    The broker is an nsqd, or a `qcli serve` of an earlier version.

    Attributes:
        address: The broker, `host:port`.
    """

    def __init__(self, address: str) -> None:
        super().__init__(
            f"broker {address}: it does not know headers of messages: it is an nsqd, or an older 'qcli serve'"
        )
        self.address = address


class PublishFailed(NSQError):
    """Messages were not acknowledged. The caller decides whether to publish them again.

    The `__cause__` is a `ConnectionFailed`, `ConnectionLost`, `BrokerError` or `ProducerClosed`, or a `TimeoutError`
    after the `timeout_s` of the call. If several brokers were tried, it is the error of the last one.

    Attributes:
        maybe_stored: True: some unacknowledged messages may be stored, so publishing them again may duplicate them.
            False: none of them is stored.
        acknowledged: How many messages of this call, from the first on, were acknowledged before the failure. Always 0
            except for `publish_many`.
    """

    def __init__(self, reason: str, *, maybe_stored: bool, acknowledged: int = 0) -> None:
        fate = "it may have been stored" if maybe_stored else "it was not stored"
        super().__init__(f"publish not acknowledged, {fate}: {reason}")
        self.reason = reason
        self.maybe_stored = maybe_stored
        self.acknowledged = acknowledged


class ProducerClosed(NSQError):
    """The producer is not open. Publish inside its `async with` block."""


class ConsumerClosed(NSQError):
    """The consumer is closed, so no message arrives any more."""


class MessagesLost(NSQError):
    """A broker no longer has messages that it had acknowledged to a producer with a name, or the topic was deleted.

    A power cut can cause that with `--sync=interval`, or a restored backup. The producer has not published since: it
    fails the publishes that wait, and later ones go on.

    Attributes:
        address: The broker.
        topic: The topic.
        first, last: The numbers of the messages.
    """

    def __init__(self, address: str, topic: str, first: int, last: int) -> None:
        super().__init__(
            f"the broker {address} no longer has messages {first} to {last} of this producer, which it had "
            f"acknowledged, or topic {topic} was deleted"
        )
        self.address = address
        self.topic = topic
        self.first = first
        self.last = last


class ProducerFenced(NSQError):
    """Another producer with the same name, started later, publishes to the topic. This one no longer can.

    Attributes:
        address: The broker.
        topic: The topic.
        name: The name of both producers.
    """

    def __init__(self, address: str, topic: str, name: str) -> None:
        super().__init__(
            f"another producer named {name} has published to topic {topic} on {address}: end one of the two, or give "
            "each its own name"
        )
        self.address = address
        self.topic = topic
        self.name = name


class AlreadyAnswered(NSQError):
    """A message or batch was finished or requeued twice; only the first answer has an effect."""


class DecodeFailed(NSQError):
    """The body of a message cannot be decoded: it is not a value of its topic's type, or `decode` of `run` refuses it.

    Attributes:
        topic: The topic.
        reason: The reason, as text; the error of the codec, or of `decode`, is the `__cause__`.
    """

    def __init__(self, topic: str, reason: str) -> None:
        super().__init__(f"a message of topic {topic!r} cannot be decoded: {reason}")
        self.topic = topic
        self.reason = reason


class BrokerUnreachable(NSQError):
    """An HTTP request got no answer, or an incomplete one.

    Attributes:
        address: The broker, as the caller gave it.
        reason: The reason, as text.
        cause: The operating system's error, if there was one.
        unanswered: The request was sent, so the broker may have executed it.
    """

    def __init__(
        self, address: str, reason: str, cause: OSError | None = None, *, unanswered: bool = False
    ) -> None:
        super().__init__(f"the broker at {address} cannot be reached: {reason}")
        self.address = address
        self.reason = reason
        self.cause = cause
        self.unanswered = unanswered


class NotABroker(BrokerUnreachable):
    """The server at an HTTP address is not an NSQ broker.

    Attributes:
        status: The HTTP status; 0 if it was not an HTTP error.
        text: The text of the answer; without a status, a hint, or empty.
    """

    def __init__(self, address: str, status: int = 0, text: str = "", *, unanswered: bool = False) -> None:
        error = f" (HTTP status {status})" if status else f". {text}" if text else ""
        super().__init__(address, f"the server is not an NSQ broker{error}", unanswered=unanswered)
        self.status = status
        self.text = text


class PublishInDoubt(BrokerUnreachable):
    """The connection was lost after a batch was sent to a broker that does not deduplicate.

    The caller has to decide between sending the batch again, which may publish it twice, and losing it.
    """

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason, unanswered=True)
        self.args: tuple[object, ...] = (
            f"the broker at {address} may have published a batch: {reason}, and this broker does not deduplicate; "
            "sending the batch again may publish it twice",
        )


class RequestRefused(NSQError):
    """A broker answered an HTTP request with an error.

    Attributes:
        address: The broker, as the caller gave it.
        topic: The topic of the request.
        status: The HTTP status.
        text: The broker's message, such as `TOPIC_NOT_FOUND`.
    """

    def __init__(self, address: str, topic: str, status: int, text: str) -> None:
        meaning = f": {found}" if (found := meaning_of(text)) else ""
        where = f"topic {topic}, " if topic else ""
        super().__init__(f"the broker at {address} refused: {text} ({where}HTTP status {status}){meaning}")
        self.address = address
        self.topic = topic
        self.status = status
        self.text = text

    @property
    def is_about_secret(self) -> bool:
        """Whether the broker requires a secret, or refused it or what it is for; retrying does not help."""
        return self.status == 401 or self.text.startswith("FORBIDDEN")

    @property
    def is_without_topic(self) -> bool:
        """Whether the broker does not have the topic; another server may not know the path."""
        return self.text == "TOPIC_NOT_FOUND"
