"""What to send, where to, and what to do if it fails."""

from dataclasses import dataclass, field

from trio_nsq.protocol.names import EPHEMERAL_SUFFIX, MAX_NAME_LENGTH

from ..host_pool import Mode
from .outcomes import RetryDelays
from .payloads import PayloadFormat
from .sender import SenderSettings
from .templates import HeaderTemplate, URLTemplate

DEAD_LETTER_SUFFIX = ".dead"


@dataclass(frozen=True, slots=True)
class Batching:
    """How messages are combined to requests.

    Attributes:
        messages: The most messages of a request; 1: a request has the unchanged body of one message.
        bytes: The most bytes of bodies in a request with several messages.
        wait_s: How long to wait for more messages after the first.
        form: How several messages stand in a request.
        metadata: Send each message as an object with its metadata.
    """

    messages: int = 1
    bytes: int = 1024 * 1024
    wait_s: float = 0.1
    form: PayloadFormat | None = None
    metadata: bool = False


@dataclass(frozen=True, slots=True)
class DeliveryOptions:
    """See the classes of the fields.

    Attributes:
        method: The HTTP method.
        urls: The receivers; at least one.
        headers: Names and values, besides Content-Type and User-Agent unless they are here.
        content_type: The Content-Type of requests with a body; None: that of the batching.
        mode: How to choose one of several receivers; None: send each message to all of them.
        concurrency: The most requests that run at a time; with mode None, to each receiver.
        sample: The part of the messages to send, 0 to 1. The others are finished without a request.
        delays: When a failed message is delivered again.
        max_attempts: A message that fails at its delivery of this number goes to the dead-letter topic; 0: no limit.
        max_retry_after_s: The longest wait that a receiver may ask for.
        dead_letter_topic: The topic for messages that cannot be delivered; None: the topic's name and `.dead`.
        status_every: Log the counts and response times after this many requests; 0: never.
    """

    method: str
    urls: tuple[URLTemplate, ...]
    sender: SenderSettings
    headers: tuple[tuple[str, HeaderTemplate], ...] = ()
    content_type: str | None = None
    mode: Mode | None = Mode.HOSTPOOL
    concurrency: int = 100
    sample: float = 1.0
    batching: Batching = field(default_factory=Batching)
    delays: RetryDelays = field(default_factory=RetryDelays)
    max_attempts: int = 10
    max_retry_after_s: float = 600.0
    dead_letter_topic: str | None = None
    status_every: int = 250

    def dead_letter_topic_of(self, topic: str) -> str:
        """Return the dead-letter topic for messages of a topic; a long name is shortened."""
        if self.dead_letter_topic:
            return self.dead_letter_topic
        name = topic.removesuffix(EPHEMERAL_SUFFIX)[: MAX_NAME_LENGTH - len(DEAD_LETTER_SUFFIX)]
        found = name + DEAD_LETTER_SUFFIX
        # A message must not go back to its own topic.
        return found if found != topic else name[:-1] + DEAD_LETTER_SUFFIX
