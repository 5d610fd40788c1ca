"""Builds requests: URL, headers and content for one message or a batch."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from trio_nsq._version import __version__

from ...client.consuming.message import Message
from .options import DeliveryOptions
from .payloads import PayloadFormat, payload
from .sender import Headers
from .templates import Values

USER_AGENT = f"trio-nsq/{__version__}"
OCTET_STREAM = "application/octet-stream"
HEADER_PREFIX = "X-NSQ-Header-"
TRACE_HEADERS = ("traceparent", "tracestate")
MAX_TRACE_BYTES = 1024
"""Receivers may ignore longer ones."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request to one receiver."""

    method: str
    url: str
    headers: Headers
    content: bytes


class RequestBuilder:
    """Builds the requests of one topic and channel."""

    def __init__(self, options: DeliveryOptions, topic: str, channel: str) -> None:
        self._options = options
        self._topic = topic
        self._channel = channel
        self._form = options.batching.form
        given = {name.lower() for name, _ in options.headers}
        self._given = {name.encode() for name in given}
        fixed: Headers = [(b"Accept", b"*/*")] if "accept" not in given else []
        if "user-agent" not in given:
            fixed.append((b"User-Agent", USER_AGENT.encode()))
        if options.method != "GET" and "content-type" not in given:
            kind = options.content_type or (self._form.content_type if self._form else OCTET_STREAM)
            fixed.append((b"Content-Type", kind.encode()))
        self._fixed = [
            [*fixed, *([] if "authorization" in given else _basic_auth(url.userinfo))] for url in options.urls
        ]

    def values(self, message: Message) -> Values:
        return Values(
            *(self._topic, self._channel, message.id, message.timestamp_ns, message.attempts, message.body),
            message.headers,
        )

    def build(self, receiver: int, messages: Sequence[Values]) -> Request:
        """Build a request.

        Args:
            receiver: The index of the URL.
            messages: At least one; several only with a batching format.

        Raises:
            UnsafeValue: The message cannot stand in the URL.
        """
        options = self._options
        values = messages[0] if self._form is None else Values(self._topic, self._channel)
        headers = [*self._fixed[receiver]]
        headers += [(name.encode(), template.render(values)) for name, template in options.headers]
        if values.headers:
            headers += [each for each in _of_message(values) if each[0].lower() not in self._given]
        content = b""
        if options.method != "GET":
            content = self._content(messages)
        return Request(options.method, options.urls[receiver].render(values), headers, content)

    def _content(self, messages: Sequence[Values]) -> bytes:
        if self._form is None:
            return messages[0].body
        return payload(messages, PayloadFormat(self._form), metadata=self._options.batching.metadata)


def _of_message(values: Values) -> Headers:
    """Return the headers of a message as headers of a request, from which `/pub` of a broker makes the same again.

    Without a prefix, a producer could give the request any header, such as Authorization. HTTP has no blanks at the
    ends of a value.
    """
    found = []
    for name, value in values.headers.items():
        is_trace = name in TRACE_HEADERS and value.isascii() and len(value) <= MAX_TRACE_BYTES
        found.append(((name if is_trace else HEADER_PREFIX + name).encode(), value.strip(" ").encode()))
    return found


def _basic_auth(userinfo: str) -> Headers:
    """Return the header for user and password of a URL."""
    if not userinfo:
        return []
    user, _, password = userinfo.partition(":")
    secret = unquote_to_bytes(user) + b":" + unquote_to_bytes(password)
    return [(b"Authorization", b"Basic " + b64encode(secret))]
