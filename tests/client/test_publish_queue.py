"""Tests for the producer's queue of commands to send and to acknowledge, without a connection."""

import random
import time

import pytest

from client.support.fake_broker import mpub, pub
from trio_nsq.client import BrokerError, ConnectionLost
from trio_nsq.client.publishing.queue import Command, CommandGroup, PublishFuture, PublishQueue, may_be_stored
from trio_nsq.protocol import pack_messages

LOST = ConnectionLost("host:1", "for a test")


def queue(max_in_flight_bytes: int = 1000, max_joined_bytes: int = 1000) -> PublishQueue:
    return PublishQueue(max_in_flight_bytes, max_joined_bytes)


def outcome(future: PublishFuture) -> str:
    """Return the state of a publish as a word."""
    if not future.settled.is_set():
        return "waits"
    if future.failure is None:
        return "acknowledged"
    return "maybe stored" if future.failure.maybe_stored else "not stored"


def test_single_message_is_a_pub() -> None:
    box = queue()
    box.add_message("t", b"one")
    assert box.take() == [pub("t", b"one")]
    assert box.take() == []


def test_messages_of_a_topic_join_until_they_are_taken() -> None:
    box = queue()
    for topic, body in (("t", b"1"), ("u", b"2"), ("t", b"3"), ("t", b"4")):
        box.add_message(topic, body)
    assert box.take() == [mpub("t", b"1", b"3", b"4"), pub("u", b"2")]
    box.add_message("t", b"5")
    assert box.take() == [pub("t", b"5")]


def test_in_order_no_message_passes_another_command() -> None:
    box = PublishQueue(1000, 1000, ordered=True)
    for topic, body in (("t", b"1"), ("t", b"2"), ("u", b"3"), ("t", b"4")):
        box.add_message(topic, body)
    box.add(Command("t", body=b"5", defer_ms=50))
    box.add_message("t", b"6")
    assert box.take() == [
        mpub("t", b"1", b"2"),
        pub("u", b"3"),
        pub("t", b"4"),
        b"DPUB t 50\n\0\0\0\x015",
        pub("t", b"6"),
    ]


def test_joining_has_a_limit() -> None:
    box = queue(max_joined_bytes=20)
    for body in (b"12345", b"6789a", b"b", b"c" * 100, b"d"):
        box.add_message("t", body)
    assert box.take() == [mpub("t", b"12345", b"6789a"), pub("t", b"b"), pub("t", b"c" * 100), pub("t", b"d")]


def test_sets_and_deferred_messages_are_separate_commands() -> None:
    box = queue()
    box.add_message("t", b"1")
    box.add(Command("t", messages=pack_messages([b"2", b"3"])))
    box.add(Command("t", body=b"4", defer_ms=50))
    box.add_message("t", b"5")
    assert box.take() == [
        pub("t", b"1"),
        mpub("t", b"2", b"3"),
        b"DPUB t 50\n\0\0\0\x014",
        pub("t", b"5"),
    ]


def test_messages_with_and_without_headers_keep_their_order() -> None:
    box = queue()
    kinds = [None, None, "sure", "sure", "optional", None, "optional", "sure"]
    for number, kind in enumerate(kinds):
        if kind is None:
            box.add_message("t", b"%d" % number)
        else:
            box.add_message_with_headers("t", b"%d" % number, optional=kind == "optional")
    joined = [[*command.futures.values()] for command in box.take_waiting()]
    assert joined == [[b"0", b"1"], [b"2", b"3"], [b"4"], [b"5"], [b"6"], [b"7"]]


def test_window_limits_bytes_in_flight_but_allows_one_command() -> None:
    box = queue(max_in_flight_bytes=20)
    for topic in "tuv":
        box.add_message(topic, b"123456")
    box.add(Command("w", messages=pack_messages([b"7" * 100])))
    assert box.take() == [pub("t", b"123456"), pub("u", b"123456")]
    assert len(box) == 2
    assert box.take() == []
    assert box.acknowledge()
    assert box.take() == [pub("v", b"123456")]
    assert box.acknowledge()
    assert box.take() == []
    assert box.acknowledge()
    assert box.take() == [mpub("w", b"7" * 100)]


def test_replies_are_for_the_oldest_command() -> None:
    box = queue()
    futures = [box.add_message(topic, b"x") for topic in "tut"]
    box.take()
    assert box.acknowledge()
    assert [outcome(future) for future in futures] == ["acknowledged", "waits", "acknowledged"]
    assert box.futures() == [futures[1]]
    assert box.acknowledge()
    assert not box.acknowledge()


def test_loss_distinguishes_sent_from_unsent_commands() -> None:
    box = queue(max_in_flight_bytes=10)
    futures = [box.add_message(topic, b"x") for topic in "tuvw"]
    box.take()
    box.acknowledge()
    box.take()
    assert box.clear() == [future.command for future in futures[1:]]
    for future in futures[1:]:
        future.command.fail(LOST, maybe_stored=future.command.taken)
    assert [outcome(future) for future in futures] == [
        "acknowledged",
        "maybe stored",
        "maybe stored",
        "not stored",
    ]
    failure = futures[1].failure
    assert failure is not None
    assert failure.__cause__ is LOST
    assert str(failure) == f"publish not acknowledged, it may have been stored: {LOST}"
    assert failure is not futures[2].failure
    assert (box.take(), box.futures(), len(box)) == ([], [], 0)
    for topic in "tu":
        box.add_message(topic, b"x")
    assert len(box.take()) == 2  # the next connection starts with an empty window


@pytest.mark.parametrize(
    ("code", "text", "atomic", "maybe_stored"),
    [
        ("E_BAD_TOPIC", "PUB topic name", False, False),
        ("E_BAD_MESSAGE", "PUB message too big", False, False),
        ("E_UNAUTHORIZED", "AUTH failed", False, False),
        ("E_TOPIC_FULL", "PUB failed topic t is full", False, False),
        ("E_PUB_FAILED", "PUB failed no space left on device", False, True),
        ("E_DPUB_FAILED", "DPUB failed no space left on device", False, True),
        ("E_MPUB_FAILED", "MPUB failed no space left on device", False, True),
        ("E_MPUB_FAILED", "MPUB failed no space left on device", True, False),
        ("E_PUB_FAILED", "PUB failed exiting", False, False),
        ("E_MPUB_FAILED", "MPUB failed exiting", False, False),
    ],
)
def test_only_sent_commands_may_be_stored(code: str, text: str, atomic: bool, maybe_stored: bool) -> None:
    assert may_be_stored(BrokerError("host:1", code, text), atomic=atomic) is maybe_stored


def test_refused_command_is_removed_and_later_ones_can_be_resent_in_order() -> None:
    box = queue(max_in_flight_bytes=15)
    futures = [box.add_message(topic, b"x") for topic in "tuvw"]
    assert len(box.take()) == 3
    refused = box.refuse()
    assert refused is futures[0].command
    box.put_back()
    assert box.take() == [pub(topic, b"x") for topic in "uvw"]
    assert queue().refuse() is None


def test_returned_commands_can_be_withdrawn() -> None:
    box = queue()
    first, second = box.add_message("t", b"1"), box.add_message("u", b"2")
    box.take()
    box.put_back()
    assert box.withdraw(first)
    assert box.take() == [pub("u", b"2")]
    assert not box.withdraw(second)


def test_commands_after_a_failure_in_a_series_are_not_sent() -> None:
    box = queue(max_in_flight_bytes=5)
    group = CommandGroup()
    futures = [
        box.add(Command("t", messages=pack_messages([body]), group=group)) for body in (b"1", b"2", b"3")
    ]
    alone = box.add(Command("t", messages=pack_messages([b"4"])))
    box.take()
    command = box.refuse()
    assert command is not None
    command.fail(LOST)
    assert box.take() == [mpub("t", b"4")]
    assert [outcome(future) for future in futures] == ["not stored"] * 3
    assert outcome(alone) == "waits"


def test_all_tried_brokers_are_named() -> None:
    command = Command("t", body=b"1")
    other = ConnectionLost("host:2", "for a test, too")
    command.failures = {"host:1": LOST, "host:2": other}
    command.maybe_stored = True
    command.fail(other)
    failure = command.first_future().failure
    assert failure is not None
    assert str(failure) == f"publish not acknowledged, it may have been stored: {LOST}; {other}"
    assert failure.__cause__ is other


def test_unsent_commands_can_be_withdrawn() -> None:
    box = queue()
    first, second, third = [box.add_message("t", body) for body in (b"1", b"2", b"3")]
    a_set = box.add(Command("u", messages=pack_messages([b"4"])))
    assert box.withdraw(second)
    assert box.withdraw(a_set)
    assert box.take() == [mpub("t", b"1", b"3")]
    assert not box.withdraw(first)
    box.acknowledge()
    assert outcome(first) == outcome(third) == "acknowledged"
    assert not box.withdraw(second)


@pytest.mark.parametrize("max_joined_bytes", [1_000_000, 10])
def test_thousands_of_messages_are_withdrawn_fast(max_joined_bytes: int) -> None:
    box = queue(max_joined_bytes=max_joined_bytes)
    futures = [box.add_message("t", b"123456") for _ in range(30_000)]
    random.Random(1).shuffle(futures)
    began_at = time.process_time()
    assert all(map(box.withdraw, futures))
    assert time.process_time() - began_at < 1.5  # a search for each would take several times as long
    assert len(box) == 0


def test_no_message_joins_a_withdrawn_command() -> None:
    box = queue()
    assert box.withdraw(box.add_message("t", b"1"))
    assert (box.take(), len(box)) == ([], 0)
    box.add_message("t", b"2")
    assert box.take() == [pub("t", b"2")]


def test_withdrawing_makes_room_to_join() -> None:
    box = queue(max_joined_bytes=10)
    first = box.add_message("t", b"1")
    box.add_message("t", b"2")
    assert box.withdraw(first)
    box.add_message("t", b"3")
    assert box.take() == [mpub("t", b"2", b"3")]
