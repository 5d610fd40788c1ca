"""The topic against a naive one, while messages expire, make room, and are carried forward."""

from hypothesis import strategies as st
from hypothesis.stateful import rule

from log.support import carry_forward
from model.machines import SETTINGS, DiskMachine, TopicMachine
from model.naive import NaiveChannel, Place
from trio_nsq.broker.state.channel import Channel


class LimitedMachine(TopicMachine):
    """A topic that drops its oldest messages at times."""

    @rule(back=st.integers(0, 12))
    def expire(self, back: int) -> None:
        """Expire the undelivered messages except the newest `back`."""
        sequence = max(0, self.naive.published - back)
        self.real.topic.limits.expire_before(sequence)
        self.forget_waiting(sequence)
        for name, naive in self.naive.channels.items():
            drop(naive, [n for n in fresh(naive) if n < min(sequence, self.real.topic.high_watermark)])
            assert self.real.topic.channels[name].cursor >= min(sequence, self.real.topic.high_watermark)

    @rule(most=st.integers(1, 10))
    def make_room(self, most: int) -> None:
        again = {name: requeued(channel) for name, channel in self.real.topic.channels.items()}
        topic_depth = self.naive.depth
        self.real.topic.configure({"max_messages": most, "when_full": "drop-oldest"})
        self.real.topic.limits.make_room()
        self.real.topic.configure({"max_messages": None, "when_full": None})
        for name, naive in self.naive.channels.items():
            set_aside = len(naive.copies) - len(naive.at(Place.IN_FLIGHT)) - len(naive.at(Place.DEFERRED))
            excess = set_aside + topic_depth - most
            before = self.real.topic.channels[name].messages.dropped_count
            oldest = [*again[name], *fresh(naive)][: max(0, excess)]
            drop(naive, oldest)
            assert before >= len(oldest)
        if topic_depth > most:
            waiting = sorted(n for n, held in self.naive.waiting.items() if not held)
            self.forget_waiting(waiting[topic_depth - most - 1] + 1)

    def forget_waiting(self, below: int) -> None:
        dropped = [n for n, due_ns in self.naive.waiting.items() if not due_ns and n < below]
        self.naive.due_ns |= {number: self.naive.waiting.pop(number) for number in dropped}


def fresh(naive: NaiveChannel) -> list[int]:
    return sorted(number for number, copy in naive.at(Place.READY).items() if copy.fresh)


def requeued(channel: Channel) -> list[int]:
    """Return the requeued messages in delivery order."""
    return [waiting.sequence for waiting in channel.messages.peek("requeued")]


def drop(naive: NaiveChannel, numbers: list[int]) -> None:
    for number in numbers:
        del naive.copies[number]


class CarryingMachine(LimitedMachine, DiskMachine):
    """On disk; each save carries messages forward and deletes all files without other unfinished messages."""

    def keep_state(self) -> None:
        super().keep_state()
        log, checkpoint = self.real.log, self.real.topic.checkpoint()
        for _ in checkpoint.encode():
            pass
        done = [file.next_sequence for file in log.files[:-1] if file.next_sequence <= checkpoint.all_needed]
        if done:
            assert carry_forward(log, checkpoint.unfinished_before(done[-1]), 10**9)
            log.discard_before(done[-1])
            assert log.first_sequence == done[-1]


TestLimited = LimitedMachine.TestCase
TestCarrying = CarryingMachine.TestCase
TestLimited.settings = TestCarrying.settings = SETTINGS
