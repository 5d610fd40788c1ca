"""Checks of messages against the brokers' limits, before anything is sent."""

from collections.abc import Sequence
from dataclasses import dataclass

from trio_nsq.protocol import MessageSet
from trio_nsq.protocol.bodies import check_bytes
from trio_nsq.protocol.headers import Headers, encode_headers, encode_headers_of_all, prefix_bytes
from trio_nsq.protocol.limits import SECOND_MS

from .queue import COUNT_BYTES, SIZE_BYTES


@dataclass(frozen=True, slots=True)
class PublishLimits:
    """The limits of the brokers.

    Attributes:
        max_msg_size: The largest message, in bytes.
        max_body_size: The largest body of an MPUB, in bytes.
        max_req_timeout_s: The longest time to defer a message; None: the broker decides.

    Raises:
        ValueError: The limits allow no message.
    """

    max_msg_size: int
    max_body_size: int
    max_req_timeout_s: float | None

    def __post_init__(self) -> None:
        if self.max_msg_size < 1 or self.max_body_size <= COUNT_BYTES + SIZE_BYTES:
            raise ValueError(
                "max_msg_size must be at least 1, and max_body_size at least 9, to allow a message"
            )

    @property
    def max_set_bytes(self) -> int:
        """The most bytes of messages in an MPUB, size fields included."""
        return self.max_body_size - COUNT_BYTES

    def check_message(self, body: bytes) -> None:
        if not isinstance(body, bytes) or not 0 < len(body) <= self.max_msg_size:
            check_bytes((body,))
            _check_sizes((len(body),), self.max_msg_size)

    def check_headers(self, headers: Headers, body_bytes: int) -> str:
        """Return the text of the headers of a message; empty if it has none. See `encode_headers` for the errors."""
        text = encode_headers(headers)
        self._check_with_headers(text, body_bytes)
        return text

    def check_headers_of_all(
        self, headers: Headers | Sequence[Headers] | None, sizes: Sequence[int]
    ) -> Sequence[str]:
        """As `encode_headers_of_all`, for messages whose bodies have these sizes."""
        texts = encode_headers_of_all(headers, len(sizes))
        for text, size in zip(texts, sizes, strict=False):
            self._check_with_headers(text, size)
        return texts

    def _check_with_headers(self, text: str, body_bytes: int) -> None:
        size = SIZE_BYTES + prefix_bytes(text) + body_bytes
        if text and size > self.max_set_bytes:
            raise ValueError(f"a message of {size} bytes with its headers; the limit is {self.max_set_bytes}")

    def check_list(self, sizes: Sequence[int]) -> None:
        _check_sizes(sizes, min(self.max_msg_size, self.max_set_bytes - SIZE_BYTES))

    def check_set(self, messages: MessageSet) -> None:
        if len(messages.data) > self.max_set_bytes:
            raise ValueError(
                f"a message set of {len(messages.data)} bytes; the limit is {self.max_set_bytes}, see max_body_size"
            )
        if sum(messages.sizes) != messages.body_bytes:
            raise ValueError("the sizes of a message set do not add up to its data")
        _check_sizes(messages.sizes, self.max_msg_size)

    def check_defer(self, defer_ms: int) -> None:
        most_s = self.max_req_timeout_s
        if most_s is not None and defer_ms > most_s * SECOND_MS:
            raise ValueError(f"defer_s is {defer_ms / SECOND_MS:g}; it must be within 0..{most_s:g}")


def _check_sizes(sizes: Sequence[int], biggest: int) -> None:
    if sizes and min(sizes) < 1:
        raise ValueError("the message is empty; brokers do not accept empty messages")
    if sizes and max(sizes) > biggest:
        raise ValueError(
            f"a message of {max(sizes)} bytes; the limit is {biggest}, see max_msg_size and max_body_size"
        )
