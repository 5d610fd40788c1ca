"""Tests that limits are exactly those of the broker's options, to the byte, the message and the millisecond."""

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from broker.api import DONE, OK, running_api
from broker.support import connected, dpub, identify, mpub, pub, running_broker, settle
from trio_nsq.protocol.limits import Limits

LIMITS = Limits(
    max_msg_size=100,
    max_body_size=1000,
    max_rdy_count=3,
    msg_timeout_ms=2000,
    max_msg_timeout_ms=5000,
    max_req_timeout_ms=4000,
    max_defer_ms=6000,
    max_heartbeat_interval_ms=10_000,
)


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


@pytest.mark.parametrize(
    ("refused", "error", "accepted"),
    [
        (pub("t", bytes(101)), "E_BAD_MESSAGE PUB message too big 101 > 100", pub("t", bytes(100))),
        (dpub("t", 1, bytes(101)), "E_BAD_MESSAGE DPUB message too big 101 > 100", dpub("t", 1, bytes(100))),
        (
            mpub("t", b"x", bytes(101)),
            "E_BAD_MESSAGE MPUB message too big 101 > 100",
            mpub("t", b"x", bytes(100)),
        ),
        (
            mpub("t", *[bytes(100)] * 9, bytes(57)),
            "E_BAD_BODY MPUB body too big 1001 > 1000",
            mpub("t", *[bytes(100)] * 9, bytes(56)),
        ),
        (dpub("t", 6001, b"x"), "E_INVALID DPUB timeout 6001 out of range 0-6000", dpub("t", 6000, b"x")),
        (
            identify(msg_timeout=5001),
            "E_BAD_BODY IDENTIFY msg timeout (5001) is invalid",
            identify(msg_timeout=5000),
        ),
        (
            identify(heartbeat_interval=10_001),
            "E_BAD_BODY IDENTIFY heartbeat interval (10001) is invalid",
            identify(heartbeat_interval=10_000),
        ),
    ],
)
async def test_slightly_too_much_is_refused(
    tmp_path: Path, refused: bytes, error: str, accepted: bytes
) -> None:
    async with running_broker(tmp_path / "d", limits=LIMITS) as bound:
        async with connected(bound.tcp_address) as client:
            await client.send(accepted)
            await client.ok()
        async with connected(bound.tcp_address) as client:
            await client.send(refused)
            assert await client.error() == error
            assert await client.frame() is None


async def test_ready_count(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d", limits=LIMITS) as bound:
        async with connected(bound.tcp_address) as client:
            await client.subscribe("t", "c", ready_count=3)
            await client.publish("t", *[b"x"] * 5)
            for _ in range(3):
                await client.message()
            await client.nothing_more()
            await client.send(b"RDY 4\n")
            assert await client.error() == "E_INVALID RDY count 4 out of range 0-3"
            assert await client.frame() is None


async def test_limits_over_http(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", limits=LIMITS) as api:
        assert await api.post("/pub", bytes(100), topic="t") == OK
        assert await api.post("/pub", bytes(101), topic="t") == (413, "MSG_TOO_BIG")
        assert await api.post("/pub", b"x", topic="t", defer=6000) == OK
        assert await api.post("/pub", b"x", topic="t", defer=6001) == (400, "INVALID_DEFER")
        assert await api.post("/mpub", b"\n".join([b"x" * 100] * 9), topic="t") == OK
        assert await api.post("/mpub", b"x" * 101, topic="t") == (413, "MSG_TOO_BIG")
        assert await api.post("/mpub", b"\n".join([b"x" * 100] * 10), topic="t") == (413, "BODY_TOO_BIG")
        assert await api.post("/topic/create", topic="x" * 64) == DONE
        assert await api.post("/topic/create", topic="x" * 65) == (400, "INVALID_TOPIC")


async def identified(client: Any, **fields: int) -> None:
    await client.send(identify(heartbeat_interval=10_000, output_buffer_size=-1, **fields))
    await client.ok()
    await client.subscribe("t", "c", ready_count=1)


async def came_after(client: Any, clock: trio.testing.MockClock, milliseconds: int) -> bool:
    """Return whether the next message arrives after exactly this time, and not a millisecond earlier."""
    passed = 0
    for until in (milliseconds - 1, milliseconds):
        while passed < until:
            step = min(until - passed, 3000)
            await client.nothing_more()
            await settle()
            clock.jump(step / 1000)
            passed += step
            await client.send(b"NOP\n")
        if until < milliseconds:
            await client.nothing_more()
    return bool(await client.message())


async def test_default_message_timeout_is_the_brokers(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    async with running_broker(tmp_path / "d", limits=LIMITS, sync="interval") as bound:
        async with connected(bound.tcp_address) as client:
            await identified(client)
            await client.publish("t", b"x")
            await client.message()
            assert await came_after(client, clock, 2000)


async def test_touch_extends_up_to_the_maximum_timeout(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    async with running_broker(tmp_path / "d", limits=LIMITS, sync="interval") as bound:
        async with connected(bound.tcp_address) as client:
            await identified(client)
            await client.publish("t", b"x")
            message = await client.message()
            for _ in range(3):
                await settle()
                clock.jump(1.5)
                await client.send(b"TOUCH " + message.id + b"\n")
                await client.nothing_more()
            # 4.5 s after the delivery; two more would be 6.5.
            assert await came_after(client, clock, 500)


async def test_requeue_delay_is_limited(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    async with running_broker(tmp_path / "d", limits=LIMITS, sync="interval") as bound:
        async with connected(bound.tcp_address) as client:
            await identified(client)
            await client.publish("t", b"x")
            message = await client.message()
            await client.send(b"REQ " + message.id + b" 3600000\n")
            assert await came_after(client, clock, 4000)
