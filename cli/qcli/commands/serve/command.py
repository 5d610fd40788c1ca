"""`qcli serve`: the broker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...framework.daemon.checking import CHECK_CONFIG, check_config
from ...framework.daemon.config_file import CONFIG
from ...framework.errors import ExitCode, Failure
from ...framework.go_flags import GoFlagsCommand
from ...framework.options import version_option
from .settings import SETTINGS, broker_options, cluster_options

if TYPE_CHECKING:
    from trio_nsq.broker import BoundAddresses

_NEEDS_ADMIN = "--admin-config needs --admin"


@click.command(
    "serve",
    cls=GoFlagsCommand,
    params=[CONFIG, CHECK_CONFIG, *SETTINGS],
    short_help="Run a broker.",
    examples={
        "run it on this machine only, with its messages in ./data": "qcli serve --data-path ./data",
        "serve the whole network, on nsqd's ports": "qcli serve --data-path /var/lib/nsq --tcp-address "
        "0.0.0.0:4150 --http-address 0.0.0.0:4151",
        "show the broker in a browser, at http://127.0.0.1:4171/": "qcli serve --data-path ./data --admin",
        "use free ports, and write them to a file": "qcli serve --data-path /tmp/d --tcp-address "
        "127.0.0.1:0 --http-address 127.0.0.1:0 --address-file a.json",
        "use nsqd's configuration file": "qcli serve --config /etc/nsqd.cfg",
        "use all cores, with a discovery service for consumers": "qcli serve --data-path ./data --processes auto "
        "--with-lookupd",
        "be a member of a cluster": "qcli serve --cluster prod --coordinator s3://bucket/nsq --data-path ./data",
        "publish faster, if messages may be lost in a power failure": "qcli serve --data-path ./data --sync interval",
    },
    exits={
        ExitCode.OK: "SIGINT or SIGTERM stopped the broker in an orderly way; or --check-config found no problem.",
        ExitCode.FAILURE: "The broker could not start (the folder is in use or cannot be written, an address is in "
        "use, the data is damaged, the configuration file is wrong), or it failed.",
        ExitCode.USAGE: "The command line or an environment variable is wrong.",
        ExitCode.INTERRUPTED: "A second signal, SIGINT, stopped the broker at once. Acknowledged messages are safe.",
        ExitCode.TERMINATED: "A second signal, SIGTERM, stopped the broker at once. Acknowledged messages are safe.",
    },
    details={
        "Durability": "With --sync always, the default, an OK to a producer means that the message is on stable "
        "storage. Concurrent publishes share one sync. With --sync interval, an OK means that the message is "
        "in the file: it survives the death of the process, but not a power failure.",
        "Addresses": "Port 0 picks a free port. An address without a host, such as :4150, is every interface. A path "
        "is a unix socket.",
        "Several processes": "With --processes, N brokers run behind the addresses, each in a process with its own "
        "event loop, in the folders process-0, process-1 and so on of --data-path. They share the clients of the TCP "
        "and HTTP addresses. Each also has addresses of its own, with which it registers at discovery services. A "
        "consumer of the shared TCP address gets the messages of all; one that uses discovery connects to each, "
        "which costs less. The HTTP address shows sums, and changes topics and channels on all; requests about a "
        "log or dead letters need the address of one process. A process that ends is started again; all end with "
        "the command. Limits, also --cache-bytes and --max-connections, are those of each process. Fewer processes "
        "than the folder has are refused, and so are --cluster, --admin and --restore-from.",
        "Archive": "With --archive, all changes of the data folder are written to a bucket, or to a folder on another "
        "disk, a second behind; each broker needs one of its own. If the machine is lost, 'qcli archive restore', or "
        "--restore-from with an empty data folder, brings back everything but the last second. With "
        "--archive-before-ok, an OK means that the message is in the archive, too, and nothing acknowledged is lost.",
        "Cluster": "With --cluster and --coordinator, several brokers keep the same messages. The coordinator decides "
        "which one leads; an OK then means that every member in sync has the message on stable storage. Clients may "
        "use the addresses of all members: a follower passes them on to the leader. If the leader is lost, a member "
        "in sync takes over, usually within 12 s, or 17 s with a bucket. See 'qcli cluster'. Members that require "
        "tokens need one of the role replicate from each other: --cluster-auth-secret-file. HTTP must be on. "
        "Coordinators are etcd://HOST:PORT,HOST:PORT, or etcds:// with TLS, both with USER@ before the hosts if etcd "
        "has users; s3://BUCKET/FOLDER, gs:// or az://; or static:HOST:PORT, the HTTP address of another member, with "
        "which an administrator decides ('qcli cluster promote').",
        "Environment": "QCLI_ and the option's name in capitals with underscores sets an option, such as "
        "QCLI_TCP_ADDRESS. 'qcli lookupd' reads the same variables. QCLI_SERVE_ and the name, such as "
        "QCLI_SERVE_TCP_ADDRESS, is for this command only and comes first. Separate several values with commas; an "
        "empty variable counts as none. A flag overrides the environment, and the environment overrides the "
        "configuration file.",
        "Readiness": "When it is ready, it writes a line with its addresses to standard error.",
        "Reloading": "At SIGHUP the broker reads these again, without an interruption: the auth file, whose "
        "revoked tokens end at once; the certificate, its key and the CAs, for new sessions; and log_level in the "
        "configuration file, unless a flag or a variable sets it. If a file cannot be used, the log says so, and the "
        "earlier values stay in use. The audit log is opened again. All other options need a restart.",
        "Draining": "At SIGUSR1, or at the HTTP request PUT /config/draining with the body true, the broker refuses "
        "publishes, with an error on which clients try another broker. It still delivers what it has. The body false "
        "ends this, and so does a restart.",
        "Web console": "With --admin, the web console of this broker runs as a child process, which ends with the "
        "broker, and is started again if it fails. It needs the extra admin. If the broker requires tokens, viewers "
        "log in with theirs. It serves HTTPS with --tls-cert if other machines can reach it. For several "
        "brokers, and more options: 'qcli admin'.",
        "Configuration file": "TOML with nsqd's keys: the option with underscores, such as tcp_address. Exceptions: id "
        "for --node-id, and nsqlookupd_tcp_addresses, auth_http_addresses and e2e_processing_latency_percentiles for "
        'the lists. A duration is a string such as "1m30s", or an integer in milliseconds. Unknown keys are logged '
        "and ignored.",
        "systemd": "With Type=notify in its unit, systemd knows when the broker is ready, reloads or stops.",
        "Differences from nsqd": "The default addresses are on the loopback interface; nsqd listens on all interfaces. "
        "A missing data folder is created. TLS below 1.2 is off by default. Options may be written in Go's "
        "way, as for nsqd: -name, --name=value. An option that is shown with [=...] takes a value after '=' only. "
        "Durations are written in Go's way, such as 1m30s. These options are accepted and have no effect: "
        "--queue-scan-worker-pool-max, --queue-scan-selection-count, --worker-id (see --node-id) and --verbose (see "
        "--log-level).",
    },
)
@version_option
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> int:
    """Run a broker until SIGINT or SIGTERM.

    It speaks NSQ's protocol, and takes nsqd's options and file. A second signal ends it at once.
    """
    from trio_nsq.broker import serve
    from trio_nsq.broker.storage.data_folder import is_own_name
    from trio_nsq.platform.malloc_tuning import keep_freed_memory
    from trio_nsq.server.startup_checks import OwnFiles

    from ...framework.daemon.run import raise_file_limit, run_server

    # An absolute path, because logs and HTTP clients see it.
    values["data_path"] = (values["data_path"] or Path()).absolute()
    own = OwnFiles(values["data_path"], is_own_name)
    if values["check_config"]:
        from trio_nsq.broker.startup_check import startup_problems

        def problems() -> list[str]:
            options, admin, cluster = broker_options(values), values["admin"], cluster_options(values)
            found = startup_problems(
                options, is_member=cluster is not None, is_node=bool(values["processes"])
            )
            if values["processes"]:
                from .processes import node_problems

                found += node_problems(options, values)
            if cluster is not None:
                from trio_nsq.cluster.startup_check import member_problems

                found += member_problems(options, cluster)
            if admin:
                from .console import console_problems

                found += console_problems(options, admin, values["admin_config"])
            elif values["admin_config"]:
                found.append(_NEEDS_ADMIN)
            return found

        return check_config(ctx, values["address_file"], problems, own)
    options, cluster = broker_options(values), cluster_options(values)
    raise_file_limit()
    keep_freed_memory()
    describe: Callable[[Any], str] = partial(_described, data_path=options.data_path)
    run: Callable[..., Awaitable[None]] = serve
    if values["processes"]:
        from .processes import LookupdProcess, run_processes

        role = run_processes(ctx, options)
        if isinstance(role, ExitCode):
            return role
        if isinstance(role, LookupdProcess):
            from trio_nsq.lookup.service.server import serve as serve_lookupd

            run = partial(serve_lookupd, listeners=role.listeners)
            run_server(ctx, run, role.options, "trio_nsq.lookup", partial(_silent, role.tell_ready))
            return ExitCode.OK
        options, describe = role.options, partial(_silent, role.tell_ready)
        own = OwnFiles(options.data_path, is_own_name)
        run = partial(serve, siblings=role.siblings, listeners=role.siblings.own)
    elif values["process_ports"] or values["with_lookupd"]:
        raise Failure("--process-ports and --with-lookupd need --processes.")
    if cluster is not None:
        from trio_nsq.cluster.member import serve_member

        run = partial(serve_member, cluster=cluster)
    if values["admin"]:
        from ..admin.beside import read_console_config
        from .console import serve_with_console

        log = {"level": values["log_level"], "prefix": values["log_prefix"], "form": values["log_format"]}
        secret_file = cluster.cluster_auth_secret_file if cluster is not None else None
        run = partial(
            serve_with_console,
            serve=run,
            admin=values["admin"],
            own=read_console_config(values["admin_config"]),
            config=values["admin_config"],
            log=log,
            secret_file=secret_file,
        )
    elif values["admin_config"]:
        raise Failure(f"{_NEEDS_ADMIN}.")
    run_server(ctx, run, options, "trio_nsq.broker", describe, own=own, can_drain=True)
    return ExitCode.OK


def _silent(tell_ready: Callable[[], None], _bound: object) -> str:
    """Tell the supervisor of this process that it is ready. It says so when all are."""
    tell_ready()
    return ""


def _described(bound: BoundAddresses, data_path: Path) -> str:
    listening = f"tcp {bound.tcp_address}, http {bound.http_address or 'off'}"
    if bound.https_address:
        listening += f", https {bound.https_address}"
    if url := getattr(bound, "admin_url", ""):
        listening += f", admin {url}"
    return f"{listening}, data {data_path}"
