"""Tests for the rate limit of a channel: how many messages it delivers per second."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from broker.api import Api, address, running_api
from broker.state import MS, SECOND, Fixture, Subscriber
from broker.support import RawClient, connected
from trio_nsq.broker.state.rate_limit import RateLimit
from trio_nsq.broker.state.settings import SettingsError

RATES = st.sampled_from([1, 2, 7, 19, 20, 100, 999, 10_000, 1_000_000, 2**53])


# ---------------------------------------------------------------------- the limit


@given(per_s=RATES, steps=st.lists(st.tuples(st.integers(0, 2 * SECOND), st.integers(0, 300)), max_size=30))
def test_no_span_of_time_has_more(per_s: int, steps: list[tuple[int, int]]) -> None:
    """Whatever is asked for: in each span of time, there are at most the rate, and a burst."""
    limit, now_ns = RateLimit(per_s), 10**18
    sent: list[tuple[int, int]] = []
    for passed_ns, wanted in steps:
        now_ns += passed_ns
        taken = min(wanted, limit.available(now_ns))
        limit.take(taken)
        sent.append((now_ns, taken))
        total = 0
        for at_ns, count in reversed(sent):
            total += count
            assert total <= limit.burst + per_s * (now_ns - at_ns) / 10**9 + 1e-6


@given(per_s=st.integers(1, 1_000_000), wanted=st.integers(1, 500), count=st.integers(1, 50))
def test_one_that_takes_all_gets_the_rate(per_s: int, wanted: int, count: int) -> None:
    """With the times that `next_ns` tells, nothing is lost by rounding: after the burst, the rate is reached."""
    limit, start_ns = RateLimit(per_s), 10**18
    now_ns, taken = start_ns, 0
    for _ in range(count):
        available = limit.available(now_ns)
        assert available >= 1
        limit.take(available)
        taken += available
        next_ns = limit.next_ns(wanted)
        assert limit.available(next_ns - 1) < min(wanted, limit.burst)
        now_ns = next_ns
    assert taken >= limit.burst + per_s * (now_ns - start_ns) // 10**9 - min(wanted, limit.burst) - 1


# ---------------------------------------------------------------------- state


def limited(per_s: int, *ready: int) -> tuple[Fixture, list[Subscriber]]:
    fixture = Fixture()
    fixture.channel().configure({"rate_limit_per_s": per_s})
    return fixture, [fixture.subscriber(ready=each) for each in ready]


def received_in(fixture: Fixture, subscribers: list[Subscriber], spans_ms: list[int]) -> list[list[int]]:
    """Return how many messages each client gets in these spans of time; it finishes them at once."""
    counts = []
    for span_ms in spans_ms:
        before = [each.consumer.message_count for each in subscribers]
        for _ in range(span_ms):
            for consumer, messages in fixture.pump(fixture.channel()):
                owner = next(each for each in subscribers if each.consumer is consumer)
                owner.finish(messages)
            fixture.pass_ms(1)
        counts.append(
            [each.consumer.message_count - old for each, old in zip(subscribers, before, strict=True)]
        )
    return counts


@pytest.mark.parametrize("per_s", [1, 4, 100, 1000])
def test_as_many_per_second(per_s: int) -> None:
    fixture, subscribers = limited(per_s, 2500)
    fixture.publish_many(10 * per_s)
    counts = received_in(fixture, subscribers, [1000] * 5)
    burst = max(1, per_s // 20)
    assert all(abs(each - per_s) <= burst for (each,) in counts)
    assert 5 * per_s <= sum(each for (each,) in counts) <= 5 * per_s + burst


def test_all_clients_get_the_same() -> None:
    fixture, subscribers = limited(3, 100, 100, 100)
    fixture.publish_many(100)
    counts = received_in(fixture, subscribers, [10_000])
    assert max(counts[0]) - min(counts[0]) <= 1
    assert sum(counts[0]) in (30, 31)


@pytest.mark.parametrize("per_s", [20, 60, 100, 1000])
def test_two_clients_with_room_get_the_same(per_s: int) -> None:
    """The share of each burst is no whole number, and the first of a round must not always be the same."""
    fixture, subscribers = limited(per_s, 100, 100)
    fixture.publish_many(3 * per_s + 100)
    ((one, other),) = received_in(fixture, subscribers, [3000])
    assert abs(one - other) <= 1


def test_requeued_messages_count() -> None:
    fixture, (subscriber,) = limited(1, 1)
    fixture.publish(b"a")
    (message,) = subscriber.receive()
    subscriber.requeue(message)
    assert subscriber.receive() == []
    fixture.pass_ms(999)
    assert subscriber.receive() == []
    fixture.pass_ms(1)
    assert subscriber.receive()[0].attempts == 2


def test_channel_says_when_it_goes_on() -> None:
    fixture, (subscriber,) = limited(100, 2500)
    channel = fixture.channel()
    assert channel.next_deadline_ns is None
    fixture.publish_many(12)
    assert len(subscriber.receive()) == 5
    assert not channel.dispatcher.can_deliver
    assert channel.next_deadline_ns == fixture.now_ns + 50 * MS
    fixture.pass_ms(50)
    assert channel.dispatcher.can_deliver
    assert len(subscriber.receive()) == 5
    assert channel.next_deadline_ns == fixture.now_ns + 20 * MS  # for the last two


def test_changes_take_effect_at_once() -> None:
    fixture, (subscriber,) = limited(1, 2500)
    fixture.publish_many(1000)
    channel = fixture.channel()
    assert len(subscriber.receive()) == 1
    channel.configure({"max_attempts": 3})  # not about the rate
    assert subscriber.receive() == []
    channel.configure({"rate_limit_per_s": 200})
    assert len(subscriber.receive()) == 10
    channel.paused = True
    channel.configure({"rate_limit_per_s": None})
    assert subscriber.receive() == []
    channel.paused = False
    assert len(subscriber.receive()) == 989


def test_limit_survives_a_restart() -> None:
    fixture, (subscriber,) = limited(20, 2500)
    fixture.publish_many(10)
    state = json.loads(json.dumps(fixture.topic.snapshot()))
    other = fixture.restarted(state)
    assert len(other.subscriber(ready=100).receive()) == 1
    assert subscriber.channel.settings == other.channel().settings


@pytest.mark.parametrize("value", [-1, 1.5, "100", True, 2**53 + 1])
def test_wrong_values(value: object) -> None:
    fixture = Fixture()
    with pytest.raises(SettingsError, match="rate_limit_per_s is"):
        fixture.channel().configure({"rate_limit_per_s": value})


# ---------------------------------------------------------------------- a broker


async def set_limit(api: Api, per_s: int | None) -> None:
    response = await api.send(
        "PUT", "/channel/settings?topic=t&channel=c", body=json.dumps({"rate_limit_per_s": per_s}).encode()
    )
    assert response.status_code == 200, response.text


async def times_of(client: RawClient, count: int) -> list[float]:
    times = []
    for _ in range(count):
        message = await client.message()
        times.append(trio.current_time())
        await client.send(b"FIN %s\n" % message.id)
    return times


async def test_broker_waits_with_a_timer(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with running_api(tmp_path) as api, connected(address(api)) as client:
        await client.subscribe("t", "c", 100)
        await set_limit(api, 10)
        await api.tcp.publish("t", *[b"%d" % number for number in range(30)])
        times = await times_of(client, 30)
        assert 2.8 <= times[-1] - times[0] <= 3.1
        assert all(later - earlier <= 0.11 for earlier, later in pairwise(times))
        channel = await api.channel("t", "c")
        assert channel["rate_limit_per_s"] == 10
        await set_limit(api, None)
        assert "rate_limit_per_s" not in await api.channel("t", "c")


async def test_statistics_say_that_messages_wait_for_it(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with running_api(tmp_path) as api, connected(address(api)) as client:
        await client.subscribe("t", "c", 100)
        await set_limit(api, 1)
        found = [(await api.channel("t", "c"))["rate_limited"]]
        await api.tcp.publish("t", b"1", b"2")
        await times_of(client, 1)
        found.append((await api.channel("t", "c"))["rate_limited"])
        await times_of(client, 1)
        await trio.sleep(2)
        found.append((await api.channel("t", "c"))["rate_limited"])
        assert found == [False, True, False]
