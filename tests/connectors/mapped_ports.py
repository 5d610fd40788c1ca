"""Ports that are mapped to those of a broker, as by `docker -p`: the broker does not know them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue

import trio


@contextmanager
def mapped(address: str) -> Iterator[str]:
    """Yield an address on loopback at which connections are passed on to another one."""
    host, _, port = address.rpartition(":")
    begun = SimpleQueue[tuple[trio.lowlevel.TrioToken, trio.CancelScope, int]]()

    async def serve() -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        with trio.CancelScope() as scope:
            place = trio.lowlevel.current_trio_token(), scope, listener.socket.getsockname()[1]
            begun.put(place)
            await trio.serve_listeners(partial(_pass_on_both, to=(host, int(port))), [listener])

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    token, scope, mapped_port = begun.get()
    try:
        yield f"127.0.0.1:{mapped_port}"
    finally:
        token.run_sync_soon(scope.cancel)
        thread.join()


async def _pass_on_both(near: trio.SocketStream, to: tuple[str, int]) -> None:
    with suppress(OSError, trio.BrokenResourceError):
        async with await trio.open_tcp_stream(*to) as far, trio.open_nursery() as nursery:
            nursery.start_soon(_pass_on, near, far)
            nursery.start_soon(_pass_on, far, near)


async def _pass_on(source: trio.SocketStream, target: trio.SocketStream) -> None:
    with suppress(trio.BrokenResourceError):
        async for data in source:
            await target.send_all(data)
        await target.send_eof()
