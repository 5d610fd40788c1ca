"""Statistics of brokers: sums, rates, and answers that are not valid. No IO."""

from typing import Any

import pytest

from console.fleet.fake_brokers import channel, topic
from trio_nsq.fleet.snapshot import BrokerState, TopicState, combine
from trio_nsq.fleet.stats import add_rates, parse_topics


def broker(address: str, *topics: dict[str, Any], error: str = "") -> BrokerState:
    return BrokerState(address, error=error, answered_at_s=1, topics=parse_topics({"topics": [*topics]}))


def combined(*brokers: BrokerState) -> dict[str, TopicState]:
    return combine({each.address: each for each in brokers})


def test_sums_over_brokers() -> None:
    found = combined(
        broker("a", topic("t", channel("c", depth=2, oldest_message_age_ms=5), message_count=10, depth=1)),
        broker(
            "b", topic("t", channel("c", depth=3, oldest_message_age_ms=9, paused=True), message_count=20)
        ),
    )["t"]
    assert (found.sum.messages, found.sum.depth, found.depth) == (30, 1, 6)
    queue = found.channels["c"].sum
    assert (queue.depth, queue.oldest_age_ms, queue.paused) == (5, 9, True)
    assert {address: part.depth for address, part in found.channels["c"].parts.items()} == {"a": 2, "b": 3}


def test_names_are_sorted() -> None:
    found = combined(broker("a", topic("z"), topic("b", channel("y"), channel("x"))), broker("b", topic("c")))
    assert [*found] == ["b", "c", "z"]
    assert [*found["b"].channels] == ["x", "y"]


def test_broker_without_answer_counts_in_no_sum() -> None:
    found = combined(
        broker("a", topic("t", depth=1)), broker("b", topic("t", depth=5), topic("u"), error="gone")
    )
    assert [*found] == ["t"]
    assert found["t"].sum.depth == 1


def test_age_is_unknown_if_no_broker_tells_it() -> None:
    found = combined(broker("a", topic("t", channel("c"))), broker("b", topic("t", channel("c"))))
    assert found["t"].channels["c"].sum.oldest_age_ms is None


def test_rates() -> None:
    before = parse_topics(
        {"topics": [topic("t", channel("c", depth=10, message_count=100), message_count=100)]}
    )
    now = parse_topics({"topics": [topic("t", channel("c", depth=6, message_count=120), message_count=120)]})
    add_rates(now, before, 2.0)
    assert now["t"].queue.in_rate == 10
    assert (now["t"].channels["c"].in_rate, now["t"].channels["c"].out_rate) == (10, 12)


def test_rates_are_unknown_after_a_restart_and_for_what_is_new() -> None:
    before = parse_topics({"topics": [topic("t", message_count=100)]})
    now = parse_topics({"topics": [topic("t", message_count=7), topic("u", message_count=3)]})
    add_rates(now, before, 2.0)
    assert (now["t"].queue.in_rate, now["u"].queue.in_rate) == (None, None)


def test_rates_of_an_unchanged_clock_are_unknown() -> None:
    before = parse_topics({"topics": [topic("t", message_count=1)]})
    now = parse_topics({"topics": [topic("t", message_count=9)]})
    add_rates(now, before, 0.0)
    assert now["t"].queue.in_rate is None


@pytest.mark.parametrize("answer", [None, [], 7, "x", {"topics": {}}, {"topics": "x"}])
def test_answer_that_is_not_a_brokers(answer: Any) -> None:
    with pytest.raises(ValueError, match="not a broker"):
        parse_topics(answer)


def test_parts_that_are_not_valid_are_left_out() -> None:
    good = topic("good", channel("c", depth=1))
    hostile: list[Any] = [
        None,
        7,
        {"topic_name": 7},
        {"topic_name": ""},
        {"topic_name": "x" * 65},
        {"topic_name": "t", "channels": 7, "depth": "many", "message_count": 1e400, "paused": "yes"},
        {"topic_name": "u", "channels": [None, {"channel_name": []}, {"channel_name": "c", "depth": 2**70}]},
    ]
    found = parse_topics({"topics": [good, *hostile]})
    assert [*found] == ["good", "t", "u"]
    assert (found["t"].queue.depth, found["t"].queue.messages, found["t"].queue.paused) == (0, 0, False)
    assert found["u"].channels["c"].depth == 0


def test_no_topics() -> None:
    assert parse_topics({"topics": None}) == parse_topics({}) == {}
