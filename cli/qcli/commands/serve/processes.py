"""`qcli serve --processes`: several brokers behind one TCP port and one HTTP address."""

import gc
import logging
import os
import secrets
import signal
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import trio

from trio_nsq.broker import BrokerOptions
from trio_nsq.broker.node.new_folders import make_new_folders
from trio_nsq.broker.node.supervisor import READY, Supervisor
from trio_nsq.broker.server import default_node_id
from trio_nsq.broker.siblings import Counts, Kind, Siblings
from trio_nsq.broker.storage.data_folder import (
    BROKER_FILE,
    has_file,
    refuse_member_folder,
    refuse_nsqd_folder,
)
from trio_nsq.broker.storage.process_folders import FOLDER, folder_of, folders_in
from trio_nsq.lookup.service.options import LookupdOptions
from trio_nsq.protocol.address import is_unix_path, next_port
from trio_nsq.protocol.errors import StartupError
from trio_nsq.server.listening import Listening, listen, port_of
from trio_nsq.server.startup_checks import problems_of

from ...framework.daemon.log_format import LIBRARY, log_to_stderr
from ...framework.daemon.run import (
    alive_interval_s,
    notify_alive,
    notify_ready,
    notify_reloading,
    notify_stopping,
    write_addresses,
)
from ...framework.daemon.setting import LOG_LEVELS
from ...framework.errors import ExitCode, Failure

FLAG = "--processes"
AUTO = "auto"
_MOST = 256
_PORTS: dict[Kind, int] = {"TCP": 0, "HTTP": 1, "HTTPS": 2}
"""The ports of a process, after its first."""
_NODE_IDS = 1024


@dataclass(frozen=True, slots=True)
class NodeAddresses:
    """The addresses of a node.

    Attributes:
        tcp_address, http_address, https_address: The shared ones.
        processes: Those of each process.
        lookupd_tcp_address, lookupd_http_address: Those of the discovery service; empty: it runs none.
    """

    tcp_address: str
    http_address: str | None
    https_address: str | None
    processes: list[dict[str, str | None]]
    lookupd_tcp_address: str = ""
    lookupd_http_address: str = ""


@dataclass(frozen=True, slots=True)
class BrokerProcess:
    """What a process of the node is that runs a broker."""

    siblings: Siblings
    options: BrokerOptions

    def tell_ready(self) -> None:
        """Tell the supervisor that this process serves clients."""
        _tell_ready(self.siblings.counts, self.siblings.index)


@dataclass(frozen=True, slots=True)
class LookupdProcess:
    """What a process of the node is that runs the discovery service."""

    options: LookupdOptions
    listeners: dict[str, Listening]
    counts: Counts
    index: int

    def tell_ready(self) -> None:
        """Tell the supervisor that this process serves clients."""
        _tell_ready(self.counts, self.index)


def _tell_ready(counts: Counts, index: int) -> None:
    counts.set_ready(index)
    os.kill(os.getppid(), READY)


def check_possible(options: BrokerOptions, values: dict[str, Any]) -> None:
    """Raises Failure: an option has no meaning for several processes, or would do something else."""
    if values["cluster"]:
        raise Failure(f"{FLAG} does not go with --cluster: run each member as a process of its own.")
    if values["admin"]:
        raise Failure(
            f"{FLAG} does not go with --admin: run 'qcli admin' with the addresses of the processes."
        )
    if values["restore_from"]:
        raise Failure(
            f"{FLAG} does not go with --restore-from: restore the folder of each process with 'qcli archive restore'."
        )
    if values["with_lookupd"] and options.auth_file is not None and options.lookupd_auth_secret_file is None:
        raise Failure(
            "--with-lookupd needs --lookupd-auth-secret-file, because --auth-file is also for the discovery service: a "
            "token with the role register."
        )
    if options.broadcast_tcp_port or options.broadcast_http_port:
        raise Failure(f"{FLAG} does not go with --broadcast-tcp-port: each process has a port of its own.")
    if options.statsd_address and "%s" not in options.statsd_prefix:
        raise Failure(f"{FLAG} needs %s in --statsd-prefix: otherwise all processes send the same names.")


def number_of_processes(wanted: str, data_path: Path) -> int:
    """Return how many processes to run. Raises Failure: the folder has those of more, or of more than a node has."""
    found = folders_in(data_path)
    needed = found[-1] + 1 if found else 0
    if needed > _MOST:
        raise Failure(
            f"{FLAG}: a node has at most {_MOST} processes, and {folder_of(data_path, found[-1])} has the name of the "
            "folder of one more. Rename it."
        )
    if wanted == AUTO:
        return max(needed, min(_MOST, len(os.sched_getaffinity(0))))
    count = int(wanted)
    if count < needed:
        raise Failure(
            f"{FLAG}: {data_path} has the folders of {needed} processes, more than {count}. Start {needed}, move the "
            f"messages of process {needed - 1} with 'qcli drain --move-to', stop, and remove its folder, "
            f"{folder_of(data_path, needed - 1)}."
        )
    return count


def node_problems(options: BrokerOptions, values: dict[str, Any]) -> list[str]:
    """Return why the processes could not start, for `--check-config`. Raises Failure, as `run_processes`."""
    check_possible(options, values)
    number_of_processes(values["processes"], options.data_path)
    return problems_of([partial(check_folder, options.data_path)])


def check_folder(data_path: Path) -> None:
    """Raises StartupError: the folder is not that of a node."""
    refuse_member_folder(data_path)
    if has_file(data_path, BROKER_FILE):
        raise StartupError(
            f"--data-path: {data_path} has the messages of a single broker. To make it process 0 of a node, move "
            f"all its files into {folder_of(data_path, 0)}"
        )


def run_processes(ctx: click.Context, options: BrokerOptions) -> BrokerProcess | LookupdProcess | ExitCode:
    """Run the processes of a node.

    Returns:
        In each process, at once, what it is. In the supervisor, when all have ended, the exit code.

    Raises:
        Failure, StartupError: The node cannot start.
    """
    values = ctx.params
    check_possible(options, values)
    count = number_of_processes(values["processes"], options.data_path)
    check_folder(options.data_path)
    refuse_nsqd_folder(options.data_path)  # `--check-config` checks it for all brokers
    with suppress(FileExistsError):
        try:
            options.data_path.mkdir(mode=0o700)
        except FileNotFoundError:
            raise StartupError(f"--data-path: the folder {options.data_path.parent} does not exist") from None
    log_line = log_to_stderr(LOG_LEVELS[values["log_level"]], values["log_prefix"], values["log_format"])
    node = _Node(options, count, values, log_line)
    with node:
        trio.run(node.open)
        make_new_folders(options.data_path, count)
        supervisor = Supervisor(node.names, count, node, alive_interval_s())
        gc.freeze()  # collections in the processes would copy what they share
        index = supervisor.run()
        if index is not None:
            logging.getLogger(LIBRARY).handlers.clear()  # the process adds its own
            ctx.params["address_file"] = None
            ctx.params["log_prefix"] = f"{values['log_prefix']}{node.names[index]}: "
            return node.role(index)
    if supervisor.stopped_by is not None:
        is_interrupt = supervisor.stopped_by == signal.SIGINT
        return ExitCode.INTERRUPTED if is_interrupt else ExitCode.TERMINATED
    return next((code for code in ExitCode if code == supervisor.code), ExitCode.FAILURE)


class _Node:
    """The listeners of a node, and what its supervisor tells."""

    def __init__(self, options: BrokerOptions, count: int, values: dict[str, Any], log_line: Any) -> None:
        self._lookupd_address: str = values["with_lookupd"] or ""
        self.names = [f"process {index}" for index in range(count)] + ["lookupd"] * bool(
            self._lookupd_address
        )
        self._options = options
        self._count = count
        self._lookupd: dict[str, Listening] = {}
        self._first_port: int = values["process_ports"]
        self._address_file: Path | None = values["address_file"]
        self._log_line = log_line
        self._counts = Counts(len(self.names))
        self._instance = secrets.token_hex(8)
        self._shared: dict[Kind, Listening] = {}
        self._own: list[dict[Kind, Listening]] = [{} for _ in range(count)]
        self._internal: list[dict[Kind, Listening]] = [{} for _ in range(count)]
        self._folder = -1
        self._status = ""
        self._is_supervisor = True

    def __enter__(self) -> None:
        if self._address_file is not None:
            self._address_file.unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        if not self._is_supervisor:
            return
        trio.run(self._close)
        if self._address_file is not None:
            self._address_file.unlink(missing_ok=True)

    async def _close(self) -> None:
        for group in (self._shared, *self._own, *self._internal):
            for listening in group.values():
                listening.close()
        for listening in self._lookupd.values():
            listening.close()

    async def open(self) -> None:
        """Open all listeners. Raises StartupError."""
        options = self._options
        addresses: dict[Kind, str] = {"TCP": options.tcp_address}
        if options.http_address:
            addresses["HTTP"] = options.http_address
        if options.tls.is_used and options.https_address:
            addresses["HTTPS"] = options.https_address
        for kind, address in addresses.items():
            self._shared[kind] = await listen(f"--{kind.lower()}-address", address)
        for index in range(self._count):
            for kind, address in addresses.items():
                port = self._first_port and self._first_port + len(_PORTS) * index + _PORTS[kind]
                host = "127.0.0.1" if is_unix_path(address) else address.rpartition(":")[0]
                self._own[index][kind] = await listen("--process-ports", f"{host}:{port}")
        if self._lookupd_address:
            # Here, so that no process tries to connect before it listens.
            self._lookupd["TCP"] = await listen("--with-lookupd", self._lookupd_address)
            has_any_port = self._lookupd_address.endswith(":0")
            following = self._lookupd_address if has_any_port else next_port(self._lookupd_address)
            self._lookupd["HTTP"] = await listen("--with-lookupd", following)
        # By the descriptor of the folder: the path of a unix socket has at most 107 bytes.
        self._folder = os.open(options.data_path, os.O_RDONLY | os.O_DIRECTORY)
        internal: tuple[Kind, ...] = ("TCP", "HTTP")
        for index in range(self._count):
            for kind in internal:
                path = f"/proc/self/fd/{self._folder}/.process-{index}-{kind.lower()}"
                before = os.umask(0o177)
                try:
                    self._internal[index][kind] = await listen("--data-path", path)
                finally:
                    os.umask(before)

    def role(self, index: int) -> BrokerProcess | LookupdProcess:
        """In a process: return what it is."""
        self._is_supervisor = False
        if index == self._count:
            return LookupdProcess(self._lookupd_options, self._lookupd, self._counts, index)
        self._counts.begin(index)
        siblings = Siblings(
            index,
            self._instance,
            self._shared,
            {str(kind): listening for kind, listening in self._own[index].items()},
            self._internal[index],
            [own["TCP"].address for own in self._own],
            [own["HTTP"].address if "HTTP" in own else "" for own in self._own],
            [internal["TCP"].address for internal in self._internal],
            [internal["HTTP"].address for internal in self._internal],
            self._counts,
        )
        options = self._options
        first_id = default_node_id() if options.node_id is None else options.node_id
        lookupds = options.nsqlookupd_tcp_addresses
        if self._lookupd:
            lookupds = (*lookupds, _from_here(self._lookupd_options.tcp_address))
        return BrokerProcess(
            siblings,
            replace(
                options,
                data_path=folder_of(options.data_path, index),
                tcp_address=self._own[index]["TCP"].address,
                http_address=self._own[index]["HTTP"].address if "HTTP" in self._own[index] else "",
                node_id=(first_id + index) % _NODE_IDS,
                nsqlookupd_tcp_addresses=lookupds,
                archive=archive_of(options.archive, index),
            ),
        )

    @property
    def _lookupd_options(self) -> LookupdOptions:
        """The options of the discovery service: the host that was given, and the ports that it has."""
        options, host = self._options, self._lookupd_address.rpartition(":")[0]
        tcp, http = (f"{host}:{port_of(self._lookupd[kind].address)}" for kind in ("TCP", "HTTP"))
        return LookupdOptions(
            tcp_address=tcp,
            http_address=http,
            broadcast_address=options.broadcast_address,
            max_connections=options.max_connections,
            tls_cert=options.tls_cert,
            tls_key=options.tls_key,
            tls_client_auth_policy=options.tls_client_auth_policy,
            tls_root_ca_file=options.tls_root_ca_file,
            auth_file=options.auth_file,
            http_allowed_hosts=options.http_allowed_hosts,
        )

    # ------------------------------------------------------------------ for the supervisor

    def is_ready(self, index: int) -> bool:
        """Whether a process serves clients."""
        return self._counts.is_ready(index)

    def ended(self, index: int) -> None:
        """A process has ended."""
        self._counts.end(index)

    def all_ready(self) -> None:
        """Write the addresses, and say that the node is ready."""
        shared = {kind: listening.address for kind, listening in self._shared.items()}
        bound = NodeAddresses(
            shared["TCP"],
            shared.get("HTTP"),
            shared.get("HTTPS"),
            [{f"{kind.lower()}_address": each.address for kind, each in own.items()} for own in self._own],
            self._lookupd_options.tcp_address if self._lookupd else "",
            self._lookupd_options.http_address if self._lookupd else "",
        )
        if self._address_file is not None:
            write_addresses(self._address_file, bound)
        self._status = f"tcp {bound.tcp_address}, http {bound.http_address or 'off'}"
        if bound.https_address:
            self._status += f", https {bound.https_address}"
        if bound.lookupd_tcp_address:
            self._status += f", lookupd {bound.lookupd_tcp_address}"
        self._status += f", {self._count} processes, data {self._options.data_path}"
        self._log_line(f"ready: {self._status}")
        notify_ready(self._status)

    def reloading(self) -> None:
        """Tell the service manager."""
        if self._status:
            notify_reloading()
            notify_ready(self._status)

    def stopping(self) -> None:
        """Tell the service manager."""
        notify_stopping()

    def alive(self) -> None:
        """Tell the service manager."""
        notify_alive()


def archive_of(archive: str, index: int) -> str:
    """Return where a process archives: a folder of the node's place, which may be a URL with options."""
    place, mark, more = archive.partition("?") if "://" in archive else (archive, "", "")
    return f"{place.rstrip('/')}/{FOLDER}{index}{mark}{more}" if archive else ""


def _from_here(address: str) -> str:
    """Return where a process of this machine connects to a service that listens at this address."""
    return f"127.0.0.1{address}" if address.startswith(":") else address
