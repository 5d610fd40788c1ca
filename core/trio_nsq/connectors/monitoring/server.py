"""Serves the HTTP API of a job, in its event loop or, for a job without one, in a thread."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import trio

from ...access.access import Access
from ...http.guard import Guard
from ...http.serving import serve_connection
from ...http.web_pages import HostNames
from ...server.admission import Admission, connection_limit, http_unavailable
from ...server.listening import listen
from .http_api import make_router
from .status import JobStatus

logger: logging.Logger = logging.getLogger("trio_nsq.connectors")

FLAG = "--http-address"
_MOST_CONNECTIONS = 64


async def serve_status(
    address: str,
    status: Callable[[], JobStatus],
    *,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the status of a job until cancelled.

    Args:
        address: See `listen`.
        status: Returns the current status, without waiting.
        task_status: Gets the bound address once clients can connect.

    Raises:
        StartupError: The address is invalid or cannot be bound.
    """
    router, guard = make_router(status), Guard(Access(), HostNames(), names_hint="use its IP address")

    async def handle(stream: trio.SocketStream) -> None:
        try:
            await serve_connection(stream, router, guard=guard)
        except trio.BrokenResourceError:
            pass
        except Exception:  # a bug must not end the job
            logger.exception("HTTP: internal error")

    most = connection_limit(_MOST_CONNECTIONS, 1, logs=False)
    refusal = http_unavailable(f"TOO_MANY_CONNECTIONS: the job accepts {most}")
    listening = await listen(FLAG, address)
    try:
        task_status.started(listening.address)
        await trio.serve_listeners(Admission("HTTP", most, handle, refusal).handle, listening.listeners)
    finally:
        listening.close()


@contextmanager
def serving_status(address: str, status: Callable[[], JobStatus]) -> Iterator[str]:
    """Serve the status of a job from a thread of its own while the block runs. Yields the bound address.

    Args:
        status: As of `serve_status`; it is called in that thread.

    Raises:
        StartupError: The address is invalid or cannot be bound.
    """
    thread = _StatusThread(address, status)
    thread.start()
    try:
        yield thread.bound()
    finally:
        thread.stop()


class _StatusThread(trio.TaskStatus[str]):
    def __init__(self, address: str, status: Callable[[], JobStatus]) -> None:
        self._address = address
        self._status = status
        self._thread = threading.Thread(target=self._run, name="job status", daemon=True)
        self._is_decided = threading.Event()
        self._bound = ""
        self._error: BaseException | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._serving = trio.CancelScope()

    def start(self) -> None:
        self._thread.start()

    def bound(self) -> str:
        """Wait for the bound address. Raises StartupError."""
        self._is_decided.wait()
        if self._error is not None:
            raise self._error
        return self._bound

    def stop(self) -> None:
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._serving.cancel)
            self._thread.join()

    # ------------------------------------------------------------------ in the thread

    def started(self, value: str | None = None) -> None:
        self._bound, self._token = value or "", trio.lowlevel.current_trio_token()
        self._is_decided.set()

    def _run(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:
            if self._is_decided.is_set():
                logger.exception("HTTP: the status is no longer served")
            self._error = error
        finally:
            self._is_decided.set()

    async def _serve(self) -> None:
        with self._serving:
            await serve_status(self._address, self._status, task_status=self)
