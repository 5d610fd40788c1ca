"""Runs the console: its listener, and all its tasks."""

import logging
import os
import platform
import socket
import ssl
from collections.abc import AsyncIterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import trio
from hypercorn.config import Config
from hypercorn.utils import wrap_app
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .._version import __version__
from ..listening import Listening, listen
from ..reloading import reload_on_request
from ..under_trio import require_trio
from .access.access import Access
from .certificate import Certificate
from .connections import serve_connections
from .console import Console
from .fleet.history import History
from .fleet.watcher import Watcher
from .notifications import Notifier
from .options import ConsoleOptions
from .upstream.client import Upstream
from .web.app import make_app

logger = logging.getLogger("trio_nsq.console")

_MAX_HEADERS_BYTES = 64 * 1024
_KEEP_ALIVE_S = 75.0
_STOP_S = 1.0
"""Time for the answers that are being sent when the console stops."""


@dataclass(frozen=True, slots=True)
class ConsoleAddresses:
    """The bound address of a console, and its first page."""

    http_address: str
    url: str


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
    return Console(options, upstream, watcher, history, notifier, Access(options, upstream, watcher))


async def serve(
    options: ConsoleOptions,
    *,
    listening: Listening | None = None,
    reloads: AsyncIterable[object] | None = None,
    task_status: trio.TaskStatus[ConsoleAddresses] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a console until cancelled.

    Args:
        options: The configuration.
        listening: Open listeners for viewers, which this closes; None: open `http_address`.
        reloads: At each item the console reads its files again. None: it never does.
        task_status: Gets the bound address once viewers can connect.

    Raises:
        StartupError: The console cannot start; the text is for the user.
        RuntimeError: The caller is not a trio task.
    """
    require_trio("trio_nsq.console.server.serve")
    logger.info("trio-nsq v%s (Python %s)", __version__, platform.python_version())
    console = make_console(options)
    certificate = None
    if options.https_cert is not None and options.https_key is not None:
        certificate = Certificate(options.https_cert, options.https_key)
    steps = [console.access.reload, console.access.audit.reopen]
    if certificate is not None:
        steps.append(certificate.reload)
    there = listening or await listen("--http-address", options.http_address)
    try:
        scheme = "http" if certificate is None else "https"
        bound = ConsoleAddresses(there.address, f"{scheme}://{there.address}{options.base_path}")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(console.watcher.run)
            nursery.start_soon(console.notifier.run)
            nursery.start_soon(console.access.run)
            if reloads is not None:
                nursery.start_soon(partial(reload_on_request, reloads, *steps, logger=logger))
            await nursery.start(_serve_http, console, there, certificate)
            logger.info("HTTP: listening on %s", there.address)
            task_status.started(bound)
    finally:
        there.close()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
            await console.upstream.aclose()
        with trio.CancelScope(shield=True):
            await console.access.audit.aclose()
        logger.info("CONSOLE: bye")


class _Config(Config):
    """Hypercorn's configuration, with a TLS context that can be changed."""

    certificate: Certificate | None = None

    def create_ssl_context(self) -> ssl.SSLContext | None:
        return None if self.certificate is None else self.certificate.context


def http1_only(app: ASGIApp) -> ASGIApp:
    """Refuse HTTP/2.

    Hypercorn changes to HTTP/2 at `Upgrade: h2c`. If a reverse proxy passes that on, the client's further requests go
    through it unseen: it removes no header such as `X-Forwarded-User` from them.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["http_version"].startswith("1."):
            refusal = PlainTextResponse("The console speaks HTTP/1.1 only.\n", 505)
            await refusal(scope, receive, send)
        else:
            await app(scope, receive, send)

    return answer


async def _serve_http(
    console: Console,
    there: Listening,
    certificate: Certificate | None,
    task_status: trio.TaskStatus[object] = trio.TASK_STATUS_IGNORED,
) -> None:
    config = _Config()
    config.certificate = certificate
    config.accesslog = None
    config.errorlog = logging.getLogger("trio_nsq.console.http")
    config.errorlog.setLevel(logging.WARNING)
    # The form parser logs each malformed form; the viewer gets the reason.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    config.h11_max_incomplete_size = _MAX_HEADERS_BYTES
    config.keep_alive_timeout = _KEEP_ALIVE_S
    config.graceful_timeout = _STOP_S
    config.include_server_header = False
    listeners: list[Any] = []
    for listener in there.listeners:
        copy = socket.socket(fileno=os.dup(listener.socket.fileno()))
        plain = trio.SocketListener(trio.socket.from_stdlib_socket(copy))
        if certificate is None:
            listeners.append(plain)
        else:
            listeners.append(trio.SSLListener(plain, certificate.context, https_compatible=True))
    app = cast(Any, http1_only(make_app(console)))  # other names of the same types
    await serve_connections(
        wrap_app(app, config.wsgi_max_body_size, "asgi"), config, listeners, task_status=task_status
    )
