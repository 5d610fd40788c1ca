"""The history of an hour: rates, depths and ages of each 30 seconds, with gaps where there was no answer."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from trio_nsq.console.fleet.history import STEP_S, STEPS, History
from trio_nsq.fleet.snapshot import BrokerState, Snapshot, combine
from trio_nsq.fleet.stats import Queue, TopicStats


def topic(messages: int, depth: int = 0, **channels: Queue) -> TopicStats:
    return TopicStats(Queue(messages=messages, depth=depth), channels)


def snapshot(step: float, **brokers: Mapping[str, TopicStats] | None) -> Snapshot:
    """Return a snapshot of brokers with these topics; None: the broker does not answer."""
    states = {
        name: BrokerState(
            name, error="" if topics is not None else "no answer", answered_at_s=1, topics=topics or {}
        )
        for name, topics in brokers.items()
    }
    return Snapshot(int(step) + 1, 1_000_000 * STEP_S + step * STEP_S, states, {}, combine(states))


def observed(*snapshots: Snapshot, **settings: Any) -> History:
    history = History(**settings)
    for each in snapshots:
        history.observe(each)
    return history


def last(values: list[float], count: int) -> list[Any]:
    return [pytest.approx(value, nan_ok=True) for value in values[-count:]]


def test_rates_are_differences_by_time() -> None:
    history = observed(
        snapshot(0, a={"t": topic(100, c=Queue(messages=100, depth=40))}),
        snapshot(1, a={"t": topic(400, c=Queue(messages=400, depth=10, in_flight=5, deferred=25))}),
    )
    of_topic, of_channel = history.series("t"), history.series("t", "c")
    assert last(of_topic.rate_in, 2) == [math.nan, 300 / STEP_S]
    assert last(of_channel.rate_out, 2) == [math.nan, (360 - 60) / STEP_S]
    assert last(of_topic.rate_out, 1) == last(of_channel.rate_out, 1)
    assert last(of_channel.depth, 2) == [40, 10]


def test_depth_of_a_topic_has_its_channels() -> None:
    history = observed(snapshot(0, a={"t": topic(0, 5, c=Queue(depth=2), d=Queue(depth=3))}))
    assert history.series("t").depth[-1] == 10


def test_oldest_age_is_the_highest_that_is_known() -> None:
    history = observed(
        snapshot(
            0, a={"t": topic(1, c=Queue(depth=1, oldest_age_ms=1500), d=Queue(depth=1, oldest_age_ms=None))}
        ),
        snapshot(1, a={"t": topic(1, c=Queue(depth=1, oldest_age_ms=None))}),
    )
    assert last(history.series("t").oldest_s, 2) == [1.5, math.nan]


def test_only_the_first_snapshot_of_a_step_counts() -> None:
    history = observed(
        snapshot(0, a={"t": topic(0)}),
        snapshot(1, a={"t": topic(30)}),
        snapshot(1.9, a={"t": topic(3000)}),
        snapshot(2.5, a={"t": topic(3045)}),
    )
    assert last(history.series("t").rate_in, 2) == [1, 3015 / (1.5 * STEP_S)]


def test_steps_without_a_snapshot_are_gaps() -> None:
    history = observed(snapshot(0, a={"t": topic(0, 1)}), snapshot(3, a={"t": topic(0, 2)}))
    assert last(history.series("t").depth, 4) == [1, math.nan, math.nan, 2]
    assert last(history.series("idle").depth, 4) == [0, math.nan, math.nan, 0]


def test_a_fleet_without_answer_is_a_gap() -> None:
    history = observed(
        snapshot(0, a={"t": topic(0, 1)}), snapshot(1, a=None), snapshot(2, a={"t": topic(0, 1)})
    )
    assert last(history.series("t").depth, 3) == [1, math.nan, 1]
    assert last(history.series().depth, 3) == [1, math.nan, 1]


def test_a_broker_without_answer_keeps_its_depth() -> None:
    silent = BrokerState("b", error="no answer", answered_at_s=1, topics={"t": topic(9, 3, c=Queue(depth=4))})
    before = snapshot(0, a={"t": topic(0, 1)}, b=silent.topics)
    after = snapshot(1, a={"t": topic(0, 2)})
    history = observed(before, replace(after, brokers={**after.brokers, "b": silent}))
    assert last(history.series("t").depth, 2) == [8, 9]
    assert last(history.series("t", "c").depth, 2) == [4, 4]
    assert last(history.series().depth, 2) == [8, 9]


def test_rates_are_unknown_when_other_brokers_answer() -> None:
    history = observed(
        snapshot(0, a={"t": topic(10, 1)}, b={"t": topic(1000)}),
        snapshot(1, a={"t": topic(20, 1)}, b=None),
        snapshot(2, a={"t": topic(30, 1)}, b={"t": topic(1100)}),
        snapshot(3, a={"t": topic(45, 1)}, b={"t": topic(1115)}),
    )
    assert last(history.series("t").rate_in, 4) == [math.nan, math.nan, math.nan, 1]


def test_rates_are_unknown_after_a_restart() -> None:
    history = observed(
        snapshot(0, a={"t": topic(500, 1)}),
        snapshot(1, a={"t": topic(20, 1)}),
        snapshot(2, a={"t": topic(50, 1)}),
    )
    assert last(history.series("t").rate_in, 3) == [math.nan, math.nan, 1]


def test_a_seek_backwards_is_no_negative_rate() -> None:
    history = observed(
        snapshot(0, a={"t": topic(90, c=Queue(messages=90))}),
        snapshot(1, a={"t": topic(90, c=Queue(messages=90, depth=90))}),
    )
    assert history.series("t", "c").rate_out[-1] == 0


def test_the_fleet_is_the_sum_of_its_topics() -> None:
    history = observed(
        snapshot(0, a={"t": topic(0, 1, c=Queue(oldest_age_ms=1000, depth=1)), "u": topic(0, 2)}),
        snapshot(1, a={"t": topic(30, 1, c=Queue(oldest_age_ms=2000, depth=1)), "u": topic(60, 2)}),
    )
    found = history.series()
    assert (found.rate_in[-1], found.depth[-1], found.oldest_s[-1]) == (3, 4, 2)


def test_an_hour_is_kept() -> None:
    history = observed(*(snapshot(step, a={"t": topic(step * 30, step)}) for step in range(1, STEPS + 31)))
    assert history.series("t").depth == list(range(31, STEPS + 31))
    assert history.rate_in("t")[1:] == [1] * (STEPS - 1)
    assert history.depth("t") == history.series("t").depth


def test_a_new_topic_was_empty_before() -> None:
    history = observed(snapshot(0, a={"t": topic(0)}), snapshot(1, a={"t": topic(0), "new": topic(5, 5)}))
    assert last(history.series("new").depth, 2) == [0, 5]


def test_the_number_of_series_is_bounded() -> None:
    topics = {f"t{number:03}": topic(number, 1) for number in range(100)}
    history = observed(snapshot(0, a=topics), max_series=10)
    shown = [name for name in topics if history.series(name).depth[-1] == 1]
    assert len(shown) == 10


def test_deleted_topics_make_room_after_an_hour() -> None:
    history = observed(
        snapshot(0, a={"old": topic(1, 1)}), snapshot(STEPS + 1, a={"new": topic(1, 1)}), max_series=1
    )
    assert history.series("new").depth[-1] == 1
