"""Runs the console: its listener, and all its tasks."""

import logging
import platform
from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from .._version import __version__
from ..http.connection import WaitingClients
from ..http.serving import peer_of, serve_connection
from ..platform.requirements import require_trio
from ..protocol.address import host_of
from ..server.admission import Admission, connection_limit, http_refusal, https_refusal
from ..server.body_memory import BodyMemoryLimit
from ..server.listening import Listening, listen
from ..server.reloading import reload_on_request
from ..tls.accepting import Acceptor, NotAccepted
from ..tls.context import server_context
from ..tls.session import ServerContext
from ..tls.settings import TLSSettings
from .access.access import Access
from .console import Console
from .fleet.history import History
from .fleet.watcher import Watcher
from .messages.bodies import Bodies
from .notifications import Notifier
from .options import ConsoleOptions
from .upstream.client import Upstream
from .web.app import make_site
from .web.fleets import FleetSites

logger: logging.Logger = logging.getLogger("trio_nsq.console")

_SEND_S = 30.0
"""For one piece of an answer. A viewer that does not read for so long is disconnected."""


@dataclass(frozen=True, slots=True)
class ConsoleAddresses:
    """The bound address of a console, and its first page."""

    http_address: str
    url: str


def tls_context(options: ConsoleOptions) -> ServerContext | None:
    """Read the certificate of the console; None without one. Raises StartupError."""
    return server_context(TLSSettings(options.https_cert, options.https_key), "https")


def make_console(options: ConsoleOptions) -> Console:
    """Build the parts of a console. Its tasks do not run yet.

    Raises:
        StartupError: An option or a file cannot be used.
    """
    connect_timeout_s = options.connect_timeout_ms / 1000
    request_timeout_s = options.request_timeout_ms / 1000
    upstream = Upstream(
        options.tls, options.secret, connect_timeout_s=connect_timeout_s, request_timeout_s=request_timeout_s
    )
    notifier = Notifier(
        options.notification_http_endpoint,
        connect_timeout_s=connect_timeout_s,
        request_timeout_s=request_timeout_s,
    )
    history = History()
    watcher = Watcher(upstream, options, history.observe)
    access, bodies = Access(options, upstream, watcher), Bodies(options.bodies_file)
    return Console(options, upstream, watcher, history, notifier, access, bodies)


async def serve(
    options: ConsoleOptions,
    *others: ConsoleOptions,
    listening: Listening | None = None,
    reloads: AsyncIterable[object] | None = None,
    task_status: trio.TaskStatus[ConsoleAddresses] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a console until cancelled.

    Args:
        options: The configuration.
        others: Those of further fleets; `fleet` is set in all. The listener and its limits are those of `options`.
        listening: Open listeners for viewers, which this closes; None: open `http_address`.
        reloads: At each item the console reads its files again. None: it never does.
        task_status: Gets the bound address once viewers can connect.

    Raises:
        StartupError: The console cannot start; the text is for the user.
        RuntimeError: The caller is not a trio task.
    """
    require_trio("trio_nsq.console.server.serve")
    logger.info("trio-nsq v%s (Python %s)", __version__, platform.python_version())
    consoles = [make_console(each) for each in (options, *others)]
    acceptor = Acceptor(tls_context(options))

    async def reload_certificate() -> None:
        acceptor.context = await trio.to_thread.run_sync(tls_context, options)

    steps = [
        step
        for each in consoles
        for step in (each.access.reload, each.bodies.reload, each.access.audit.reopen)
    ]
    there = listening or await listen("--http-address", options.http_address)
    try:
        scheme = "http" if acceptor.context is None else "https"
        bound = ConsoleAddresses(there.address, f"{scheme}://{there.address}{options.base_path}")
        async with trio.open_nursery() as nursery:
            for each in consoles:
                nursery.start_soon(each.watcher.run)
                nursery.start_soon(each.notifier.run)
                nursery.start_soon(each.access.run)
            if reloads is not None:
                nursery.start_soon(
                    partial(reload_on_request, reloads, *steps, reload_certificate, logger=logger)
                )
            await nursery.start(_serve_http, consoles, there, acceptor)
            logger.info("HTTP: listening on %s", there.address)
            task_status.started(bound)
    finally:
        there.close()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
            for each in consoles:
                await each.upstream.aclose()
        with trio.CancelScope(shield=True):
            for each in consoles:
                await each.access.aclose()
        logger.info("CONSOLE: bye")


async def _serve_http(
    consoles: Sequence[Console],
    there: Listening,
    acceptor: Acceptor,
    task_status: trio.TaskStatus[object] = trio.TASK_STATUS_IGNORED,
) -> None:
    # The form parser logs each malformed form; the viewer gets the reason.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    # The other half of the descriptors is for connections to brokers.
    most = connection_limit(consoles[0].options.max_connections, listeners=2, logs=False)
    sites = [(each.options, make_site(each)) for each in consoles]
    site = FleetSites(sites) if len(sites) > 1 else sites[0][1]
    waiting, bodies = WaitingClients(), BodyMemoryLimit()

    scheme = "http" if acceptor.context is None else "https"

    async def serve_one(stream: trio.SocketStream) -> None:
        name = stream.socket.getsockname()
        peer, port = peer_of(stream), name[1] if isinstance(name, tuple) else 0
        async with stream:
            try:
                secure: trio.abc.Stream = stream
                if scheme == "https":
                    with waiting.waits():
                        secure = await acceptor.shake_hands(stream, host_of(peer))
                await serve_connection(
                    secure,
                    site,
                    peer=peer,
                    bodies=bodies,
                    guard=site.guard(port, scheme),
                    waiting=waiting,
                    send_timeout_s=_SEND_S,
                )
            except (NotAccepted, trio.BrokenResourceError):
                pass  # the viewer has disconnected, or does not speak TLS
            except Exception:  # a bug in the console: it must not affect other viewers
                logger.exception("HTTP: internal error")

    refusal = http_refusal(most, "console") if scheme == "http" else https_refusal()
    admission = Admission("HTTP", most, serve_one, refusal, make_room=waiting.end_longest)
    await trio.serve_listeners(admission.handle, there.listeners, task_status=task_status)
