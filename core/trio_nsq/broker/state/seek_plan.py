"""What a seek will make of a channel: computed in steps, while the channel goes on to deliver."""

from collections import deque
from collections.abc import Iterable, Iterator

from .batch import Batch
from .cursor import Cursor, spans
from .deferred import Block, DeferredMessages
from .steps import Runs, in_steps


class SeekPlan:
    """Computes where the messages of a channel will be after a seek, in steps.

    The channel keeps working meanwhile. Changes to messages from `to` on do not matter: the channel delivers all of
    them again. New deferred messages do matter: the channel reports them with `record_arrived`.

    Args:
        to: The sequence that the channel moves to.
        point: The first sequence that had not arrived when this began; messages from there on are in `late`.
        keeps_before: The channel keeps its unfinished messages before `to`.
        now_ns: Messages due by then count as ready, Unix nanoseconds.

    Attributes:
        deferred: Deferred messages from `to` on.
        holes, hole_messages: The holes of the channel's new `Cursor`, and how many messages are in them.
        before: Unfinished messages before `to`.
        late: Deferred messages that arrived since this began, as `record_arrived` was given them.
    """

    def __init__(self, to: int, point: int, keeps_before: bool, now_ns: int) -> None:
        self.to = to
        self.point = point
        self.keeps_before = keeps_before
        self.now_ns = now_ns
        self.deferred = DeferredMessages()
        self.holes: deque[tuple[int, int]] = deque()
        self.hole_messages = 0
        self.before = 0
        self.late: list[tuple[range, int, Batch | None]] = []
        self._runs = Runs()  # of the new holes

    def record_arrived(self, sequences: range, due_ns: int, held: Batch | None) -> None:
        """Note deferred messages that the channel just got."""
        self.late.append((sequences, due_ns, held))

    def steps(
        self, cursor: Cursor, deferred: DeferredMessages, unfinished: Iterable[Iterable[int]]
    ) -> Iterator[None]:
        """Do the work; the event loop may serve others between two steps.

        Args:
            cursor: Of the channel.
            deferred: Of the channel.
            unfinished: Sequences of messages that are neither ahead of the cursor nor deferred. They come in parts;
                each part is read after the one before it is done.
        """
        self.before = max(0, self.to - cursor.position)
        for hole_messages in in_steps(
            min(end, self.to) - start for start, end in cursor.holes if start < self.to
        ):
            self.before -= sum(hole_messages)
            yield
        for part in unfinished:
            for sequences in in_steps(part):
                self.before += sum(map(self.to.__gt__, sequences))
                yield
        for block in deferred.blocks():
            self._take(deferred, block)
            yield
        yield from self._runs.join(self.holes)

    def _take(self, deferred: DeferredMessages, block: Block) -> None:
        to = self.to
        if block.highest < to:
            self.before += len(block)
            return
        if block.lowest < to:
            self.before += sum(map(to.__gt__, block.sequence))
        wanted = [
            due_ns > self.now_ns and to <= sequence < self.point and not attempts
            for due_ns, sequence, attempts in zip(block.due_ns, block.sequence, block.attempts, strict=True)
        ]
        part, held = deferred.selected(block, wanted)
        if not part:
            return
        self.deferred.append(part, held)
        self.hole_messages += len(part)
        self._runs.add(list(spans(sorted(part.sequence))))
