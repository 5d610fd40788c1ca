"""Check that classes for trio raise a clear error in another event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import trio_nsq
from trio_nsq.broker import BrokerOptions, serve
from trio_nsq.lookup.service.options import LookupdOptions
from trio_nsq.lookup.service.server import serve as serve_lookupd


@pytest.mark.parametrize(
    ("enter", "instead"),
    [
        (trio_nsq.Producer().__aenter__, "use trio_nsq.sync.Producer"),
        (
            trio_nsq.Consumer("t", "c", nsqd_tcp_addresses=["127.0.0.1:1"]).__aenter__,
            "use trio_nsq.sync.Consumer",
        ),
        (trio_nsq.TopicReader("127.0.0.1:1", "t").__aenter__, "call trio.run"),
    ],
)
def test_clients(enter: Callable[[], Awaitable[object]], instead: str) -> None:
    async def main() -> None:
        await enter()

    with pytest.raises(
        RuntimeError, match=rf"must run in a trio task: .* {instead}.* in a thread \(asyncio\.to_thread\)"
    ):
        asyncio.run(main())


def test_servers(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"trio_nsq.broker.serve must run in a trio task"):
        asyncio.run(serve(BrokerOptions(tmp_path / "data")))
    assert not (tmp_path / "data").exists()
    with pytest.raises(RuntimeError, match=r"serve must run in a trio task"):
        asyncio.run(serve_lookupd(LookupdOptions(tcp_address="127.0.0.1:0", http_address="127.0.0.1:0")))
