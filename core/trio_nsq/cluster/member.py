"""Runs a broker as a member of a cluster: as a follower until it is elected, then as the leader until it is no longer.

The listeners stay open all the time. A follower passes clients on to the leader.
"""

import logging
import os
import ssl
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Final

import trio

from ..access.policy import Identity
from ..access.secret import Secret
from ..broker.addresses import BoundAddresses, Broadcast
from ..broker.options import BrokerOptions
from ..broker.restoring import same_place
from ..broker.serve import listen_at, serve
from ..broker.storage.data_folder import BROKER_COPY_FILE, BROKER_FILE, FolderLock
from ..coordination.interface import Coordinator, CoordinatorError
from ..coordination.opening import open_coordinator
from ..coordination.state import StateError
from ..log import Files
from ..platform.requirements import require_trio
from ..protocol.address import format_address, is_unix_path
from ..protocol.errors import StartupError, leaves_of
from ..replication.inventory import RECORD_BYTES
from ..replication.stream import FormerOperations
from ..server.listening import Listening, port_of
from ..server.reloading import reload_on_request
from ..server.startup_checks import secret_in
from ..tls.client import client_context
from .context import MemberContext
from .follower_api import FollowerAPI
from .following import Following, link_url
from .front import FollowerFront, LeaderTarget
from .leading import Leading
from .membership import membership_of
from .options import ClusterOptions

logger: logging.Logger = logging.getLogger("trio_nsq.cluster")

_HOOK_S: Final = 60.0


async def serve_member(
    options: BrokerOptions,
    *,
    cluster: ClusterOptions,
    reloads: AsyncIterable[object] | None = None,
    drains: AsyncIterable[object] | None = None,
    trusted: Mapping[str, Identity] | None = None,
    task_status: trio.TaskStatus[BoundAddresses] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a member of a cluster until cancelled. Other arguments are those of `serve`.

    A leader that is cancelled stops its broker, and lets another member lead.

    Args:
        task_status: Receives the bound addresses once clients can connect. They wait until there is a leader.

    Raises:
        StartupError: The member cannot start, or cannot lead; the text is for the operator.
    """
    require_trio("trio_nsq.cluster.serve_member")
    check_addresses(options)
    check_restore(options, cluster)
    with ExitStack() as stack:
        coordinator = open_engine(options, cluster)
        stack.callback(coordinator.close)
        lock = FolderLock(options.data_path)
        stack.callback(lock.close)
        membership, is_saved = membership_of(Files(), options.data_path, cluster.cluster)
        opened: dict[str, Listening] = {}
        stack.callback(_close_all, opened)
        listeners = await listen_at(options, opened)
        context = MemberContext(
            cluster,
            coordinator,
            Files(),
            options.data_path,
            membership,
            is_saved=is_saved,
            addresses=addresses_of(options, listeners),
            record_bytes=max(RECORD_BYTES, 2 * options.limits.max_body_size, 2 * options.limits.max_msg_size),
            secret=link_secret(options, cluster),
            tls=link_tls(options, cluster),
        )
        member = Member(options, context, lock, listeners, trusted)
        try:
            await member.run(reloads, drains, task_status)
        except* StartupError as group:
            raise leaves_of(group)[0] from None


class Member:
    """A member that was started; see `serve_member`.

    Args:
        context: The member.
        lock: Of its data folder.
        listeners: The open listeners, by name as in `serve`.
    """

    def __init__(
        self,
        options: BrokerOptions,
        context: MemberContext,
        lock: FolderLock,
        listeners: Mapping[str, Listening],
        trusted: Mapping[str, Identity] | None,
    ) -> None:
        self._options = options
        self._context = context
        self._lock = lock
        self._listeners = listeners
        self._trusted = trusted
        self._is_ready = False
        addresses = {name: listening.address for name, listening in listeners.items()}
        self._bound = BoundAddresses(addresses["TCP"], addresses.get("HTTP"), addresses.get("HTTPS"))
        self._api = FollowerAPI(options, context, self._bound, trusted)
        self._front = FollowerFront(
            self._api.router,
            secret=context.secret,
            tls=context.tls,
            max_connections=options.max_connections,
            listeners=len(listeners),
            guard=self._api.guard,
        )
        self._api.front = self._front

    async def run(
        self,
        reloads: AsyncIterable[object] | None,
        drains: AsyncIterable[object] | None,
        task_status: trio.TaskStatus[BoundAddresses],
    ) -> None:
        """Follow and lead in turn, until cancelled."""
        membership = self._context.membership
        logger.info(
            "cluster %s: this is the member %s, coordinator %s",
            *(membership.cluster, membership.folder, self._context.coordinator.shown),
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._api.run)
            nursery.start_soon(self._context.measure)
            passed = {
                "reloads": await nursery.start(_pass_on, reloads, self._reload_tls),
                "drains": await nursery.start(_pass_on, drains, trio.lowlevel.checkpoint),
            }
            while True:
                elected = await self._follow(nursery, passed["reloads"], task_status)
                await self._lead(nursery, *elected, passed)

    async def _follow(
        self,
        hooks: trio.Nursery,
        reloads: AsyncIterable[object],
        task_status: trio.TaskStatus[BoundAddresses],
    ) -> tuple[int, FormerOperations | None]:
        """Follow until this member is elected; returns the arguments of `Leading`."""
        following = self._api.following = Following(self._context, self._front)
        self._run_hook(hooks, self._context.options.on_follower, "follower")
        async with trio.open_nursery() as nursery:
            for name, listening in self._listeners.items():
                handler = self._front.admissions[name].handle
                accept = partial(trio.serve_listeners, handler_nursery=hooks)
                nursery.start_soon(accept, handler, listening.duplicate().listeners)
            nursery.start_soon(partial(reload_on_request, reloads, self._api.reload, logger=logger))
            if not self._is_ready:
                nursery.start_soon(self._report_ready, following, task_status)
            epoch = await following.run()
            await self._report_ready(following, task_status)
            nursery.cancel_scope.cancel()
        return epoch, following.operations

    async def _report_ready(self, following: Following, task_status: trio.TaskStatus[BoundAddresses]) -> None:
        """Say once that clients can connect, when it is known that the folder may take part."""
        await following.is_admitted.wait()
        if not self._is_ready:
            self._is_ready = True
            task_status.started(self._bound)

    async def _lead(
        self,
        hooks: trio.Nursery,
        epoch: int,
        operations: FormerOperations | None,
        passed: Mapping[str, AsyncIterable[object]],
    ) -> None:
        leading = Leading(self._context, epoch, operations)
        if operations is not None:
            # These were changed when the folder was made ready; followers that go on have to change them, too.
            for name in (BROKER_FILE, BROKER_COPY_FILE):
                leading.replication.files.record_content(self._context.path / name)
        itself = own_target(self._context, epoch)
        self._front.lead_to(itself)
        logger.info("this member leads the cluster: epoch %d", epoch)

        async def serve_broker() -> None:
            async with trio.open_nursery() as nursery:
                await nursery.start(
                    partial(
                        serve,
                        self._options,
                        reloads=passed["reloads"],
                        drains=passed["drains"],
                        trusted=self._trusted,
                        replication=leading.replication,
                        listeners=self._listeners,
                        lock=self._lock,
                    )
                )
                leading.has_served = True
                self._context.end_keeping()
                # Now: clients of the former leader that look for a broker find this one.
                self._front.end_forwarded(itself)
                self._run_hook(hooks, self._context.options.on_leader, "leader")

        await leading.run(serve_broker)
        self._front.lead_to(None)

    async def _reload_tls(self) -> None:
        """Read the CAs and the certificate for connections to other members again."""
        context = self._context
        if context.tls is not None:
            try:
                context.tls = self._front.tls = await trio.to_thread.run_sync(
                    link_tls, self._options, context.options
                )
            except StartupError as exc:
                logger.error("reload: %s; the previous files stay in use", exc)

    def _run_hook(self, nursery: trio.Nursery, command: str, role: str) -> None:
        if command:
            nursery.start_soon(self._hook, command, role)

    async def _hook(self, command: str, role: str) -> None:
        """Run a command of the operator; its failure is logged."""
        membership = self._context.membership
        about = {
            "QCLI_CLUSTER_NAME": membership.cluster,
            "QCLI_CLUSTER_MEMBER": membership.folder,
            "QCLI_CLUSTER_EPOCH": str(membership.epoch),
            "QCLI_CLUSTER_ROLE": role,
        }
        try:
            with trio.move_on_after(_HOOK_S) as limit:
                done = await trio.run_process(
                    command, shell=True, check=False, stdin=b"", env={**os.environ, **about}
                )
                if done.returncode:
                    logger.error("--on-%s: the command has failed with exit code %d", role, done.returncode)
            if limit.cancelled_caught:
                logger.error("--on-%s: the command was ended after %g s", role, _HOOK_S)
        except OSError as exc:
            logger.error("--on-%s: the command cannot be run: %s", role, exc.strerror)


def own_target(context: MemberContext, epoch: int) -> LeaderTarget | None:
    """Return this member as the leader, for clients that wait here: they are passed on to its own port."""
    url = link_url(context, context.addresses)
    return None if url is None else LeaderTarget(context.folder, epoch, url)


def _close_all(opened: Mapping[str, Listening]) -> None:
    for listening in opened.values():
        listening.close()


async def _pass_on(
    source: AsyncIterable[object] | None,
    first: Callable[[], Awaitable[None]],
    *,
    task_status: trio.TaskStatus[AsyncIterable[object]],
) -> None:
    """Pass items on, after a step of one's own, so that their next receiver can be another one."""
    send, receive = trio.open_memory_channel[object](1)
    async with send, receive:
        task_status.started(receive)
        if source is None:
            await trio.sleep_forever()
        else:
            async for item in source:
                await first()
                await send.send(item)
        await trio.sleep_forever()


# ---------------------------------------------------------------------- what a start needs


def check_addresses(options: BrokerOptions) -> None:
    """Raise StartupError if other members cannot reach this one."""
    if is_unix_path(options.tcp_address):
        raise StartupError(
            "--tcp-address: a member of a cluster needs a port: other members pass clients on to it"
        )
    if not options.http_address or is_unix_path(options.http_address):
        raise StartupError(
            "--http-address: a member of a cluster needs a port for HTTP, where it answers about itself also without a "
            "leader; with --cluster-tls, it may be on 127.0.0.1"
        )


def check_restore(options: BrokerOptions, cluster: ClusterOptions) -> None:
    """Raise StartupError if a member cannot be restored from the archive that is given."""
    if not cluster.restore_from:
        return
    if not options.archive or not same_place(cluster.restore_from, options.archive):
        raise StartupError(
            "--restore-from: a member of a cluster is restored from the archive that the leader writes: give the same "
            "URL with --archive. To begin a cluster with another one: qcli archive restore"
        )
    if cluster.coordinator.lower().startswith("static:"):
        raise StartupError(
            "--restore-from: with --coordinator static:, no member leads by itself: use 'qcli archive restore'"
        )


def addresses_of(options: BrokerOptions, listeners: Mapping[str, Listening]) -> tuple[str, ...]:
    """Return where a member is reached, as URLs."""
    bound = {name: listening.address for name, listening in listeners.items()}
    addresses = BoundAddresses(bound["TCP"], bound.get("HTTP"), bound.get("HTTPS"))
    broadcast = Broadcast.reachable(options, addresses)
    ports = {
        "tcp": broadcast.tcp_port,
        "http": broadcast.http_port,
        "https": port_of(bound.get("HTTPS")) or 0,
    }
    return tuple(
        f"{scheme}://{format_address(broadcast.address, port)}" for scheme, port in ports.items() if port
    )


def open_engine(options: BrokerOptions, cluster: ClusterOptions) -> Coordinator:
    """Return the coordinator; no request is made yet. Raises StartupError."""
    try:
        return open_coordinator(
            cluster.coordinator,
            cluster.cluster,
            options.data_path,
            password=Secret(file=cluster.coordinator_password_file),
            tls=client_context(options.tls, with_certificate=True)
            if cluster.coordinator.lower().startswith("etcds:")
            else None,
        )
    except StateError as exc:
        raise StartupError(f"--cluster: {exc}") from exc
    except CoordinatorError as exc:
        raise StartupError(f"--coordinator: {exc}") from exc


def link_secret(options: BrokerOptions, cluster: ClusterOptions) -> Secret:
    """Return the token for other members. Raises StartupError: its file cannot be used, or is not given."""
    if cluster.cluster_auth_secret_file is None and (options.auth_file or options.auth_http_addresses):
        raise StartupError(
            "--cluster-auth-secret-file: the members require tokens, so each needs one of the role replicate for the "
            "others: qcli token create --role replicate"
        )
    return secret_in("--cluster-auth-secret-file", cluster.cluster_auth_secret_file)


def link_tls(options: BrokerOptions, cluster: ClusterOptions) -> ssl.SSLContext | None:
    """Return how other members are verified; None: connections to them are in plain text. Raises StartupError."""
    if not cluster.cluster_tls:
        return None
    if not options.tls.is_used or not options.https_address:
        raise StartupError(
            "--cluster-tls: a member needs HTTPS: give --tls-cert, --tls-key and --https-address"
        )
    return client_context(options.tls, with_certificate=True)
