"""Connections of viewers: hypercorn's, with limits for viewers that do not read, and for closed connections."""

from functools import partial
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState

_SEND_S = 30.0
"""For one piece of an answer. A viewer that does not read for so long is disconnected."""


class _Context(WorkerContext):
    """The state of all connections.

    Attributes:
        sending: Scopes of sends, which a cancellation of their tasks does not end.
        send_s: Limit of a send.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self.sending = set[trio.CancelScope]()
        self.send_s = _SEND_S

    def stop(self, within_s: float) -> None:
        """Limit the sends that run and those that follow."""
        self.send_s = within_s
        for scope in self.sending:
            scope.deadline = trio.current_time() + within_s


class _Connection(TCPServer):
    async def protocol_send(self, event: Event) -> None:
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        context = self.context
        assert isinstance(context, _Context)
        async with self.send_lock:
            # Shielded, so that a connection is not used any more after a part of a piece.
            with trio.CancelScope(shield=True, deadline=trio.current_time() + context.send_s) as scope:
                context.sending.add(scope)
                try:
                    await self.stream.send_all(event.data)
                    return
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass
                finally:
                    context.sending.discard(scope)
            await trio.aclose_forcefully(self.stream)
        await self.protocol.handle(Closed())

    async def _read_data(self) -> None:
        await super()._read_data()
        await self.idle_task.stop()  # it would keep a closed connection until it times out


async def serve_connections(
    app: AppWrapper,
    config: Config,
    listeners: list[Any],
    task_status: trio.TaskStatus[object] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve viewers until cancelled; answers that are being sent then have `config.graceful_timeout`."""
    context = _Context()

    async def limit_sends_at_the_end() -> None:
        try:
            await trio.sleep_forever()
        finally:
            await context.terminated.set()
            context.stop(config.graceful_timeout)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(limit_sends_at_the_end)
        handler = partial(_Connection, app, config, context, ConnectionState({}))
        await nursery.start(partial(trio.serve_listeners, handler, listeners))
        task_status.started()
