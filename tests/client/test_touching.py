"""Tests for touching messages that are worked on for long."""

import pytest
import trio.testing

from client.support.stub_subscription import StubSubscription, batch
from trio_nsq.client.consuming.message import Message
from trio_nsq.client.consuming.touching import TouchSchedule, keep_touched


def test_a_message_is_touched_each_third_of_its_timeout_until_it_is_delivered_again() -> None:
    schedule = TouchSchedule(received_at=100.0, timeout_s=60.0, max_timeout_s=100.0)
    touched = [now for now in range(100, 300, 5) if schedule.is_due(now)]
    assert touched == [120, 140, 160, 180]
    assert schedule.is_over


def test_late_touches_are_not_made_up_for() -> None:
    schedule = TouchSchedule(received_at=0.0, timeout_s=3.0, max_timeout_s=100.0)
    assert schedule.is_due(50.0)
    assert not schedule.is_due(50.5)
    assert schedule.next_at == 51.0
    assert not schedule.is_over


def test_no_touch_is_due_once_the_message_is_delivered_again() -> None:
    schedule = TouchSchedule(received_at=0.0, timeout_s=3.0, max_timeout_s=100.0)
    assert not schedule.is_due(100.0)
    assert schedule.is_over


def test_a_broker_that_announces_no_timeout_does_not_keep_the_client_busy() -> None:
    schedule = TouchSchedule(received_at=0.0, timeout_s=0.0, max_timeout_s=10.0)
    assert not schedule.is_due(0.05)
    assert schedule.is_due(0.1)


def test_the_warning_names_the_message_and_the_time() -> None:
    schedule = TouchSchedule(received_at=0.0, timeout_s=60.0, max_timeout_s=900.0)
    expected = "message 1 is not acknowledged after 15m: the broker will deliver it again"
    assert schedule.warning("message 1") == expected


@pytest.fixture
def source() -> StubSubscription:
    """Its messages arrive at 0, when a `MockClock` starts."""
    return StubSubscription()


@pytest.fixture
def one(source: StubSubscription) -> Message:
    return next(iter(batch("m", source)))


async def test_a_message_that_is_never_answered_is_not_touched_for_ever(
    source: StubSubscription,
    one: Message,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await keep_touched(one)
    assert 880 <= trio.current_time() <= 900
    assert source.touched == [one.id] * 44
    assert "is not acknowledged after 15m: the broker will deliver it again" in caplog.text


@pytest.mark.parametrize("end", ["answered", "lost"])
async def test_touching_ends_with_the_message(
    source: StubSubscription,
    one: Message,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
    end: str,
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_touched, one)
        await trio.sleep(50)
        if end == "answered":
            one.finish()
        else:
            source.live = False
    assert source.touched == [one.id] * 2
    assert caplog.text == ""
