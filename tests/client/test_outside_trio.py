"""Check that clients raise a clear error outside a task, and servers outside of trio."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import trio_nsq
from trio_nsq.broker import BrokerOptions, serve
from trio_nsq.lookup.service.options import LookupdOptions
from trio_nsq.lookup.service.server import serve as serve_lookupd


@pytest.mark.parametrize(
    ("enter", "instead"),
    [
        (trio_nsq.Producer().__aenter__, ", or use trio_nsq.sync.Producer"),
        (
            trio_nsq.Consumer("t", "c", nsqd_tcp_addresses=["127.0.0.1:1"]).__aenter__,
            ", or use trio_nsq.sync.Consumer",
        ),
        (trio_nsq.TopicReader("127.0.0.1:1", "t").__aenter__, "$"),
    ],
)
def test_clients(enter: Callable[[], Coroutine[Any, Any, object]], instead: str) -> None:
    with pytest.raises(
        RuntimeError,
        match=rf"must run in a task of trio or asyncio: .* trio\.run or asyncio\.run{instead}",
    ):
        enter().send(None)


def test_clients_in_a_callback_of_asyncio() -> None:
    async def main() -> None:
        done = asyncio.get_running_loop().create_future()

        def call() -> None:
            try:
                trio_nsq.Producer().__aenter__().send(None)
            except RuntimeError as error:
                done.set_result(str(error))

        asyncio.get_running_loop().call_soon(call)
        assert "must run in a task" in await done

    asyncio.run(main())


async def handle(_: trio_nsq.Message) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda consumer: consumer.run(handle), "inside its `async with` block"),
        (lambda consumer: consumer.__anext__(), "inside its `async with` block"),
        (lambda consumer: anext(consumer.batches()), "inside its `async with` block"),
        (lambda _: trio_nsq.Producer().publish("t", b"x"), "inside its `async with` block"),
    ],
    ids=["run", "next", "batches", "publish"],
)
def test_clients_that_are_not_entered(
    use: Callable[[trio_nsq.Consumer], Awaitable[object]], said: str
) -> None:
    async def main() -> None:
        await use(trio_nsq.Consumer("t", "c"))

    with pytest.raises((RuntimeError, trio_nsq.client.ProducerClosed), match=said):
        asyncio.run(main())


def test_servers(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"trio_nsq.broker.serve must run in a trio task"):
        asyncio.run(serve(BrokerOptions(tmp_path / "data")))
    assert not (tmp_path / "data").exists()
    with pytest.raises(RuntimeError, match=r"serve must run in a trio task"):
        asyncio.run(serve_lookupd(LookupdOptions(tcp_address="127.0.0.1:0", http_address="127.0.0.1:0")))
