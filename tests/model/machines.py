"""Stateful machines that run a topic and a naive one: random operations, with a comparison after every step.

Set MODEL_EXAMPLES=2000 in the environment for a long run. `make soak` does so, with random examples.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Container
from copy import deepcopy
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.state import (
    MS,
    SECOND,
    Fixture,
    Subscriber,
    decode,
    disk_log,
    effect_of_seek,
    ids_in_flight,
    kept,
)
from model.naive import NOT_IN_FLIGHT, Copy, NaiveChannel, NaiveConsumer, NaiveTopic, Place
from soak import examples
from trio_nsq.broker.state import batch as batch_module
from trio_nsq.broker.state import dispatcher as dispatcher_module
from trio_nsq.broker.state import key_order as order_module
from trio_nsq.broker.state import message_store as store_module
from trio_nsq.broker.state.channel import Channel
from trio_nsq.broker.state.checkpoint import Checkpoint, first_needed
from trio_nsq.broker.state.consumer import ELSEWHERE, REGION, ZONE
from trio_nsq.broker.state.deferred import DeferredMessages
from trio_nsq.broker.state.topic import Topic
from trio_nsq.broker.state.withdrawn import WithdrawnMessage
from trio_nsq.log import Log, MemoryLog, RecordBatch
from trio_nsq.protocol import is_ephemeral
from trio_nsq.protocol.encode import encode_finish

T = TypeVar("T")


def channel_name(client: tuple[str, Subscriber]) -> str:
    return client[1].channel.name


SETTINGS = settings(
    max_examples=int(os.environ.get("MODEL_EXAMPLES", examples())),
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

# Small limits, so that merging, reading ahead and granting reach them often.
SMALL: list[tuple[Any, str, int]] = [
    (batch_module, "MERGE_MESSAGES", 4),
    (dispatcher_module, "MAX_GRANT_BYTES", 500),
    (store_module, "BATCHES_KEPT", 2),
    (store_module, "REDELIVERY_READ_BYTES", 200),
    (store_module, "READ_BATCHES", 2),
    (store_module, "READ_BYTES", 500),
    (order_module, "MAX_BLOCKED", 6),
]

LONGEST_MS = 120
"""max_msg_timeout; longer than some consumers' msg_timeout, shorter than others'."""

PRIVATE = "look#ephemeral"
channel_names = st.sampled_from(["one", "two", "tail#ephemeral"])
picks = st.integers(0, 40)
milliseconds = st.sampled_from([1, 1, 10, 40, 100, 170])
# (messages, bytes of each, deferred for how long)
publications = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from([0, 0, 20, 300]), st.sampled_from([0, 0, 0, 10, 100])),
    max_size=4,
)
# (verb, REQ's delay)
answers = st.tuples(
    st.sampled_from(["FIN", "FIN", "REQ", "uncounted REQ", "TOUCH", "nothing"]),
    st.sampled_from([0, 0, 10, 100]),
)
# (client, how long it takes, its answers to the first messages that it holds)
turns = st.tuples(picks, st.sampled_from([0, 0, 10, 40, 70]), st.lists(answers, min_size=1, max_size=6))
OPERATIONS = ["add", "add", "pause", "unpause", "unpause", "empty", "delete"]
TOPIC_OPERATIONS = ["pause topic", "unpause topic", "unpause topic", "empty topic", "configure topic"]


# The stored records, the number of messages, when they are due, and the only channel that gets them.
Stored = tuple[list[RecordBatch], int, int, str | None]
# Withdrawn messages: the channel in both models, the messages, and the naive copies.
Taken = tuple[NaiveChannel, Channel, list[WithdrawnMessage], dict[int, Copy]]


def encoded(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the content of a checkpoint."""
    for _ in checkpoint.encode():
        pass
    data: dict[str, Any] = json.loads(checkpoint.content)
    return data


def change_as_saved(channel: Channel, change: Callable[[Channel], T]) -> T:
    """Make a change of a channel, and check that its state is then the one that is saved before."""
    before, copy = kept(channel.make_state()), channel.copy(channel.topic)
    change(copy)
    planned = unordered(kept(copy.make_state()))  # before the change, because a copy shares queues
    assert kept(channel.make_state()) == before
    result = change(channel)
    assert unordered(kept(channel.make_state())) == planned
    return result


def unordered(state: tuple[dict[str, Any], int]) -> tuple[dict[str, Any], int]:
    """Return a channel's state with the blocked messages among the unfinished ones: a restart does not tell them."""
    data, needed = state
    deferred = sorted(each for text in data["deferred"] for each in DeferredMessages.restore([text]))
    blocked = [[sequence, attempts] for due_ns, sequence, attempts in deferred if not due_ns]
    return data | {
        "unfinished": sorted(data["unfinished"] + blocked),
        "deferred": [each for each in deferred if each[0]],
    }, needed


def pause(paused: bool) -> Callable[[Channel], None]:
    """Return the change that pauses a channel, or unpauses it."""
    return lambda channel: setattr(channel, "paused", paused)


class TopicMachine(RuleBasedStateMachine):
    """A durable topic over a log in memory."""

    name = "topic"
    mem_queue_size = 6
    cache_bytes = 2000

    def __init__(self) -> None:
        super().__init__()
        self.before = [(module, name, getattr(module, name)) for module, name, _ in SMALL]
        for module, name, value in SMALL:
            setattr(module, name, value)
        self.naive = NaiveTopic()
        self.clients: dict[str, Subscriber] = {}
        self.client_count = 0
        self.ids: dict[int, bytes] = {}
        self.storing: Stored | None = None
        self.saved: dict[str, Any] | None = None
        self.seen: tuple[Topic, int, object] | None = None
        self.saved_naive = NaiveTopic()
        self.since_saved: list[tuple[int, int, str | None]] = []
        self.taken: list[Taken] = []
        self.real = Fixture(self.make_log(), name=self.name, **self.sizes())
        self.real.watch_deadlines()

    def sizes(self) -> dict[str, int]:
        return {"mem_queue_size": self.mem_queue_size, "cache_bytes": self.cache_bytes}

    def make_log(self) -> Log:
        return MemoryLog(max_messages=1_000_000)

    def reopen_log(self) -> Log:
        return self.real.log

    # ------------------------------------------------------------------ choosing

    def pick_channel(self, pick: int) -> tuple[str, NaiveChannel, Channel] | None:
        if not self.naive.channels:
            return None
        name = sorted(self.naive.channels)[pick % len(self.naive.channels)]
        return name, self.naive.channels[name], self.real.topic.channels[name]

    def pick_client(self, pick: int) -> tuple[str, NaiveChannel, Subscriber] | None:
        if not self.clients:
            return None
        name = list(self.clients)[pick % len(self.clients)]
        client = self.clients[name]
        return name, self.naive.channels[client.channel.name], client

    # ------------------------------------------------------------------ publishing

    def store(self, count: int, size: int, defer_ms: int, only: str | None = None) -> Stored:
        first = self.naive.published
        bodies = [self.body(first + index, size) for index in range(count)]
        stored = self.real.store(*bodies, defer_ms=defer_ms, only=only)
        return stored, count, stored[0].due_ns, only

    def body(self, number: int, size: int) -> bytes:
        """Return the body of a message; its first word is the number."""
        return b"%d " % number + b"x" * size

    def number_of(self, body: bytes) -> int:
        """Return the number of a message."""
        return int(body.split()[0])

    def accept(self, stored: list[RecordBatch], count: int, due_ns: int, only: str | None) -> None:
        self.real.topic.accept(stored)
        self.naive.publish(count, due_ns, only)
        self.since_saved.append((count, due_ns, only))

    @precondition(lambda self: self.storing is None)
    @rule(publications=publications)
    def publish(self, publications: list[tuple[int, int, int]]) -> None:
        for publication in publications:
            self.accept(*self.store(*publication))

    @precondition(lambda self: self.storing is None)
    @rule(count=st.integers(1, 3), defer_ms=st.sampled_from([0, 40]))
    def begin_to_store(self, count: int, defer_ms: int) -> None:
        """Append to the log, as a thread does; `accept` follows later."""
        self.storing = self.store(count, 10, defer_ms)

    @precondition(lambda self: self.storing is None)
    @rule(count=st.integers(1, 3), defer_ms=st.sampled_from([0, 0, 40]), only=channel_names)
    def publish_to_one_channel(self, count: int, defer_ms: int, only: str) -> None:
        self.accept(*self.store(count, 10, defer_ms, only))
        self.pass_to(self.real.now_ns)

    @precondition(lambda self: self.storing is not None)
    @rule()
    def is_stored(self) -> None:
        assert self.storing is not None
        stored, self.storing = self.storing, None
        self.accept(*stored)

    # ------------------------------------------------------------------ operators

    @initialize(names=st.lists(channel_names, unique=True, max_size=2), backlog=publications)
    def begin(self, names: list[str], backlog: list[tuple[int, int, int]]) -> None:
        self.publish(backlog)
        for name in names:
            self.add_channel(name)
        for index in range(2 * len(names)):
            self.connect(index, 3 * index + 1, 100)

    def add_channel(self, name: str) -> None:
        if is_ephemeral(name) or name in self.naive.channels:
            self.real.topic.add_channel(name, private=name == PRIVATE)
        else:
            self.change_as_saved(lambda topic: topic.add_channel(name), [name])
        self.naive.channels.setdefault(name, NaiveChannel(private=name == PRIVATE))
        self.naive.distribute()

    @rule(what=st.sampled_from(OPERATIONS), name=channel_names)
    def operate_channel(self, what: str, name: str) -> None:
        if what == "add" and name not in self.naive.channels:
            self.add_channel(name)
            if self.is_kept():
                self.keep_state()
        if name not in self.naive.channels:
            return
        naive, real = self.naive.channels[name], self.real.topic.channels[name]
        if what == "empty":
            change_as_saved(real, Channel.empty)
            naive.copies.clear()
        elif what == "delete":
            self.change_as_saved(lambda topic: topic.remove_channel(topic.counterpart(real)), [name])
            naive.copies.clear()  # withdrawn messages are dropped, too
            del self.naive.channels[name]
            for consumer in naive.consumers:
                assert self.clients.pop(consumer).closed
        elif what != "add":
            change_as_saved(real, pause(what == "pause"))
            naive.paused = what == "pause"

    # A channel counts messages for other channels until its cursor reaches them.
    @precondition(lambda self: not self.naive.only)
    @rule(pick=picks, place=st.integers(0, 100), keep=st.booleans())
    def seek(self, pick: int, place: int, keep: bool) -> None:
        """Move a channel to a sequence in the log, or past its end."""
        picked = self.pick_channel(pick)
        if picked is None:
            return
        _, naive, real = picked
        topic = self.real.topic
        first, point = topic.log.first_sequence, topic.end if naive.private else topic.high_watermark
        to = first + (point - first + 2) * place // 100
        expected = effect_of_seek(real, to)
        assert self.real.seek(to, picked[0]) == expected
        assert expected.to_sequence == min(to, point)
        published = self.naive.due_ns | (self.naive.waiting if naive.private else {})
        distributed = {number: due_ns for number, due_ns in published.items() if number < point}
        again, skipped = naive.seek(expected.to_sequence, distributed, first, self.real.now_ns)
        assert (expected.delivered_again, expected.skipped) == (again, skipped)
        if keep and self.is_kept():
            self.keep_state()

    @rule(what=st.sampled_from(TOPIC_OPERATIONS))
    def operate_topic(self, what: str) -> None:
        topic = self.real.topic
        if what == "empty topic":
            self.change_as_saved(Topic.empty, topic.channels)
            self.naive.empty()
        elif what == "configure topic":
            changes = {"max_messages": None if topic.settings.max_messages else 1_000_000}
            self.change_as_saved(lambda each: each.configure(changes))
        elif what == "pause topic":
            self.change_as_saved(Topic.pause)
            self.naive.paused = True
        else:
            self.change_as_saved(Topic.unpause)
            self.naive.paused = False
            self.naive.distribute()

    def change_as_saved(self, change: Callable[[Topic], object], channels: Container[str] = ()) -> None:
        """Make a change of the topic. A restart then finds what it finds in the state saved before.

        Ephemeral channels are not saved: to a restart, messages that only they have got still wait for a channel.
        """
        topic = self.real.topic
        before, copy = encoded(topic.checkpoint()), topic.copy(channels)
        change(copy)
        assert encoded(topic.checkpoint()) == before
        change(topic)
        if channels is topic.channels:
            assert encoded(topic.checkpoint()) == encoded(copy.checkpoint())
        if not (topic.ephemeral or any(channel.ephemeral for channel in topic.limits.shared)):
            assert self.found_by_restart(topic.checkpoint()) == self.found_by_restart(copy.checkpoint())

    def found_by_restart(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return the state of a topic that is restored from a checkpoint and the log."""
        other = Fixture(self.real.log, name=self.name, **self.sizes())
        other.topic.restore(encoded(checkpoint))
        found = encoded(other.topic.checkpoint())
        found["channels"].sort(key=itemgetter("name"))
        for channel in found["channels"]:
            channel["unfinished"].sort()
            channel["deferred"] = sorted(DeferredMessages.restore(channel["deferred"]))
        return found

    # ------------------------------------------------------------------ exhausted and withdrawn messages

    @rule(pick=picks, max_attempts=st.sampled_from([0, 1, 1, 2, 3]), dead_letters=st.booleans())
    def configure(self, pick: int, max_attempts: int, dead_letters: bool) -> None:
        if picked := self.pick_channel(pick):
            _, naive, real = picked
            changes = {"max_attempts": max_attempts, "dead_letter_topic": "dead" if dead_letters else ""}
            change_as_saved(real, lambda each: each.configure(changes))
            naive.configure(max_attempts, dead_letters)
            if self.is_kept():
                self.keep_state()

    @rule(pick=picks, per_s=st.sampled_from([0, 0, 10, 100, 1000]))
    def limit_rate(self, pick: int, per_s: int) -> None:
        if picked := self.pick_channel(pick):
            _, naive, real = picked
            change_as_saved(real, lambda each: each.configure({"rate_limit_per_s": per_s}))
            naive.limit_rate(per_s)
            if self.is_kept():
                self.keep_state()

    @rule()
    def examine_use(self) -> None:
        topic = self.real.topic
        topic.examine_use(self.real.now_ns)
        for name, naive in self.naive.channels.items():
            assert naive.is_used or 0 < topic.channels[name].idle_since_ns <= self.real.now_ns
        if not (topic.depth or topic.deferred_count or topic.paused):
            assert bool(topic.idle_since_ns) is not any(each.is_used for each in self.naive.channels.values())

    @rule(pick=picks, count=st.integers(1, 4))
    def take_given_up(self, pick: int, count: int) -> None:
        if picked := self.pick_channel(pick):
            _, naive, real = picked
            taken = real.messages.withdrawn.take(count)
            assert len(taken) == min(count, len(naive.at(Place.GIVEN_UP)))
            assert all(naive.copies[message.sequence].place is Place.GIVEN_UP for message in taken)
            self.note_taken(naive, real, taken)

    @rule(pick=picks, chosen=st.lists(picks, max_size=5))
    def withdraw(self, pick: int, chosen: list[int]) -> None:
        picked = self.pick_channel(pick)
        if picked is None or not self.naive.published:
            return
        _, naive, real = picked
        numbers = {each % self.naive.published for each in chosen}
        places = (Place.READY, Place.DEFERRED, Place.GIVEN_UP)
        expected = {n for n in numbers if n in naive.copies and naive.copies[n].place in places}
        taken = real.withdraw(numbers)
        assert sorted(message.sequence for message in taken) == sorted(expected)
        self.note_taken(naive, real, taken)

    def note_taken(self, naive: NaiveChannel, real: Channel, taken: list[WithdrawnMessage]) -> None:
        copies = {message.sequence: naive.copies[message.sequence] for message in taken}
        for message in taken:
            copy = copies[message.sequence]
            assert message.attempts == copy.attempts
            assert (message.reason is not None) == (copy.place is Place.GIVEN_UP)
            copy.place, copy.fresh, copy.due_ns = Place.TAKEN, False, 0
            copy.in_order &= copy.holds
        self.taken.append((naive, real, taken, copies))

    @precondition(lambda self: self.taken)
    @rule(pick=picks, gone=st.booleans())
    def part_with_taken(self, pick: int, gone: bool) -> None:
        """Dispose of withdrawn messages, or put them back, except those dropped with their channel meanwhile."""
        naive, real, taken, copies = self.taken.pop(pick % len(self.taken))
        left = [each for each in taken if naive.copies.get(each.sequence) is copies[each.sequence]]
        if gone:
            assert change_as_saved(real, lambda each: each.dispose(taken)) == len(left)
        else:
            real.put_back(taken)
        for message in left:
            if gone:
                del naive.copies[message.sequence]
            elif message.reason is None:
                copies[message.sequence].give_back()
            else:
                naive.make_unfinished(message.sequence)

    @rule(pick=picks, chosen=st.lists(picks, max_size=5))
    def cancel(self, pick: int, chosen: list[int]) -> None:
        picked = self.pick_channel(pick)
        if picked is None or not self.naive.published:
            return
        _, naive, real = picked
        numbers = {each % self.naive.published for each in chosen} & naive.at(Place.DEFERRED).keys()
        wanted = numbers | {self.naive.published}
        assert sorted(change_as_saved(real, lambda each: each.cancel(wanted))) == sorted(numbers)
        for number in numbers:
            del naive.copies[number]

    # ------------------------------------------------------------------ consumers

    @rule(
        pick=picks,
        ready=st.integers(0, 12),
        timeout_ms=st.sampled_from([50, 100, 200]),
        nearness=st.sampled_from([ELSEWHERE, ELSEWHERE, REGION, ZONE]),
    )
    def connect(self, pick: int, ready: int, timeout_ms: int, nearness: int = ELSEWHERE) -> None:
        if picked := self.pick_channel(pick):
            name = f"client {self.client_count}"
            self.client_count += 1
            self.clients[name] = Subscriber(
                self.real, picked[2], ready=ready, msg_timeout_ms=timeout_ms, nearness=nearness
            )
            picked[1].consumers[name] = NaiveConsumer(timeout_ms * MS, ready, nearness=nearness)

    @rule(
        pick=picks, what=st.sampled_from(["block", "block", "leave", "RDY", "RDY"]), ready=st.integers(0, 12)
    )
    def change(self, pick: int, what: str, ready: int) -> None:
        picked = self.pick_client(pick)
        if picked is None:
            return
        name, naive, client = picked
        known = naive.consumers[name]
        if what == "block":
            known.blocked = not known.blocked
            client.block(known.blocked)
        elif what == "RDY":
            known.ready_count = ready
            client.ready(ready)
        else:
            client.leave()
            naive.leave(name)
            del self.clients[name]

    # ------------------------------------------------------------------ delivery and answers

    def dispatch(self, naive: NaiveChannel, real: Channel) -> bool:
        names = {client.consumer: name for name, client in self.clients.items()}
        sent: dict[str, list[int]] = {}
        nearest = naive.nearest_ready
        grants = real.dispatcher.dispatch(self.real.now_ns)
        naive.come_to(real.cursor, self.real.now_ns)
        for consumer, payload in grants:
            name = names[consumer]
            assert naive.consumers[name].nearness == nearest, "a nearer consumer is ready"
            for message in decode(payload):
                number = self.number_of(message.body)
                assert self.ids.setdefault(number, message.id) == message.id
                naive.deliver(name, number, message.attempts, self.real.now_ns)
                sent.setdefault(name, []).append(34 + len(message.body))
        for sizes in sent.values():
            assert sum(sizes) <= dispatcher_module.MAX_GRANT_BYTES or len(sizes) == 1
        return bool(sent)

    @rule(pick=picks, rounds=st.sampled_from([1, 1000]))
    def deliver(self, pick: int, rounds: int) -> None:
        picked = self.pick_channel(pick)
        if picked is None:
            return
        _, naive, real = picked
        while rounds and self.dispatch(naive, real):
            rounds -= 1
        if rounds:
            order = real.messages.order
            left = naive.deliverable(fresh_too=order is None or not order.is_full)
            if left and any(naive.window(name) > 0 for name in naive.consumers):
                self.check_rate_limit(naive, real)

    def check_rate_limit(self, naive: NaiveChannel, real: Channel) -> None:
        """Check that a rate limit holds back messages that are ready, and not for too long."""
        now_ns, resumes_ns = self.real.now_ns, real.dispatcher.resumes_ns
        assert naive.rate_limit_per_s
        assert resumes_ns is not None
        assert resumes_ns > now_ns
        wanted = min(naive.burst, len(naive.at(Place.READY)))
        assert naive.allowed(now_ns) < wanted
        assert naive.allowed(resumes_ns) >= 1
        assert resumes_ns - now_ns <= -(-(10**9 * naive.burst) // naive.rate_limit_per_s)

    @rule(turns=st.lists(turns, min_size=1, max_size=5))
    def converse(self, turns: list[tuple[int, int, list[tuple[str, int]]]]) -> None:
        """Deliver to several clients, and answer each message later, in its own way."""
        for pick, pause_ms, answers in turns:
            self.have_client(pick)
            self.deliver_to_client(pick)
            self.pass_to(self.real.now_ns + pause_ms * MS)
            if picked := self.pick_client(pick):
                self.answer(picked[0], sorted(picked[1].held_by(picked[0])), answers)

    def answer(self, name: str, held: list[int], answers: list[tuple[str, int]]) -> None:
        finished: list[int] = []
        for (what, delay_ms), number in zip(answers, held, strict=False):
            if what.endswith("REQ"):
                self.requeue(name, number, delay_ms, counts=what == "REQ")
            elif what == "TOUCH":
                self.touch(name, number)
            elif what == "FIN":
                finished.append(number)
        self.finish(name, finished)

    def have_client(self, pick: int) -> None:
        if not self.naive.channels:
            self.operate_channel("add", "one")
        if not self.clients:
            self.connect(pick, 5, 100)

    def deliver_to_client(self, pick: int) -> None:
        if picked := self.pick_client(pick):
            self.deliver(sorted(self.naive.channels).index(picked[2].channel.name), 1000)

    @rule(
        pick=picks,
        chosen=st.lists(picks, max_size=5),
        what=st.sampled_from(["REQ", "uncounted REQ", "TOUCH", "FIN", "FIN"]),
    )
    def answer_for_anything(self, pick: int, chosen: list[int], what: str) -> None:
        """Answer a message of this or another client, or a finished one."""
        picked = self.pick_client(pick)
        if picked is None or not self.ids:
            return
        known = sorted(self.ids)
        numbers = list(dict.fromkeys(known[each % len(known)] for each in chosen))
        if what == "FIN":
            self.finish(picked[0], numbers, unknown=True)
        for number in numbers[:1]:
            if what.endswith("REQ"):
                self.requeue(picked[0], number, 10, counts=what == "REQ")
            elif what == "TOUCH":
                self.touch(picked[0], number)

    def finish(self, name: str, numbers: list[int], *, unknown: bool = False) -> None:
        client = self.clients[name]
        naive = self.naive.channels[client.channel.name]
        ids = [self.ids[number] for number in numbers]
        expected = [(self.ids[n], reason) for n in numbers if (reason := naive.finish(name, n))]
        if unknown:
            ids.insert(0, b"f" * 16)
            expected.insert(0, (b"f" * 16, NOT_IN_FLIGHT))
        assert client.channel.finish(client.consumer, encode_finish(ids), self.real.now_ns) == expected

    def requeue(self, name: str, number: int, delay_ms: int, *, counts: bool) -> None:
        client, now_ns = self.clients[name], self.real.now_ns
        real = client.channel.requeue(
            client.consumer, self.ids[number], delay_ms, now_ns, counts_attempt=counts
        )
        naive = self.naive.channels[client.channel.name]
        assert real == naive.requeue(name, number, delay_ms * MS, now_ns, counts=counts)

    def touch(self, name: str, number: int) -> None:
        client, now_ns = self.clients[name], self.real.now_ns
        real = client.channel.touch(client.consumer, self.ids[number], now_ns, LONGEST_MS)
        naive = self.naive.channels[client.channel.name]
        assert real == naive.touch(name, number, now_ns, LONGEST_MS * MS)

    # ------------------------------------------------------------------ time

    @rule(passed_ms=milliseconds, to_deadline_of=picks, early=st.booleans())
    def time_passes(self, passed_ms: int, to_deadline_of: int, early: bool) -> None:
        """Let time pass: a duration, or until the next deadline of a channel, or until 1 ns before it."""
        picked = self.pick_channel(to_deadline_of)
        deadline_ns = picked[1].next_deadline_ns() if picked and passed_ms == 1 else None
        self.pass_to(self.real.now_ns + passed_ms * MS if deadline_ns is None else deadline_ns - early)

    def pass_to(self, now_ns: int) -> None:
        self.real.now_ns = max(self.real.now_ns, now_ns)
        self.real.pass_ms(0)
        for channel in self.naive.channels.values():
            channel.tick(self.real.now_ns)

    # ------------------------------------------------------------------ restarting

    def is_kept(self) -> bool:
        return not self.real.topic.ephemeral

    def keep_state(self) -> None:
        self.saved = json.loads(json.dumps(self.real.topic.snapshot()))
        self.saved_naive = deepcopy(self.naive)
        self.since_saved = []
        assert self.saved is not None
        self.real.log.discard_before(first_needed(self.saved))

    @precondition(is_kept)
    @rule(then=st.sampled_from(["go on", "go on", "stop", "crash", "crash"]))
    def save(self, then: str) -> None:
        """Restart: after a stop from a new checkpoint, after a crash from the last one and the log."""
        if then == "crash":
            if self.storing is not None:  # it is in the log, without an acknowledgement
                self.since_saved.append(self.storing[1:])
                self.storing = None
        else:
            if then == "stop" and self.storing is not None:
                self.is_stored()
            self.keep_state()
        if then != "go on":
            self.restart()

    def restart(self) -> None:
        self.naive = deepcopy(self.saved_naive)
        self.naive.restarted()
        for publication in self.since_saved:
            self.naive.publish(*publication)
        self.clients.clear()
        self.taken.clear()
        now_ns, ids = self.real.now_ns, self.real.ids
        self.real = Fixture(self.reopen_log(), name=self.name, **self.sizes())
        self.real.now_ns, self.real.ids = now_ns, ids
        assert self.real.topic.restore(deepcopy(self.saved)) is False
        self.real.watch_deadlines()
        self.pass_to(now_ns)
        for index in range(len(self.naive.channels)):
            self.connect(index, 4, 100)

    # ------------------------------------------------------------------ invariants

    @invariant()
    def topics_agree(self) -> None:
        topic = self.real.topic
        assert topic.depth == self.naive.depth
        assert topic.paused == self.naive.paused
        assert list(topic.channels) == list(self.naive.channels)
        assert 0 <= topic.backend_depth <= topic.depth

    @invariant()
    def channels_agree(self) -> None:
        for name, naive in self.naive.channels.items():
            real = self.real.topic.channels[name]
            ready, blocked = real.messages.ready_count, real.messages.blocked_count
            assert ready + blocked == len(naive.at(Place.READY)), name
            assert real.messages.withdrawn.waiting == len(naive.at(Place.GIVEN_UP)), name
            withdrawn = real.messages.withdrawn.waiting + len(naive.at(Place.TAKEN))
            assert real.depth == ready + blocked + withdrawn, name
            assert real.in_flight_count == len(naive.at(Place.IN_FLIGHT)), name
            assert real.deferred_count == len(naive.at(Place.DEFERRED)), name
            assert 0 <= real.backend_depth <= real.depth, name
            assert real.message_count == naive.message_count, name
            assert real.requeue_count == naive.requeue_count, name
            assert real.timeout_count == naive.timeout_count, name
            assert real.given_up_count == naive.given_up_count, name
            deferred = naive.at(Place.DEFERRED)
            unfinished = {n: copy for n, copy in naive.copies.items() if n not in deferred}
            assert sorted(real.messages.unfinished()) == sorted(
                (number, copy.attempts) for number, copy in unfinished.items() if not copy.fresh
            ), name

    @invariant()
    def idle_time_begins_after_the_last_use(self) -> None:
        topic = self.real.topic
        for name, naive in self.naive.channels.items():
            since_ns = topic.channels[name].idle_since_ns
            if naive.is_used:
                naive.used_ns = self.real.now_ns
                assert topic.idle_since_ns == since_ns == 0
            assert since_ns == 0 or since_ns >= naive.used_ns
            assert topic.idle_since_ns == 0 or topic.idle_since_ns >= since_ns > 0
        if topic.depth or topic.deferred_count or topic.paused:
            assert topic.idle_since_ns == 0

    @invariant()
    def consumers_agree(self) -> None:
        for name, client in self.clients.items():
            channel = self.naive.channels[client.channel.name]
            real, naive = client.consumer, channel.consumers[name]
            assert set(ids_in_flight(real)) == {self.ids[number] for number in channel.held_by(name)}, name
            assert real.message_count == naive.message_count, name
            assert real.finish_count == naive.finish_count, name
            assert real.requeue_count == naive.requeue_count, name

    @invariant()
    def deadlines_are_not_late(self) -> None:
        for name, naive in self.naive.channels.items():
            deadline_ns, due_ns = (
                naive.next_deadline_ns(),
                [c.at_ns for c in naive.at(Place.DEFERRED).values()],
            )
            real = self.real.topic.channels[name]
            assert real.next_due_ns == min(due_ns, default=None)
            if deadline_ns is not None:
                assert real.next_deadline_ns is not None
                assert real.next_deadline_ns <= deadline_ns
            if real.next_deadline_ns is not None:
                assert self.real.watched[real] <= real.next_deadline_ns

    @invariant()
    def every_change_of_the_saved_state_changes_the_version(self) -> None:
        """The state that a channel remembers by its version is the present one, and so is the topic's."""
        topic = self.real.topic
        for name, channel in topic.channels.items():
            remembered = kept(channel.state())
            assert remembered == kept(channel.make_state()), name
        checkpoint = topic.checkpoint()
        state = checkpoint.head, [*checkpoint.waiting], checkpoint.producers, [*checkpoint.durable]
        before, self.seen = self.seen, (topic, topic.version.number, state)
        if before is not None and before[:2] == self.seen[:2]:
            assert before == self.seen
        # A restart needs what retention keeps: the one reads the saved state, the other the checkpoint.
        assert first_needed(encoded(checkpoint)) == checkpoint.first_needed

    # ------------------------------------------------------------------ the end

    def teardown(self) -> None:
        try:
            self.deliver_all()
        finally:
            self.real.log.close()
            for module, name, value in self.before:
                setattr(module, name, value)

    def deliver_all(self) -> None:
        """At the end, all unfinished messages are delivered, and the topic is empty afterwards."""
        if self.storing is not None:
            self.is_stored()
        self.operate_topic("unpause topic")
        self.add_channel("one")
        while self.clients:
            self.change(0, "leave", 0)
        for index in range(len(self.naive.channels)):
            self.configure(index, 0, False)
            self.limit_rate(index, 0)
        while self.taken:
            self.part_with_taken(0, False)
        for index, name in enumerate(sorted(self.naive.channels)):
            self.naive.channels[name].paused = self.real.topic.channels[name].paused = False
            self.connect(index, 1000, 200)
        self.pass_to(self.real.now_ns + 10 * SECOND)
        for index, (name, client) in enumerate(sorted(self.clients.items(), key=channel_name)):
            channel = self.naive.channels[client.channel.name]
            self.deliver(index, 1000)
            while channel.key_of is not None and (held := channel.held_by(name)):
                self.finish(name, list(held))
                self.deliver(index, 1000)
            assert set(channel.copies) == set(channel.held_by(name))
            self.finish(name, list(channel.copies))
            assert (client.channel.depth, client.channel.in_flight_count) == (0, 0)
        if not self.real.topic.ephemeral:
            assert first_needed(self.real.topic.snapshot()) == self.naive.published


class DiskMachine(TopicMachine):
    """A durable topic on disk, with small segments and a small cache."""

    mem_queue_size = 3
    cache_bytes = 600

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="topic-model-"))
        super().__init__()

    def make_log(self) -> Log:
        return disk_log(self.folder / "log", segment_bytes=700)

    def reopen_log(self) -> Log:
        self.real.log.close()
        return self.make_log()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            shutil.rmtree(self.folder)


class EphemeralMachine(TopicMachine):
    """A topic in a small memory log, which may drop fresh messages, but not sent ones."""

    name = "topic#ephemeral"

    def make_log(self) -> Log:
        return MemoryLog(max_messages=10)

    def accept(self, stored: list[RecordBatch], count: int, due_ns: int, only: str | None) -> None:
        super().accept(stored, count, due_ns, only)
        self.naive.drop_below(self.real.log.first_sequence)

    @precondition(lambda self: False)
    @rule()
    def begin_to_store(self) -> None:
        """Do nothing: threads do not append to a log in memory."""


class PrivateMachine(TopicMachine):
    """A durable topic with a private channel that is created and deleted."""

    @rule(what=st.sampled_from([*OPERATIONS, "add"]))
    def operate_private_channel(self, what: str) -> None:
        self.operate_channel(what, PRIVATE)


KEYS = (b'"a"', b"7", b'"b"', b"null")


def key_of(number: int) -> object:
    """Return the key of a message of an `OrderedMachine`; None: it has none."""
    return None if number % 7 == 6 else KEYS[number % len(KEYS)] if number % len(KEYS) < 3 else None


class Ordered(TopicMachine):
    """Channels deliver the messages of a key one after the other, while an operator does not change that."""

    @initialize()
    def begin_with_order(self) -> None:
        for index in range(2):
            self.set_order(index, True)

    def body(self, number: int, size: int) -> bytes:
        """As of other machines, in JSON; or no JSON, without a key."""
        if number % 7 == 6:
            return super().body(number, size)
        return b'{ "n": %d , "user": {"id": %s}, "x": "%s"}' % (number, KEYS[number % len(KEYS)], b"x" * size)

    def number_of(self, body: bytes) -> int:
        return int(body.split()[2]) if body.startswith(b"{") else super().number_of(body)

    @rule(pick=picks, on=st.sampled_from([True, True, False]))
    def set_order(self, pick: int, on: bool) -> None:
        if picked := self.pick_channel(pick):
            _, naive, real = picked
            change_as_saved(real, lambda each: each.configure({"order_by": "json:user.id" if on else ""}))
            if on != (naive.key_of is not None):
                naive.set_order(key_of if on else None)
            if self.is_kept():
                self.keep_state()


class OrderedMachine(Ordered, DiskMachine):
    """A durable topic on disk."""


class OrderedEphemeralMachine(Ordered, EphemeralMachine):
    """A topic in memory."""
