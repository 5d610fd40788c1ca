"""Starting and stopping a broker."""

import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import trio

from ..http import serve_connection
from ..log import Files
from ..protocol.address import format_address
from .data_folder import DataFolder
from .errors import StartupError
from .http_api import make_router
from .options import BrokerOptions
from .server import Server

logger = logging.getLogger("trio_nsq.broker")


@dataclass(frozen=True, slots=True)
class BoundAddresses:
    """Where a broker listens: `host:port` each; `http_address` is None if HTTP is off."""

    tcp_address: str
    http_address: str | None


async def serve(
    options: BrokerOptions,
    *,
    files: Files | None = None,
    task_status: trio.TaskStatus[BoundAddresses] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a broker until cancelled; then stop it gracefully.

    A graceful stop lets what is being stored be stored and answered, closes every client, and saves the state of
    every topic. It waits for the disk, never for a client.

    Args:
        options: See there.
        files: The file system the data folder lies in; None is the real one.
        task_status: Told the bound addresses once clients can connect.

    Raises:
        StartupError: The broker cannot start; the text is for the person who started it.
    """
    folder = DataFolder(options.data_path, files)
    try:
        async with trio.open_nursery() as nursery:
            workers = await nursery.start(_host_workers)
            try:
                await _serve_folder(options, folder, workers, task_status)
            finally:
                workers.cancel_scope.cancel()
    except* StartupError as group:
        raise _first(group) from None
    finally:
        folder.close()


async def _host_workers(*, task_status: trio.TaskStatus[trio.Nursery]) -> None:
    """A nursery that outlives the cancellation of `serve`, so that a stop can be graceful; `serve` ends it."""
    with trio.CancelScope(shield=True):
        async with trio.open_nursery() as workers:
            task_status.started(workers)
            await trio.sleep_forever()


async def _serve_folder(
    options: BrokerOptions,
    folder: DataFolder,
    workers: trio.Nursery,
    task_status: trio.TaskStatus[BoundAddresses],
) -> None:
    server = Server(options, folder, workers)
    tcp: list[trio.SocketListener] = []
    http: list[trio.SocketListener] = []
    try:
        tcp = await _listen("--tcp-address", options.tcp_address)
        http = await _listen("--http-address", options.http_address) if options.http_address else []
        bound = BoundAddresses(_bound(tcp), _bound(http) if http else None)
        for job in (server.run_timers, server.save_on_schedule, server.publisher.sync_on_schedule):
            workers.start_soon(job)
        router = make_router(server, bound)

        async def handle_http(stream: trio.SocketStream) -> None:
            try:
                await serve_connection(stream, router)
            except Exception:
                # A mistake of ours: it must not reach the other clients.
                logger.exception("HTTP: internal error")

        async with trio.open_nursery() as accepting:
            accepting.start_soon(_accept, server.handle_tcp, tcp, workers)
            accepting.start_soon(_accept, handle_http, http, workers)
            logger.info("TCP: listening on %s", bound.tcp_address)
            if bound.http_address:
                logger.info("HTTP: listening on %s", bound.http_address)
            task_status.started(bound)
    finally:
        for listener in tcp + http:
            listener.socket.close()  # no-one listens any more, or never did
        with trio.CancelScope(shield=True):
            await server.stop()


async def _accept(
    handler: Callable[[trio.SocketStream], Coroutine[Any, Any, None]],
    listeners: list[trio.SocketListener],
    workers: trio.Nursery,
) -> None:
    if listeners:
        await trio.serve_listeners(handler, listeners, handler_nursery=workers)


async def _listen(flag: str, address: str) -> list[trio.SocketListener]:
    host, _, port = address.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise StartupError(f"{flag}: {address} is not host:port")
    try:
        return await trio.open_tcp_listeners(int(port), host=host.strip("[]") or None, backlog=1024)
    except OSError as exc:
        raise StartupError(f"{flag}: cannot listen on {address}: {exc.strerror or exc}") from exc


def _bound(listeners: list[trio.SocketListener]) -> str:
    return format_address(*listeners[0].socket.getsockname()[:2])


def _first(group: BaseExceptionGroup[StartupError]) -> StartupError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
