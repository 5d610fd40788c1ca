"""A client's part in a channel: how many messages it takes, and how they reach its socket."""

from collections.abc import Callable
from random import random

from ...log import LogError
from ...protocol import CommandError, is_ephemeral
from ...protocol.commands import Subscribe
from ...protocol.identify import IdentifySettings
from ..delivery import Delivery
from ..errors import PublishRefused, SaveError
from ..state.channel import Channel
from ..state.consumer import Consumer
from ..topics import Topics
from .send_buffer import SendBuffer


class Subscription:
    """What SUB makes; `open` gives one. It is the consumer's `Subscriber`.

    Args:
        settings: What was negotiated with the client.
        buffer: The client's.
        delivery: Of the broker.
        close: Ends the client's connection soon.

    Attributes:
        channel: Whose messages the client gets.
        consumer: The client, as the channel sees it.
        close: As the argument.
    """

    channel: Channel

    def __init__(
        self, settings: IdentifySettings, buffer: SendBuffer, delivery: Delivery, close: Callable[[], None]
    ) -> None:
        self.close = close
        self._settings = settings
        self._buffer = buffer
        self._delivery = delivery
        self._held_bytes = 0  # of messages in the buffer that may wait for more of them
        rate = settings.sample_rate
        self.consumer = Consumer(
            settings.msg_timeout_ms,
            self,
            (lambda: 100 * random() < rate) if rate else None,  # nsqd lets one percent more through
            settings.output_buffer_size,
            settings.output_buffer_timeout_ms,
        )

    async def open(self, topics: Topics, command: Subscribe, *, private: bool) -> None:
        """Let the client have messages of the channel. Raises CommandError."""
        if private and not is_ephemeral(command.channel):
            reason = "a private channel's name must end in #ephemeral"
            raise CommandError("E_BAD_CHANNEL", f"SUB channel name {command.channel}: {reason}")
        try:
            self.channel = await topics.subscribe(
                command.topic, command.channel, self.consumer, private=private
            )
        except (PublishRefused, LogError, SaveError) as exc:
            raise CommandError("E_SUB_FAILED", f"SUB failed {exc}") from exc

    def forget_consumer(self) -> None:
        """At the end: the two know each other, and the garbage collector would be needed."""
        del self.consumer

    def ready(self, count: int) -> None:
        """RDY: take so many messages at a time."""
        self.consumer.ready_count = count
        self.channel.dispatcher.refresh(self.consumer)
        if self._held_bytes and not self._can_take_more():
            self.flush()  # what was held back waits for more that will not come

    def deliver(self, frames: bytes | memoryview) -> None:
        """Take message frames; `send_delivered` follows."""
        self._buffer.put(frames)
        self._held_bytes += len(frames)

    def send_delivered(self) -> None:
        """Send what `deliver` took. Where a buffer without a timer was negotiated, hold it back.

        As in nsqd that is until the buffer is full, the client can take no further message, or with any answer.
        Where there is a timer, messages wait in the channel: `Channel.can_wait`.
        """
        settings = self._settings
        waits = not settings.output_buffer_timeout_ms and self._held_bytes < settings.output_buffer_size
        if self._held_bytes and not (waits and self._can_take_more()):
            self.flush()

    def _can_take_more(self) -> bool:
        return self.consumer.window > 0 and not self.channel.paused

    def flush(self) -> None:
        """Send what there is in the buffer, and have no more delivered if the client is too slow for that."""
        self._held_bytes = 0
        self._buffer.flush()
        if self._buffer.full:
            self.consumer.blocked = True
            self.channel.dispatcher.refresh(self.consumer)

    def unblock(self) -> None:
        """The client has taken everything: let it have messages again."""
        self.consumer.blocked = False
        self.channel.dispatcher.refresh(self.consumer)
        self._delivery.deliver(self.channel)
