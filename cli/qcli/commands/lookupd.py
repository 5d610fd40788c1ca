"""`qcli lookupd`: the discovery service.

The names, defaults and keys of its options are nsqlookupd's; docs/reference/differences.md lists the exceptions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..framework.daemon import kinds
from ..framework.daemon.checking import CHECK_CONFIG, check_config
from ..framework.daemon.config_file import CONFIG
from ..framework.daemon.security_settings import (
    audit_log_setting,
    auth_file_setting,
    certificate_settings,
    http_access_settings,
    tls_client_settings,
)
from ..framework.daemon.setting import LOG_SETTINGS, Setting, fields_of, under_headings, verbose_setting
from ..framework.errors import ExitCode
from ..framework.go_flags import GoFlagsCommand
from ..framework.options import version_option
from ..framework.params import tcp_listen_address

if TYPE_CHECKING:
    from trio_nsq.lookup.service.options import LookupdOptions
    from trio_nsq.lookup.service.server import LookupdAddresses


LISTEN = kinds.Kind(tcp_listen_address, "HOST:PORT")

SETTINGS = under_headings(
    "Addresses",
    Setting(
        "tcp-address",
        LISTEN,
        "127.0.0.1:4160",
        help="Listen for brokers here. Port 0 picks a free port; :4160 is every interface.",
    ),
    Setting(
        "http-address", LISTEN, "127.0.0.1:4161", help="Serve HTTP here, for consumers and administrators."
    ),
    Setting(
        "broadcast-address",
        kinds.HOST,
        help="Announce this host to brokers. By default it is this machine's host name, or the loopback "
        "address if HTTP is served there only.",
        brief=True,
    ),
    Setting(
        "address-file",
        kinds.WRITTEN_FILE,
        help="Write the bound addresses to this file when the service is ready: JSON with the keys tcp_address "
        "and http_address. The file is replaced atomically, and removed when the service stops.",
        brief=True,
    ),
    "Producers",
    Setting(
        "inactive-producer-timeout",
        kinds.POSITIVE_DURATION,
        "5m",
        help="Hide a broker that has not pinged for this long. After twice that, and at least a minute, its "
        "connection is closed. Brokers ping every 15 seconds.",
    ),
    Setting(
        "tombstone-lifetime",
        kinds.DURATION,
        "45s",
        help="Hide a broker for this long from the consumers of a topic that is being deleted there.",
    ),
    Setting(
        "max-registrations", kinds.POSITIVE, 100_000, help="Limit the topics and channels of one broker."
    ),
    Setting(
        "max-topics",
        kinds.POSITIVE,
        100_000,
        help="Limit the topics. A new one replaces the one that has had no broker for the longest time.",
    ),
    Setting(
        "max-channels",
        kinds.POSITIVE,
        100_000,
        help="Limit the channels of all topics together, in the same way.",
    ),
    "TLS and authentication",
    *certificate_settings(),
    Setting(
        "tls-required",
        kinds.BOOLEAN,
        "false",
        help="Refuse clients without TLS. By default both ports accept TLS and plain text.",
    ),
    *tls_client_settings(),
    auth_file_setting(),
    *http_access_settings(),
    Setting(
        "max-connections",
        kinds.COUNT,
        0,
        help="Limit the brokers connected over TCP, and separately the clients over HTTP. 0: as many as the limit "
        "of open files allows (ulimit -Hn).",
        brief=True,
    ),
    "Storage",
    Setting(
        "data-path",
        kinds.FOLDER,
        help="Keep the names of topics and channels in this folder, over restarts. It is created if it is "
        "missing; its parent must exist. By default, names that no broker registers are forgotten at a "
        "restart.",
    ),
    "Logging",
    *LOG_SETTINGS,
    audit_log_setting(),
    verbose_setting(),
)


def lookupd_options(values: dict[str, Any]) -> LookupdOptions:
    """Return the service's options from values by field; other values are ignored."""
    from trio_nsq.lookup.service.options import LookupdOptions

    return LookupdOptions(**fields_of(LookupdOptions, values))


@click.command(
    "lookupd",
    cls=GoFlagsCommand,
    params=[CONFIG, CHECK_CONFIG, *SETTINGS],
    short_help="Run a discovery service.",
    examples={
        "run it on this machine only": "qcli lookupd",
        "run a broker that registers with it": "qcli serve --lookupd-tcp-address 127.0.0.1:4160",
        "serve the whole network, on nsqlookupd's ports": "qcli lookupd --tcp-address 0.0.0.0:4160 "
        "--http-address 0.0.0.0:4161",
        "require TLS and tokens": "qcli lookupd --tcp-address 0.0.0.0:4160 --http-address 0.0.0.0:4161 --tls-cert "
        "cert.pem --tls-key key.pem --tls-required --auth-file auth.toml",
        "remember topics that no broker has at the time": "qcli lookupd --data-path /var/lib/qcli-lookupd",
    },
    exits={
        ExitCode.OK: "SIGINT or SIGTERM stopped the service in an orderly way; or --check-config found no problem.",
        ExitCode.FAILURE: "The service could not start (an address is in use, the folder is in use or cannot be "
        "written, the configuration file is wrong), or it failed.",
        ExitCode.USAGE: "The command line or an environment variable is wrong.",
        ExitCode.INTERRUPTED: "A second signal, SIGINT, stopped the service at once.",
        ExitCode.TERMINATED: "A second signal, SIGTERM, stopped the service at once.",
    },
    details={
        "Queries": "GET /lookup?topic=NAME lists the brokers that have a topic, GET /topics the topics, and GET /nodes "
        "the brokers; docs/how-to/discovery.md has the other requests.",
        "Several services": "Services do not know each other. Brokers register with each service, and consumers ask "
        "each service, so one running service is enough. After a restart of a service, brokers register again: 'qcli "
        "serve' within seconds, nsqd with its next ping.",
        "Retained names": "A topic or channel stays listed until it is deleted over HTTP, even if no broker has it. "
        "Ephemeral ones are removed with the last broker that has them. With --data-path, names are saved within a "
        "second and survive a restart.",
        "Environment": "QCLI_ and the option's name in capitals with underscores sets an option, such as "
        "QCLI_TCP_ADDRESS. 'qcli serve' reads the same variables, unless it has its own, such as "
        "QCLI_SERVE_TCP_ADDRESS. An empty variable counts as none. "
        "A flag overrides the environment, and the environment overrides the configuration file.",
        "Authentication": "With --auth-file, a broker registers only with a token (qcli serve "
        "--lookupd-auth-secret-file) or a certificate that has the role register; clients see the topics that they "
        "have a role on. nsqd has no tokens, so it cannot register then.",
        "Reloading": "At SIGHUP the service reads these again: the certificate, its key and the CAs, for new "
        "connections; the auth file; and log_level in the configuration file, unless a flag or a variable sets it. If "
        "a file cannot be used, the log says so, and the earlier values stay in use. The audit log is "
        "opened again. All other options need a restart.",
        "Configuration file": "TOML with nsqlookupd's keys: the option with underscores, such as tcp_address. A "
        'duration is a string such as "1m30s", or an integer in milliseconds. Unknown keys are logged and ignored.',
        "systemd": "With Type=notify in its unit, systemd knows when the service is ready, reloads or stops.",
        "Differences from nsqlookupd": "The default addresses are on the loopback interface; nsqlookupd "
        "listens on all interfaces. Options may be written in Go's way, as for nsqlookupd: -name, --name=value. An "
        "option that is shown with [=...] takes a value after '=' only. --verbose is accepted and has no effect: see "
        "--log-level.",
    },
)
@version_option
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> int:
    """Run a discovery service until SIGINT or SIGTERM.

    It replaces nsqlookupd, for any NSQ broker and client: brokers register their topics and channels, and consumers
    ask which brokers have a topic. When it is ready, it writes a line with its addresses to standard error. A second
    signal stops it at once.
    """
    from trio_nsq.lookup.service.names_file import is_own_name
    from trio_nsq.lookup.service.server import serve
    from trio_nsq.server.startup_checks import OwnFiles

    from ..framework.daemon.run import raise_file_limit, run_server

    if values["data_path"] is not None:
        # An absolute path, because the log names it.
        values["data_path"] = values["data_path"].absolute()
    own = OwnFiles(values["data_path"], is_own_name) if values["data_path"] is not None else None
    if values["check_config"]:
        from trio_nsq.lookup.service.startup_check import startup_problems

        return check_config(
            ctx, values["address_file"], lambda: startup_problems(lookupd_options(values)), own
        )
    options = lookupd_options(values)
    raise_file_limit()
    run_server(ctx, serve, options, "trio_nsq.lookup", lambda bound: _described(bound, options), own=own)
    return ExitCode.OK


def _described(bound: LookupdAddresses, options: LookupdOptions) -> str:
    data = f", data {options.data_path}" if options.data_path is not None else ""
    return f"tcp {bound.tcp_address}, http {bound.http_address}{data}"
