"""Tests for the log and the state that are made of queues: each channel gets the messages of its queue."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.state import Fixture, Received
from log.support import HastyFiles, open_descriptors
from nsqd_import.nsqd_files import FIRST_ID, START_NS, Queued, write_queue
from soak import examples
from trio_nsq.broker.state.checkpoint import first_needed
from trio_nsq.log import DiskLog
from trio_nsq.nsqd_import.diskqueue import Queue, QueueFiles, list_queues
from trio_nsq.nsqd_import.merger import MergedMessage, Merger
from trio_nsq.nsqd_import.nsqd_metadata import ChannelMetadata, TopicMetadata
from trio_nsq.nsqd_import.topic_builder import BodyReader, ChannelBuilder, LogWriter, topic_state

CHANNELS = ("a", "b", "c")
TOPIC = TopicMetadata("topic", False, tuple(ChannelMetadata(name, False) for name in CHANNELS))


def queued(message: Received) -> tuple[int, int, int, bytes]:
    """Return a delivery as a message of a queue: id, time, attempts, body."""
    return int(message.id, 16), message.timestamp_ns, message.attempts - 1, message.body


def build(folder: Path, queues: list[list[Queued]], run_keys: int) -> Fixture:
    """Build a topic of these queues: the topic's own, then those of its channels."""
    for name, messages in zip(["topic", *(f"topic:{name}" for name in CHANNELS)], queues, strict=True):
        write_queue(folder / "nsqd", name, messages)
    files = list_queues(folder / "nsqd")
    sources = [files["topic"], *(files[f"topic:{name}"] for name in CHANNELS)]
    distributed, waiting = Merger(run_keys=run_keys), Merger(run_keys=run_keys)
    for number, source in enumerate(sources):
        (distributed if number else waiting).add(number, Queue(source).read())
    log = DiskLog(folder / "log", files=HastyFiles())
    writer = LogWriter(log)
    bodies = BodyReader(sources)
    plans = [ChannelBuilder() for _ in CHANNELS]
    for message in distributed.merged():
        for copy in message.copies:
            plans[copy.queue - 1].add(writer.next_sequence, copy.attempts)
        writer.add(message.id, message.timestamp_ns, bodies.read(message))
    point = writer.next_sequence
    for message in waiting.merged():
        writer.add(message.id, message.timestamp_ns, bodies.read(message))
    writer.close()
    for each in (distributed, waiting, bodies):
        each.close()
    state = topic_state(TOPIC, log, plans, point)
    assert (state["distribution_point"], state["end"]) == (point, log.next_sequence)
    return Fixture(name="topic").restarted(state, log)


ATTEMPTS = st.sampled_from([None, None, 0, 0, 0, 1, 5])
"""The attempts of a message in a channel; None: the channel does not have it."""


@settings(max_examples=examples(150))
@given(
    rows=st.lists(st.tuples(ATTEMPTS, ATTEMPTS, ATTEMPTS), max_size=40),
    waiting=st.integers(0, 5),
    shuffle=st.randoms(use_true_random=False),
    run_keys=st.sampled_from([1, 3, 10**6]),
)
def test_each_channel_gets_the_messages_of_its_queue(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[int | None, ...]],
    waiting: int,
    shuffle: Random,
    run_keys: int,
) -> None:
    queues: list[list[Queued]] = [[Queued(len(rows) + number) for number in range(waiting)]]
    for column in range(len(CHANNELS)):
        messages = [
            Queued(number, attempts)
            for number, row in enumerate(rows)
            if (attempts := row[column]) is not None
        ]
        shuffle.shuffle(messages)
        queues.append(messages)
    fixture = build(tmp_path_factory.mktemp("import"), queues, run_keys)
    stored = sum(any(attempts is not None for attempts in row) for row in rows) + waiting
    assert fixture.log.next_sequence == stored  # each once
    for name, messages in zip(CHANNELS, queues[1:], strict=True):
        expected = messages + queues[0]
        assert fixture.counts(name) == (len(expected), 0, 0)
        subscriber = fixture.subscriber(name, ready=2500)
        received = subscriber.receive()
        assert Counter(map(queued, received)) == Counter(
            (each.message_id, each.time, each.attempts, each.content) for each in expected
        )
        # Each kind in publish order.
        for again in (False, True):
            ids = [message.id for message in received if (message.attempts > 1) is again]
            assert ids == sorted(ids)
        subscriber.finish(received)
        assert fixture.counts(name) == (0, 0, 0)
    # After everything is finished, nothing is needed.
    assert first_needed(fixture.topic.snapshot()) == stored
    fixture.log.close()


@pytest.mark.parametrize(("ready", "order"), [(2500, [1, 3, 0, 2, 4]), (1, [1, 0, 3, 2, 4])])
def test_delivered_messages_come_first_or_in_turns(tmp_path: Path, ready: int, order: list[int]) -> None:
    messages = [Queued(number, attempts=number % 2) for number in range(5)]
    fixture = build(tmp_path, [[], messages, [], []], 10)
    subscriber = fixture.subscriber("a", ready=ready)
    received: list[Received] = []
    while found := subscriber.receive():
        received += found
        subscriber.finish(found)
    assert [message.body for message in received] == [messages[number].content for number in order]
    fixture.log.close()


def merged(folder: Path, *queues: list[Queued]) -> list[MergedMessage]:
    """Return the messages of these queues, merged."""
    merger = Merger()
    for number, messages in enumerate(queues):
        write_queue(folder, f"q{number}", messages)
        merger.add(number, Queue(list_queues(folder)[f"q{number}"]).read())
    found = list(merger.merged())
    merger.close()
    return found


def test_duplicate_in_a_queue_counts_once_with_the_most_attempts(tmp_path: Path) -> None:
    (message,) = merged(tmp_path, [Queued(1, 2), Queued(1, 9), Queued(1, 0)])
    assert [copy.attempts for copy in message.copies] == [9]


def test_messages_that_share_only_the_id_differ(tmp_path: Path) -> None:
    found = merged(
        tmp_path,
        [Queued(1), Queued(2, id=FIRST_ID + 1), Queued(1, body=b"other")],
        [Queued(1, 1), Queued(1, timestamp_ns=START_NS)],
    )
    assert [(len(message.copies), message.size) for message in found] == [(1, 9), (2, 9), (1, 5), (1, 9)]


def test_messages_share_a_record_only_with_the_same_time_and_consecutive_ids(tmp_path: Path) -> None:
    log = DiskLog(tmp_path / "log", files=HastyFiles())
    writer = LogWriter(log)
    for message_id, timestamp_ns in [(10, 5), (11, 5), (12, 6), (13, 6), (15, 6), (14, 6)]:
        writer.add(message_id, timestamp_ns, b"%d" % message_id)
    writer.close()
    assert [
        (each.base_sequence, each.count, each.first_id, each.timestamp_ns) for each in log.headers(0)
    ] == [
        (0, 2, 10, 5),
        (2, 2, 12, 6),
        (4, 1, 15, 6),
        (5, 1, 14, 6),
    ]
    log.close()


def test_number_of_open_files_is_limited(tmp_path: Path) -> None:
    write_queue(tmp_path, "q", *([Queued(number)] for number in range(200)))
    files = list_queues(tmp_path)["q"]
    merger = Merger()
    merger.add(0, Queue(files).read())
    reader = BodyReader([files])
    before = open_descriptors()
    most = 0
    for number, message in enumerate(merger.merged()):
        assert reader.read(message) == b"message %d" % number
        most = max(most, open_descriptors() - before)
    assert number == 199
    assert most == 64
    reader.close()
    merger.close()
    assert QueueFiles().size_bytes == 0
