"""Check that clients raise a clear error outside a task, servers outside of trio, and both under gevent."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import trio_nsq
from interop.peers import qcli_serve
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


PATCHED = "from gevent import monkey\nmonkey.patch_all()\n"
SYNC = "import trio_nsq.sync\ntrio_nsq.sync.Producer('127.0.0.1:1').__enter__()\n"
TIMEOUT_S = 60


@pytest.mark.parametrize(
    "program",
    [
        PATCHED + SYNC,
        "import trio_nsq.sync\n" + PATCHED + SYNC,
    ],
    ids=["before the import", "after the import"],
)
def test_gevent(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S)
    error = done.stderr.splitlines()[-1]
    assert (
        "RuntimeError: trio cannot run: the module select has no epoll. gevent's monkey.patch_all()" in error
    )
    assert "trio_nsq.client.IdempotentProducer, which works under gevent" in error


@pytest.mark.slow  # starts a broker
def test_gevent_runs_what_the_error_names(tmp_path: Path) -> None:
    program = PATCHED + (
        "import sys\n"
        "from trio_nsq.client import IdempotentProducer\n"
        "print(IdempotentProducer(sys.argv[1], 'topic', 'name').publish([b'1', b'2'], 1))\n"
        "print(hasattr(sys.modules['select'], 'epoll'))\n"
    )
    with qcli_serve(tmp_path / "data", "--sync=interval") as broker:
        done = subprocess.run(
            [sys.executable, "-c", program, broker.http_address],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert (done.stdout, done.stderr) == ("published\nFalse\n", "")
        in_threads = (
            "from gevent import monkey\n"
            "monkey.patch_all(thread=False, select=False)\n"
            "import sys, trio_nsq.sync\n"
            "with trio_nsq.sync.Producer(sys.argv[1]) as producer: producer.publish('topic', b'3')\n"
            "with trio_nsq.sync.Consumer('topic', 'c', nsqd_tcp_addresses=sys.argv[1]) as consumer:\n"
            "    for _, message in zip(range(3), consumer): message.finish(); print(message.body)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", in_threads, broker.tcp_address],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert (done.stdout, done.stderr) == ("b'1'\nb'2'\nb'3'\n", "")
