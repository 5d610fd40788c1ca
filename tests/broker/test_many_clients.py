"""Tests for what each of thousands of clients costs: counts, not times."""

import gc
import math
import weakref
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
import trio.testing

from broker.support import connected, running_broker, settle
from trio_nsq.broker.monitoring.forms import Dicts, Form, Texts
from trio_nsq.broker.session.heartbeats import Heartbeats
from trio_nsq.http.messages import compact_json

CLIENTS = 30


async def test_no_task_serves_a_client_that_waits_only_for_messages(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    """The clock stands still: no timer of the broker begins a task meanwhile, however slow the machine is."""
    async with running_broker(tmp_path / "d") as bound, AsyncExitStack() as stack:
        async with connected(bound.tcp_address) as first:
            await first.subscribe("t", "c")
        await settle()
        before = trio.lowlevel.current_statistics().tasks_living
        for _ in range(CLIENTS):
            client = await stack.enter_async_context(connected(bound.tcp_address))
            await client.subscribe("t", "c")
        await settle()
        assert trio.lowlevel.current_statistics().tasks_living == before


class Spawned(trio.abc.Instrument):
    """Counts the tasks that begin."""

    count = 0

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


async def test_no_task_ends_the_sessions_of_clients_that_leave(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as other:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(connected(bound.tcp_address)) for _ in range(CLIENTS)]
            for client in clients:
                await client.subscribe("t", "c", ready_count=1)
            await other.publish("t", *[b"x"] * CLIENTS)
            for client in clients:
                await client.message()
            trio.lowlevel.add_instrument(spawned := Spawned())
        await settle()
        trio.lowlevel.remove_instrument(spawned)
        assert spawned.count == 0
        await other.subscribe("t", "c", ready_count=CLIENTS)
        assert [(await other.message()).attempts for _ in range(CLIENTS)] == [2] * CLIENTS


async def test_heartbeats_are_called_in_the_order_of_their_times(
    autojump_clock: trio.testing.MockClock,
) -> None:
    called: list[tuple[str, float]] = []
    start_s = trio.current_time()

    def every(name: str, interval_s: float) -> None:
        def beat(now_s: float) -> float:
            called.append((name, now_s - start_s))
            return now_s + interval_s

        heartbeats.watch(heartbeats.begin(beat), trio.current_time() + interval_s)

    heartbeats = Heartbeats()
    with trio.move_on_after(6.5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(heartbeats.run)
            every("slow", 4)
            await trio.sleep(0.5)
            every("fast", 2)  # is due before the one that `run` waits for
    assert [name for name, _ in called] == ["fast", "slow", "fast"]
    assert [at_s for _, at_s in called] == pytest.approx([2.5, 4, 4.5], abs=0.01)


@pytest.mark.parametrize("after_s", [0.1, 0.3, 1 / 3, 2.0000000007, 123456.7890123456])
async def test_heartbeat_is_due_when_it_is_called(
    autojump_clock: trio.testing.MockClock, after_s: float
) -> None:
    """The clock stands still between calls, so a call that finds nothing due would be repeated for ever."""
    heartbeats = Heartbeats()
    due_s = [trio.current_time() + after_s]
    late: list[bool] = []

    def beat(now_s: float) -> float:
        late.append(now_s >= due_s[0])
        due_s[0] += after_s
        return due_s[0] if len(late) < 100 else math.inf

    heartbeats.watch(heartbeats.begin(beat), due_s[0])
    with trio.move_on_after(200 * after_s):
        await heartbeats.run()
    assert late == [True] * 100


async def test_ended_heartbeat_keeps_nothing(autojump_clock: trio.testing.MockClock) -> None:
    class Client:
        def beat(self, now_s: float) -> float:
            raise AssertionError

    heartbeats, client = Heartbeats(), Client()
    heartbeat = heartbeats.begin(client.beat)
    heartbeats.watch(heartbeat, trio.current_time() + 1)
    heartbeat.end()
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None
    with trio.move_on_after(3):
        await heartbeats.run()


def test_both_forms_describe_the_same() -> None:
    layout = {"a": str, "b": int, "c": bool, "d": list, "e": list, "f": dict, "g": object, "h": object}

    def describe(form: Form) -> object:
        inner = [form.describe(form.prepared({"n": int}), (number,)) for number in range(2)]
        values = (
            form.text('a "quoted" \\ é \u2028 \x00'), 5, form.boolean(True), form.listed(inner), form.listed(None),
            form.other({"x": None, "y": [1.5]}), form.optional(None), form.optional(2**40),
        )  # fmt: skip
        fields = form.joined(form.fields({"more": [True], "text": "%s"}), form.fields({"last": None}))
        fields = form.with_list(form.fields({"before": 1}), "list", inner, fields)
        return form.describe(form.prepared(layout), values, fields, first=form.fields({"first": "%d"}))

    assert describe(Texts()) == compact_json(describe(Dicts()))
