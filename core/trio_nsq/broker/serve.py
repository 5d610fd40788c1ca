"""Starts and stops a broker."""

import logging
import platform
import socket
import ssl
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from .._version import __version__
from ..access.audit_writer import AuditWriter
from ..access.authentication import Authentication
from ..access.policy import Identity
from ..http.urls import URL
from ..log import Files
from ..lookup.protocol import PeerInfo
from ..lookup.registration import LookupRegistration
from ..platform.requirements import has_gil, require_trio
from ..protocol.errors import NSQError, StartupError
from ..server.admission import Admission, connection_limit, http_refusal, https_refusal, tcp_refusal
from ..server.listening import Listening, accept_clients, is_exposed, listen
from ..server.reloading import reload_on_request
from ..server.startup_checks import secret_in
from ..text.wording import count_of
from ..tls.client import client_context
from ..tls.settings import requires_certificate
from .addresses import BoundAddresses, Broadcast
from .api.server import HTTPServer
from .monitoring.statsd import StatsdClient
from .options import BrokerOptions
from .resolver import use_own_threads
from .server import Server
from .session.auth_service import AuthClient
from .storage.data_folder import DataFolder, FolderLock, refuse_member_folder, refuse_node_folder

if TYPE_CHECKING:
    from ..tls.session import ServerContext
    from .archiving import Archiving
    from .replication import Replication
    from .siblings import Siblings

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

_RESTART_S = 1.0
_ANNOUNCE_S = 5.0
"""The longest time that a new leader waits for discovery services; an attempt to connect is given up earlier."""


async def serve(
    options: BrokerOptions,
    *,
    files: Files | None = None,
    reloads: AsyncIterable[object] | None = None,
    drains: AsyncIterable[object] | None = None,
    trusted: Mapping[str, Identity] | None = None,
    replication: "Replication | None" = None,
    lock: FolderLock | None = None,
    listeners: Mapping[str, Listening] | None = None,
    siblings: "Siblings | None" = None,
    task_status: trio.TaskStatus[BoundAddresses] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a broker until cancelled; then stop it gracefully.

    A graceful stop stores and answers the publishes already received, closes every client, and saves the state of every
    topic. It waits for the disk, never for a client.

    Args:
        options: See `BrokerOptions`.
        files: The file system of the data folder; None is the real one.
        reloads: At each item the broker reads its certificate, key and trusted CAs again, for new sessions. If a file
            cannot be used, the broker logs this and keeps the previous files. None: the broker never reloads.
        drains: At each item the broker begins to drain: it refuses publishes, until a client ends this by
            `PUT /config/draining`. None: only clients begin it.
        trusted: Identities by the digest of their token, besides those of the auth file, for programs that the caller
            starts. Without authentication they have no effect.
        replication: Makes the broker the leader of a cluster. An OK then also waits for the followers that have caught
            up.
        lock: The lock of the data folder, if the caller has locked it.
        listeners: Open listeners by name, `TCP`, `HTTP` and `HTTPS`, instead of those of the options. They stay open.
        siblings: Makes the broker a process of a node: it accepts clients of the shared ports, too.
        task_status: Receives the bound addresses once clients can connect; those of a leader, once they also find it by
            discovery services that answer.

    Raises:
        StartupError: The broker cannot start; the text is for the operator.
        RuntimeError: The caller is not a trio task.
    """
    require_trio("trio_nsq.broker.serve")
    if not has_gil():
        # Threads read attributes, tuples and dicts that the event loop changes: docs/decisions/0005.
        logger.warning("this Python runs without the GIL, which the broker relies on: set PYTHON_GIL=1")
    archiving: Archiving | None = None
    if replication is not None:
        files = replication.files
    else:
        refuse_member_folder(options.data_path)
        refuse_node_folder(options.data_path)
        if options.restore_from:
            await trio.to_thread.run_sync(_restore, options)
    if options.archive:
        archiving = await trio.to_thread.run_sync(_open_archive, options, replication)
        files = archiving.files
    folder = DataFolder(options.data_path, files, lock)
    use_own_threads()
    try:
        async with trio.open_nursery() as nursery:
            workers = await nursery.start(_host_workers)
            try:
                await _serve_folder(
                    options,
                    folder,
                    workers,
                    reloads,
                    drains,
                    trusted,
                    replication,
                    archiving,
                    listeners,
                    siblings,
                    task_status,
                )
            finally:
                workers.cancel_scope.cancel()
    except* StartupError as group:
        raise _first(group) from None
    finally:
        folder.close()


def _restore(options: BrokerOptions) -> None:
    """Restore the data folder, unless it is there. Raises StartupError."""
    from ..archive.restore import shown_time  # slow to import
    from .restoring import begins_archive, has_data, restore_folder

    if has_data(options.data_path):
        logger.info("--restore-from: %s is not empty, and is used as it is", options.data_path)
        return
    try:
        if begins_archive(options):
            logger.info("--restore-from: there is no archive yet, and this broker begins it")
            return
        logger.info("restoring %s from its archive", options.data_path)
        point, damage = restore_folder(options.restore_from, options.data_path)
    except StartupError:
        raise
    except (NSQError, OSError) as exc:
        raise StartupError(f"--restore-from: {exc}") from exc
    for what in damage:
        logger.error("%s", what)
    logger.info("restored the state of %s", shown_time(point.time_ms))


def _open_archive(options: BrokerOptions, replication: "Replication | None") -> "Archiving":
    from .archiving import Archiving  # slow to import

    return Archiving(options, replication)


async def _host_workers(*, task_status: trio.TaskStatus[trio.Nursery]) -> None:
    """Host a nursery that outlives the cancellation of `serve`, for the graceful stop. `serve` cancels it."""
    with trio.CancelScope(shield=True):
        async with trio.open_nursery() as workers:
            task_status.started(workers)
            await trio.sleep_forever()


async def _serve_folder(
    options: BrokerOptions,
    folder: DataFolder,
    workers: trio.Nursery,
    reloads: AsyncIterable[object] | None,
    drains: AsyncIterable[object] | None,
    trusted: Mapping[str, Identity] | None,
    replication: "Replication | None",
    archiving: "Archiving | None",
    listeners: Mapping[str, Listening] | None,
    siblings: "Siblings | None",
    task_status: trio.TaskStatus[BoundAddresses],
) -> None:
    tls_context = _tls_context(options)
    audit = AuditWriter(options.audit_log)
    authentication = Authentication(
        options.auth_file,
        AuthClient(options) if options.auth_http_addresses else None,
        verifies_clients=options.tls.verifies_clients,
        audit=audit.log,
        trusted=trusted,
    )
    server = Server(
        options, folder, workers, tls_context=tls_context, authentication=authentication, audit=audit,
        replication=replication, archiving=archiving,
    )  # fmt: skip
    _log_start(server)
    if archiving is not None:
        workers.start_soon(archiving.run)
    opened: dict[str, Listening] = {}  # filled while listeners open, so that a failure closes those before
    try:
        if listeners is None:
            await listen_at(options, opened)
        else:
            for name, listening in listeners.items():
                opened[name] = listening.duplicate()  # trio closes those that it serves
        addresses = {name: listening.address for name, listening in opened.items()}
        bound = BoundAddresses(addresses["TCP"], addresses.get("HTTP"), addresses.get("HTTPS"))
        wrong = server.session_deps.wrong_ports
        wrong.tcp, wrong.http, wrong.https = bound.tcp_address, bound.http_address, bound.https_address
        for job in server.jobs:
            workers.start_soon(_keep_running, job, name=job)
        if options.statsd_address:
            prefix = Broadcast.of(options, bound).statsd_prefix(options.statsd_prefix)
            push = StatsdClient(server, prefix).push_on_schedule
            workers.start_soon(_keep_running, push, name=push)
        lookup = server.topics.lookup = _lookup_registration(server, bound)
        http_server = HTTPServer(server, bound)
        # A client that a follower passes on over TLS needs three descriptors.
        descriptors = 3 if replication is not None and tls_context is not None else 1
        ports = len(opened) + (siblings.more_ports if siblings is not None else 0)
        most = connection_limit(options.max_connections, ports * descriptors)
        server.admissions = {
            "TCP": Admission("TCP", most, server.sessions.handle, tcp_refusal(most)),
            "HTTP": Admission("HTTP", most, http_server.handle_http, http_refusal(most)),
            "HTTPS": Admission("HTTPS", most, http_server.handle_https, https_refusal()),
        }
        accept = partial(trio.serve_listeners, handler_nursery=workers)
        is_open = authentication.access.is_open and not requires_certificate(options.tls_client_auth_policy)
        async with trio.open_nursery() as accepting:
            for name, listening in opened.items():
                admission = server.admissions[name]
                if name == "TCP":
                    serve_client = partial(admission.begin, server.sessions.begin, workers)
                    accepting.start_soon(accept_clients, serve_client, listening.listeners, server.poller)
                else:
                    accepting.start_soon(accept, admission.handle, listening.listeners)
                logger.info("%s: listening on %s", name, listening.address)
                if is_open and is_exposed(listening.address):
                    words = "%s: every client that reaches %s may do everything: see --auth-file"
                    logger.warning(words, name, listening.address)
            if siblings is not None:
                from .node.serving import NodeServing  # here, because most brokers are one process

                accepting.start_soon(NodeServing(siblings, server, http_server, most).run, workers)
            accepting.start_soon(http_server.hosts.learn_own_name)
            run = lookup.run  # here, so that a stop unregisters before clients are closed
            accepting.start_soon(_keep_running, run, name=run)
            if replication is not None:
                for host, port in _http_addresses(replication.former):
                    job = partial(lookup.retire, host, port)
                    accepting.start_soon(_keep_running, job, name=lookup.retire)
            if reloads is not None:
                steps = (
                    audit.reopen,
                    partial(authentication.reload, server),
                    partial(_reload_certificate, server),
                    partial(_reload_lookup_tls, options, lookup),
                )
                accepting.start_soon(partial(reload_on_request, reloads, *steps, logger=logger))
            if drains is not None:
                begin = partial(server.drain_mode.begin_on_request, drains)
                accepting.start_soon(_keep_running, begin, name=begin)
            if replication is not None:
                # The caller then ends the connections to the former leader, whose clients look for this one.
                with trio.move_on_after(_ANNOUNCE_S):
                    await lookup.until_announced()
            task_status.started(bound)
    finally:
        for name, listening in opened.items():
            logger.info("%s: closing %s", name, listening.address)
            listening.close()
        with trio.CancelScope(shield=True):
            await server.stop()
            if archiving is not None:
                await archiving.stop()
            await authentication.aclose()
            await audit.aclose()
        logger.info("NSQ: bye")


async def listen_at(options: BrokerOptions, opened: dict[str, Listening]) -> dict[str, Listening]:
    """Open the listeners of a broker, by name, and return them.

    Args:
        opened: Gets each one, for the caller to close, also if the next one fails.

    Raises:
        StartupError: An address cannot be used.
    """
    opened["TCP"] = await listen("--tcp-address", options.tcp_address)
    if options.http_address:
        opened["HTTP"] = await listen("--http-address", options.http_address)
    if options.tls.is_used and options.https_address:
        opened["HTTPS"] = await listen("--https-address", options.https_address)
    return opened


async def _reload_certificate(server: Server) -> None:
    if server.session_deps.tls_context is not None:
        server.session_deps.tls_context = await trio.to_thread.run_sync(_tls_context, server.options)
        logger.info("reload: read the certificate %s and its key", server.options.tls_cert)


async def _keep_running(job: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a job until it is cancelled. If it fails (a bug in the broker), log that and start it again."""
    while True:
        try:
            await job()
            return
        except Exception:
            logger.exception("a task of the broker failed; it restarts in %g s", _RESTART_S)
        await trio.sleep(_RESTART_S)


def _log_start(server: Server) -> None:
    """Log the version and the topics found. Recovery has already logged damage."""
    logger.info("trio-nsq v%s (Python %s)", __version__, platform.python_version())
    logger.info("ID: %d", server.node_id)
    channels = messages = 0
    for topic in server.broker.topics.values():
        stored = topic.log.next_sequence - topic.log.first_sequence
        logger.info(
            "TOPIC(%s): found, %s in its log, %s",
            topic.name, count_of(stored, "message"), count_of(len(topic.channels), "channel"),
        )  # fmt: skip
        channels += len(topic.channels)
        messages += stored
    logger.info(
        "NSQ: found %s, %s, %s",
        count_of(len(server.broker.topics), "topic"), count_of(channels, "channel"), count_of(messages, "message"),
    )  # fmt: skip


def _tls_context(options: BrokerOptions) -> "ServerContext | None":
    if not options.tls.is_used:
        return None  # before the import below, which is slow
    from ..tls.context import server_context

    return server_context(options.tls)


def _lookup_registration(server: Server, bound: BoundAddresses) -> LookupRegistration:
    options = server.options
    broadcast = Broadcast.reachable(options, bound)
    try:
        registration = LookupRegistration(
            server.broker.topics,
            PeerInfo(
                broadcast_address=broadcast.address,
                hostname=socket.gethostname(),
                http_port=broadcast.http_port,
                tcp_port=broadcast.tcp_port,
                version=__version__,
                cluster=server.replication.leadership if server.replication is not None else None,
            ),
            options.nsqlookupd_tcp_addresses,
            connect_timeout_s=options.http_client_connect_timeout_ms / 1000,
            request_timeout_s=options.http_client_request_timeout_ms / 1000,
            tls=_lookup_tls(options) if options.lookupd_tls else None,
            secret=secret_in("--lookupd-auth-secret-file", options.lookupd_auth_secret_file),
        )
    except ValueError as exc:
        raise StartupError(f"--lookupd-tcp-address: {exc}") from exc
    server.broker.on_names_changed = registration.changed
    return registration


def _http_addresses(urls: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield the host and port of each URL of http: brokers register this port."""
    for url in urls:
        with suppress(ValueError):
            parsed = URL.parse(url)
            if parsed.scheme == "http":
                yield parsed.host, parsed.port


def _lookup_tls(options: BrokerOptions) -> ssl.SSLContext:
    return client_context(options.tls, with_certificate=True)


async def _reload_lookup_tls(options: BrokerOptions, lookup: LookupRegistration) -> None:
    if options.lookupd_tls:
        lookup.use_tls(await trio.to_thread.run_sync(_lookup_tls, options))
        logger.info("reload: read the CAs and the certificate for discovery services")


def _first(group: BaseExceptionGroup[StartupError]) -> StartupError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
