"""The server of the discovery service: TCP for brokers, HTTP for consumers and administrators, one registry."""

import logging
import platform
import socket
from collections.abc import AsyncIterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio

from ..._version import __version__
from ...access.audit_writer import AuditWriter
from ...access.authentication import Authentication
from ...log import Files
from ...platform.requirements import require_trio
from ...protocol.address import host_of
from ...server.admission import Admission, connection_limit, http_refusal, refusal_text
from ...server.listening import Listening, listen, loopback_host, port_of
from ...server.reloading import reload_on_request
from ...text.wording import count_of
from ...tls.accepting import Acceptor
from ..protocol import PeerInfo, encode_response
from .listeners import Listeners
from .names_file import NamesFile
from .names_saver import NamesSaver
from .options import LookupdOptions
from .registry import Registry

if TYPE_CHECKING:
    from ...tls.session import ServerContext

logger: logging.Logger = logging.getLogger("trio_nsq.lookup")

_SERVICE = "discovery service"


@dataclass(frozen=True, slots=True)
class LookupdAddresses:
    """The bound addresses of a discovery service, `host:port` each."""

    tcp_address: str
    http_address: str


async def serve(
    options: LookupdOptions,
    *,
    files: Files | None = None,
    listeners: Mapping[str, Listening] | None = None,
    reloads: AsyncIterable[object] | None = None,
    task_status: trio.TaskStatus[LookupdAddresses] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a discovery service until cancelled; then save the names and close all connections.

    Args:
        options: The configuration.
        files: The file system; tests may replace it.
        listeners: Open listeners by name, `TCP` and `HTTP`, instead of those of the options. They stay open.
        reloads: At each item the service reads its certificate, key, CAs and auth file again, and opens the audit log
            again. If it cannot use a file, it logs this and keeps the previous one. None: it never does.
        task_status: Gets the bound addresses once clients can connect.

    Raises:
        StartupError: The service cannot start; the text is for the user.
        RuntimeError: The caller is not a trio task.
    """
    require_trio("trio_nsq.lookup.service.server.serve")
    logger.info("trio-nsq v%s (Python %s)", __version__, platform.python_version())
    registry = Registry(
        inactive_timeout_s=options.inactive_producer_timeout_ms / 1000,
        tombstone_lifetime_s=options.tombstone_lifetime_ms / 1000,
        max_registrations=options.max_registrations,
        max_topics=options.max_topics,
        max_channels=options.max_channels,
    )
    names_file = NamesFile(options.data_path, files) if options.data_path is not None else None
    try:
        if names_file is not None:
            names = names_file.load()
            names_file.try_to_save(names)
            registry.load(names)
            logger.info("DB: found %s in %s", count_of(len(registry.topics()), "topic"), names_file.path)
        saver = NamesSaver(registry, names_file)
        try:
            await _listen_and_serve(options, registry, saver, listeners, reloads, task_status)
        finally:
            with trio.CancelScope(shield=True):
                await saver.save_last_changes()
    finally:
        if names_file is not None:
            names_file.close()
        logger.info("LOOKUPD: bye")


async def _listen_and_serve(
    options: LookupdOptions,
    registry: Registry,
    saver: NamesSaver,
    given: Mapping[str, Listening] | None,
    reloads: AsyncIterable[object] | None,
    task_status: trio.TaskStatus[LookupdAddresses],
) -> None:
    acceptor = Acceptor(_tls_context(options))
    audit = AuditWriter(options.audit_log)
    authentication = Authentication(
        options.auth_file, verifies_clients=options.tls.verifies_clients, audit=audit.log
    )
    opened: dict[str, Listening] = {}
    try:
        if given is None:
            opened["TCP"] = await listen("--tcp-address", options.tcp_address)
            opened["HTTP"] = await listen("--http-address", options.http_address)
        else:
            opened |= {name: there.duplicate() for name, there in given.items()}
        bound = LookupdAddresses(opened["TCP"].address, opened["HTTP"].address)
        info = PeerInfo(
            # The host name may resolve to another address than loopback.
            broadcast_address=options.broadcast_address
            or loopback_host(bound.http_address)
            or socket.gethostname(),
            hostname=socket.gethostname(),
            http_port=port_of(bound.http_address) or 0,
            tcp_port=port_of(bound.tcp_address) or 0,
            version=__version__,
        )
        hosts = (*options.http_allowed_hosts, info.broadcast_address, host_of(options.http_address))
        listeners = Listeners(options, registry, info, authentication.access, acceptor, hosts)
        most = connection_limit(options.max_connections, len(opened), logs=False)
        admissions = {
            "TCP": Admission("TCP", most, listeners.handle_broker, _tcp_refusal(most)),
            "HTTP": Admission("HTTP", most, listeners.handle_http, http_refusal(most, _SERVICE)),
        }

        async def reload_certificate() -> None:
            if acceptor.context is not None:
                acceptor.context = await trio.to_thread.run_sync(_tls_context, options)
                logger.info("reload: read the certificate %s and its key", options.tls_cert)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(saver.run)
            nursery.start_soon(authentication.watch_expiry, listeners)
            nursery.start_soon(audit.run)
            nursery.start_soon(listeners.hosts.learn_own_name)
            for name, there in opened.items():
                nursery.start_soon(trio.serve_listeners, admissions[name].handle, there.listeners)
                logger.info("%s: listening on %s", name, there.address)
            if reloads is not None:
                steps = audit.reopen, partial(authentication.reload, listeners), reload_certificate
                nursery.start_soon(partial(reload_on_request, reloads, *steps, logger=logger))
            task_status.started(bound)
    finally:
        for name, there in opened.items():
            logger.info("%s: closing %s", name, there.address)
            there.close()
        with trio.CancelScope(shield=True):
            await audit.aclose()


def _tls_context(options: LookupdOptions) -> "ServerContext | None":
    if not options.tls.is_used:
        return None  # before the import below, which is slow
    from ...tls.context import server_context

    return server_context(options.tls)


def _tcp_refusal(most: int) -> bytes:
    return encode_response(f"E_INVALID too many connections: {refusal_text(most, _SERVICE)}".encode())
