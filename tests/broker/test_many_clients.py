"""Tests for what each of thousands of clients costs: counts, not times."""

import gc
import weakref
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
import trio.testing

from broker.support import connected, running_broker, settle
from trio_nsq.broker.monitoring.forms import Dicts, Form, Texts
from trio_nsq.broker.session.heartbeats import Heartbeats
from trio_nsq.http import compact_json

CLIENTS = 30


async def test_one_task_serves_a_client(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, AsyncExitStack() as stack:
        async with connected(bound.tcp_address) as first:
            await first.subscribe("t", "c")
        await settle()
        before = trio.lowlevel.current_statistics().tasks_living
        for _ in range(CLIENTS):
            client = await stack.enter_async_context(connected(bound.tcp_address))
            await client.subscribe("t", "c")
        await settle()
        assert trio.lowlevel.current_statistics().tasks_living == before + CLIENTS


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
    times = [("fast", 2.5), ("slow", 4), ("fast", 4.5)]
    assert called == [(name, pytest.approx(at_s, abs=0.01)) for name, at_s in times]


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
    names = ("a", "b", "c", "d", "e", "f")

    def describe(form: Form) -> object:
        inner = [form.describe(("n",), (number,)) for number in range(2)]
        values = (
            form.text('a "quoted" \\ é \u2028 \x00'), 5, form.boolean(True), form.listed(inner), form.listed(None),
            form.other({"x": None, "y": [1.5]}),
        )  # fmt: skip
        return form.describe(names, values, form.fields({"more": [True], "text": "%s"}))

    assert describe(Texts()) == compact_json(describe(Dicts()))
    assert Texts().describe(("n",), (1,)) == compact_json(Dicts().describe(("n",), (1,)))
