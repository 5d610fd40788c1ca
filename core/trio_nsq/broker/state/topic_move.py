"""The move of a topic to another broker: begins and ends it, and drops what the target has. See `Move`."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import MoveRefused
from .channel import Channel
from .cooperative import Runs
from .move import ChannelSplit, Move, MovePlan, MoveStream, topic_runs
from .topic_view import TopicView
from .undistributed import UndistributedMessages
from .version import Version


class TopicMove:
    """The move of one topic, if there is one.

    Attributes:
        current: The move; None if there is none.
        stream: The stream of the messages that no channel has.
    """

    def __init__(
        self,
        topic: TopicView,
        undistributed: UndistributedMessages,
        channels: Mapping[str, Channel],
        version: Version,
    ) -> None:
        self.current: Move | None = None
        self.stream: MoveStream = MoveStream()
        self._topic = topic
        self._undistributed = undistributed
        self._channels = channels
        self._version = version

    @property
    def channels(self) -> list[Channel]:
        """The channels whose messages move: the durable ones."""
        return [channel for channel in self._channels.values() if not channel.ephemeral]

    def refuse_changes(self) -> None:
        """Raise MoveRefused during a move: the change would lose messages, or store some twice."""
        if self.current is not None:
            name, to = self._topic.name, self.current.to
            raise MoveRefused(
                f"MOVING: topic {name} is being moved to {to}. Continue with qcli drain --move-to {to}, or end "
                "the move with qcli drain --stop"
            )

    # ------------------------------------------------------------------ begin and end

    def begin(self, move: Move) -> None:
        """Begin a move: from now on the topic distributes nothing, and its durable channels deliver nothing."""
        self.current, self.stream = move, MoveStream()
        for channel in self.channels:
            self.hold(channel)
        self._version.increment()

    def hold(self, channel: Channel) -> None:
        """Let a channel deliver nothing if there is a move. Ephemeral channels are not moved."""
        if self.current is not None and channel.stream is None and not channel.ephemeral:
            channel.hold(MoveStream())

    def end(self) -> None:
        """End the move. The topic must then distribute the messages that have arrived meanwhile."""
        self.current, self.stream = None, MoveStream()
        for channel in self.channels:
            channel.release()
        self._version.increment()

    # ------------------------------------------------------------------ streams

    def find(self, name: str | None) -> MoveStream | None:
        """Return the stream of a channel, or of the messages that no channel has; None if there is none."""
        if name is None:
            return self.stream if self.current is not None else None
        channel = self._channels.get(name)
        return channel.stream if channel is not None else None

    def make_plan(self, name: str | None, stream: MoveStream) -> Iterator[None]:
        """Compute what is left to send of a stream, in steps. The stream must not be in use meanwhile."""
        spans: deque[tuple[int, int]] = deque()
        if name is None:
            yield from self._undistributed_spans(spans)
            plan = MovePlan(spans, topic_runs(self._topic.waiting, self._channels.__contains__))
        else:
            channel = self._channels[name]
            split = ChannelSplit(name)
            yield from split.load(channel.messages.deferred.blocks())
            yield from channel.messages.find_waiting(stream.moved + 1, spans)
            plan = MovePlan(spans, split.runs)
        stream.plan = plan

    def _undistributed_spans(self, spans: deque[tuple[int, int]]) -> Iterator[None]:
        assert self.current is not None
        start = max(self._topic.high_watermark, self.stream.moved + 1)
        runs = Runs()
        runs.add([(max(each.sequences.start, self.stream.moved + 1), each.sequences.stop)
                  for each in self._topic.waiting.between(0, start)])  # fmt: skip
        if start < self.current.end:
            runs.add([(start, self.current.end)])
        yield from runs.join(spans)

    def confirm(self, name: str | None, sequence: int) -> None:
        """Drop the messages of a stream up to this sequence: the target has them, durably."""
        assert self.current is not None
        if name is not None:
            channel = self._channels[name]
            if channel.stream is not None:
                channel.confirm_moved(channel.stream, sequence)
            return
        self.stream.confirm(min(sequence, self.current.end - 1))
        self._drop_undistributed()

    def _drop_undistributed(self) -> None:
        point, end = self._topic.high_watermark, self.stream.moved + 1
        self._undistributed.drop_before(end)
        for channel in self._channels.values():
            if not channel.private:
                channel.skip(point, end)

    def drop_all_moved(self) -> None:
        """Drop the moved messages that `confirm` has left, so that counts are exact."""
        for channel in self.channels:
            if channel.stream is not None:
                channel.messages.drop_moved(channel.stream.moved, now=True)

    def left(self, name: str | None) -> int:
        """Count the messages of a stream that are not confirmed, those in flight included."""
        stream = self.find(name)
        if stream is None:
            return 0
        if stream.plan is not None:
            return stream.plan.left
        if name is not None:
            channel = self._channels[name]
            return channel.depth + channel.deferred_count + channel.in_flight_count
        assert self.current is not None
        waiting = self._topic.waiting
        start, end = self._topic.high_watermark, self.current.end
        earlier = sum(
            min(each.sequences.stop, start) - each.sequences.start for each in waiting.between(0, start)
        )
        return max(0, end - start) + earlier

    # ------------------------------------------------------------------ saved state

    def copy_from(self, other: "TopicMove") -> None:
        """Have the same move as another topic; the channels have their streams."""
        self.current, self.stream = other.current, MoveStream(other.stream.moved)

    def state(self) -> dict[str, Any]:
        """Return the part of the checkpoint's head; empty without a move."""
        return {"move": self.current.state(self.stream.moved)} if self.current is not None else {}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Load a saved state after the channels, and before the topic distributes messages."""
        if state is None:
            return
        self.current = Move.restore(state, self._topic.end)
        self.stream = MoveStream(int(state["moved"]))
        for channel in self.channels:
            self.hold(channel)
        self._drop_undistributed()
