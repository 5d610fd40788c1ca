"""What the channels of a topic know of it. The topic writes it, and its channels read it for every delivery."""

from dataclasses import dataclass, field

from .deferred import WaitingMessages


@dataclass(slots=True, eq=False)
class TopicView:
    """A topic's name, and the figures of it that delivery depends on.

    Attributes:
        ephemeral: Nothing but memory has its messages.
        e2e_window_ns: Over how long channels measure the time from publish to FIN; 0: they do not.
        high_watermark: The sequence up to which messages belong to the channels.
        end: The sequence after the last message.
        message_bytes: Bytes of the bodies published since the broker started.
        ttl_ns: A message that was published longer ago than this is not delivered; 0: whenever it was published.
        is_limited: Only so much may wait in the topic.
        waiting: Messages deferred by their producer, or for one channel only, that the channels do not have yet. Most
            are past the high watermark. Messages before it stay here if it moved past them (`expire_before`).
    """

    name: str
    ephemeral: bool
    e2e_window_ns: int
    high_watermark: int
    end: int
    message_bytes: int = 0
    ttl_ns: int = 0
    is_limited: bool = False
    waiting: WaitingMessages = field(default_factory=WaitingMessages)
