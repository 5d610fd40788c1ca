"""Tests with slow name servers: disk operations do not wait for them."""

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from broker.support import HeldFiles, connected, running_broker, until
from trio_nsq.broker.resolver import TIMEOUT_S, Resolver

SLOW = ".slow.invalid"


class SlowNames:
    """Makes lookups of names below `slow.invalid` wait until `release`."""

    def __init__(self) -> None:
        self.asked = 0
        self.looking_up = 0
        self._lock = threading.Lock()
        self._go_on = threading.Event()
        self._real = socket.getaddrinfo

    def release(self) -> None:
        self._go_on.set()

    def __call__(self, host: Any, port: Any, *more: Any, **named: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else str(host)
        numeric_only = (more[3] if len(more) > 3 else 0) & socket.AI_NUMERICHOST  # first, in the event loop
        if not name.endswith(SLOW) or numeric_only:
            return self._real(host, port, *more, **named)
        with self._lock:
            self.asked += 1
            self.looking_up += 1
        self._go_on.wait()
        with self._lock:
            self.looking_up -= 1
        raise socket.gaierror(socket.EAI_NONAME, "there is no such name")


@pytest.fixture
def slow_names(monkeypatch: pytest.MonkeyPatch) -> Any:
    names = SlowNames()
    monkeypatch.setattr(socket, "getaddrinfo", names)
    yield names
    names.release()


class NotedFiles(HeldFiles):
    """Counts syncs."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs = 0

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.syncs += 1


async def test_saves_and_syncs_do_not_wait_for_names(tmp_path: Path, slow_names: SlowNames) -> None:
    """By default trio has 40 threads for everything."""
    async with running_broker(tmp_path / "data") as bound, connected(bound.tcp_address) as client:
        await client.publish("t", b"one")
    files = NotedFiles()
    services = tuple(f"n{number}{SLOW}:4160" for number in range(60))
    async with running_broker(
        tmp_path / "data", files=files, sync="interval", sync_timeout_ms=1, nsqlookupd_tcp_addresses=services
    ) as bound:
        await until(lambda: slow_names.looking_up >= 40)
        async with connected(bound.tcp_address) as client:
            before = files.syncs
            await client.publish("t", b"two")
            await until(lambda: files.syncs > before)
            await client.subscribe("t", "c", ready_count=2)  # a new channel is saved before the answer
            assert [(await client.message()).body for _ in range(2)] == [b"one", b"two"]
        await until(lambda: slow_names.looking_up == 60)


async def test_slow_name_delays_no_other_name_and_uses_few_threads(slow_names: SlowNames) -> None:
    resolver = Resolver()
    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(resolver.getaddrinfo, b"one" + SLOW.encode(), 1)
        await until(lambda: slow_names.looking_up == 4)
        with trio.fail_after(20):
            found = await resolver.getaddrinfo(b"localhost", 1, 0, socket.SOCK_STREAM)
        assert found
        assert slow_names.looking_up == 4
        nursery.cancel_scope.cancel()


async def test_lookup_has_a_time_limit(slow_names: SlowNames, mock_clock: trio.testing.MockClock) -> None:
    async def look_up() -> None:
        with pytest.raises(OSError, match="the name server did not answer within 10 s"):
            await Resolver().getaddrinfo(b"one" + SLOW.encode(), 1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look_up)
        while not slow_names.looking_up:
            await trio.lowlevel.checkpoint()
        mock_clock.jump(TIMEOUT_S)
