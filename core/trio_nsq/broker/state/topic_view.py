"""The part of a topic's state that its channels use. The topic writes it; channels read it for every delivery."""

from dataclasses import dataclass, field

from .settings import ChannelSettings
from .waiting_messages import WaitingMessages


@dataclass(slots=True, eq=False)
class TopicView:
    """A topic's name, and the values that delivery depends on.

    Attributes:
        ephemeral: The topic's messages are only in memory.
        e2e_window_ns: Window of the publish-to-FIN latency metrics; 0: not measured.
        high_watermark: The sequence up to which messages belong to the channels.
        end: The sequence after the last message.
        message_bytes: Bytes of the message bodies published since the broker started.
        ttl_ns: Messages older than this are not delivered; 0: no limit.
        is_limited: The topic limits the number or bytes of waiting messages.
        waiting: Messages deferred by their producer, or for one channel only, that the channels do not have yet. Most
            are beyond the high watermark. Earlier ones stay if the high watermark moved past them (`expire_before`).
        channel_defaults: Settings of each channel, unless changed for the channel.
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
    channel_defaults: ChannelSettings = ChannelSettings()  # noqa: RUF009 - immutable

    @property
    def has_undistributed(self) -> bool:
        """Whether messages wait that the channels do not have yet, also deferred ones."""
        return self.high_watermark < self.end or bool(self.waiting)
