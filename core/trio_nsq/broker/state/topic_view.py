"""The view of a topic that its channels have. The topic writes it, and its channels read it."""


class TopicView:
    """A topic's name and the figures of it that delivery depends on: plain attributes, read for every delivery.

    Args:
        name: The topic's name.
        ephemeral: Nothing but memory has its messages.
        e2e_window_ns: Over how long channels measure the time from publish to FIN; 0: they do not.
        high_watermark, end: Where they are at first.

    Attributes:
        high_watermark: The sequence up to which messages belong to the channels.
        end: The sequence after the last message.
        message_bytes: Bytes of the bodies published since the broker started.
        ttl_ns: A message that was published longer ago than this is not delivered; 0: whenever it was published.
        is_limited: Only so much may wait in the topic.
    """

    __slots__ = (
        "e2e_window_ns",
        "end",
        "ephemeral",
        "high_watermark",
        "is_limited",
        "message_bytes",
        "name",
        "ttl_ns",
    )

    def __init__(self, name: str, ephemeral: bool, e2e_window_ns: int, high_watermark: int, end: int) -> None:
        self.name = name
        self.ephemeral = ephemeral
        self.e2e_window_ns = e2e_window_ns
        self.high_watermark = high_watermark
        self.end = end
        self.message_bytes = 0
        self.ttl_ns = 0
        self.is_limited = False
