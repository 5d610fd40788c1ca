"""Tests for FINs that are read later: when a consumer's may be, and that the poller reads them then."""

from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from broker.api import running_api
from broker.support import PolledClient, identify, mpub, pub
from trio_nsq.broker.session.finish_rate import FinishRate
from trio_nsq.event_loop.pacing import Pacing
from trio_nsq.event_loop.reactor import Poller

# ---------------------------------------------------------------------- the rate


@given(
    finished=st.integers(1, 3000),
    passed_s=st.floats(0, 1),
    in_flight=st.integers(0, 3000),
    wait_s=st.sampled_from((0.0, 0.001, 0.01)),
)
def test_fins_wait_if_several_are_expected_and_the_consumer_has_enough_messages(
    finished: int, passed_s: float, in_flight: int, wait_s: float
) -> None:
    rate = FinishRate(wait_s)
    rate.allows_wait(1, 0, 10.0)
    allowed = rate.allows_wait(1 + finished, in_flight, 10.0 + passed_s)
    passed_s = (10.0 + passed_s) - 10.0
    if allowed:
        assert passed_s, "the rate is not known"
        expected = finished / passed_s * wait_s
        assert expected > 3.99
        assert in_flight > 3.99 * expected
    elif passed_s:
        expected = finished / passed_s * wait_s
        assert expected < 4.01 or in_flight < 4.01 * expected


def test_nothing_waits_after_other_commands() -> None:
    rate = FinishRate(0.001)
    rate.allows_wait(1, 2000, 10.0)
    assert rate.allows_wait(2, 2000, 10.00001)
    assert not rate.allows_wait(2, 2000, 10.00002)


@given(
    after_s=st.floats(0, 0.1),
    reads=st.lists(st.tuples(st.integers(0, 30), st.floats(0.00001, 0.001)), min_size=1, max_size=100),
)
def test_nothing_waits_for_four_waits_after_an_answer(after_s: float, reads: list[tuple[int, float]]) -> None:
    rate = FinishRate(0.001)
    count, now_s = 1, 10.0
    rate.allows_wait(count, 2000, now_s)
    now_s += after_s
    rate.note_answer(now_s)
    for finished, passed_s in reads:
        count, now_s = count + finished, now_s + passed_s
        if rate.allows_wait(count, 2000, now_s):
            assert now_s >= 10.0 + after_s + 0.004


def test_consumer_waits_again_when_its_answers_are_long_past() -> None:
    rate = FinishRate(0.001)
    rate.note_answer(10.0)
    rate.allows_wait(1, 2000, 10.004)
    assert rate.allows_wait(2, 2000, 10.0041)


def test_consumer_with_one_message_at_a_time_is_always_read() -> None:
    rate = FinishRate(0.001)
    assert not any(rate.allows_wait(n, 1, 10.0 + n / 50_000) for n in range(1000))


# ---------------------------------------------------------------------- the poller


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def served_in_a_round(poller: Poller, served: list[str]) -> list[str]:
    served.clear()
    if poller.poll():
        poller.in_round = True
        poller.serve()
        poller.in_round = False
    return list(served)


def read_much_later() -> tuple[Poller, PolledClient, list[str]]:
    """Return an open poller with a client that has been served, and is not read again soon."""
    served: list[str] = []
    poller = Poller(Pacing(finishes_s=1000), Clock())
    client = PolledClient("client", served, poller)
    poller.open()
    assert served_in_a_round(poller, served) == ["client"]
    client.read_later()
    return poller, client, served


async def test_client_that_is_read_later_is_served_once_for_all_that_has_arrived() -> None:
    clock, served = Clock(), list[str]()
    poller = Poller(Pacing(finishes_s=0.5), clock)
    one, other = PolledClient("one", served, poller), PolledClient("other", served, poller)
    poller.open()
    assert sorted(served_in_a_round(poller, served)) == ["one", "other"]
    one.read_later()
    for client in (one, other, one):
        client.other.send(b"x")
    assert served_in_a_round(poller, served) == ["other"]
    clock.now_s += 0.4
    assert served_in_a_round(poller, served) == []
    assert poller.reads_later
    clock.now_s += 0.2
    assert served_in_a_round(poller, served) == ["one"]
    assert not poller.reads_later
    one.other.send(b"x")
    assert served_in_a_round(poller, served) == ["one"]
    poller.close()
    one.close()
    other.close()


async def test_lost_connection_is_noticed_at_once_although_it_is_read_later() -> None:
    poller, client, served = read_much_later()
    client.other.close()
    assert served_in_a_round(poller, served) == ["client"]
    poller.close()
    client.close()


async def test_client_that_is_polled_again_or_removed_is_not_read_later() -> None:
    poller, client, served = read_much_later()
    client.other.send(b"x")
    poller.poll_again(client.ours.fileno())
    assert not poller.reads_later
    assert served_in_a_round(poller, served) == ["client"]
    client.read_later()
    client.stop_polling()
    assert not poller.reads_later
    poller.close()
    client.close()


# ---------------------------------------------------------------------- a broker


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that stands still: the poller has its own."""
    return trio.testing.MockClock()


async def test_fins_that_arrive_one_by_one_are_all_executed_although_nothing_else_happens(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    count = 4000  # more than RDY: the last ones arrive only when FINs were read
    async with running_api(tmp_path) as api:
        client = api.tcp
        await client.send(identify(output_buffer_size=-1) + b"SUB t c\n")
        await client.ok()
        await client.ok()
        await client.send(mpub("t", *[b"x"] * count) + b"RDY 2000\n")
        await client.ok()
        for _ in range(count):
            await client.send(b"FIN %s\n" % (await client.message()).id)
        while (channel := await api.channel("t", "c"))["in_flight_count"]:
            pass
        assert channel["clients"][0]["finish_count"] == count


async def test_client_that_publishes_and_consumes_over_one_connection_is_read_at_once(tmp_path: Path) -> None:
    count, cycles, wait_s = 2000, 400, 0.05
    options: dict[str, Any] = {"pacing": Pacing(finishes_s=wait_s), "sync": "interval"}
    async with running_api(tmp_path, **options) as api:
        client = api.tcp
        await client.send(identify(output_buffer_timeout=-1) + b"SUB t c\n")
        await client.ok()
        await client.ok()
        await client.send(mpub("t", *[b"x"] * count) + b"RDY 2500\n")
        await client.ok()
        ids = [(await client.message()).id for _ in range(count)]
        began_s = perf_counter()  # as the poller's clock
        for message_id in ids[:cycles]:
            await client.send(b"FIN %s\n" % message_id)
            await client.send(pub("other", b"result"))
            await client.ok()
        # Otherwise, half of the answers come so much later.
        assert perf_counter() - began_s < cycles * wait_s / 4
