"""`qcli lookupd`: the discovery service.

The names, defaults and keys of its options are nsqlookupd's. What differs stands in docs/reference/differences.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..framework.daemon import kinds
from ..framework.daemon.config_file import CONFIG
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
        help="Where brokers register. Port 0 picks a free one; :4160 is every interface.",
    ),
    Setting(
        "http-address", LISTEN, "127.0.0.1:4161", help="Where consumers and administrators ask, likewise."
    ),
    Setting(
        "broadcast-address",
        kinds.HOST,
        help="The host that brokers are told to ask at. Not given: this machine's host name, or the loopback address "
        "if HTTP is served there alone.",
    ),
    Setting(
        "address-file",
        kinds.FILE,
        help="Once ready, write the bound addresses here, as JSON with the keys tcp_address and http_address. The "
        "file appears whole, and goes away with the service.",
    ),
    "Producers",
    Setting(
        "inactive-producer-timeout",
        kinds.POSITIVE_DURATION,
        "5m",
        help="A broker that has not pinged for longer is not told to anybody; after twice that, and a minute at "
        "least, its connection is closed. Brokers ping every 15 seconds.",
    ),
    Setting(
        "tombstone-lifetime",
        kinds.DURATION,
        "45s",
        help="How long a tombstone hides a broker from the consumers of a topic that is being deleted there.",
    ),
    Setting(
        "max-registrations", kinds.POSITIVE, 100_000, help="Topics and channels that one broker may register."
    ),
    "Storage",
    Setting(
        "data-path",
        kinds.FOLDER,
        help="A folder in which the names of topics and channels outlive a restart. Made if it is missing; its parent "
        "has to exist. Not given: those that no broker has at the time are forgotten.",
    ),
    "Logging",
    *LOG_SETTINGS,
    verbose_setting(),
)


def lookupd_options(values: dict[str, Any]) -> LookupdOptions:
    """Put values, by field, where the service expects them; those that are no fields of it are left alone."""
    from trio_nsq.lookup.service.options import LookupdOptions

    return LookupdOptions(**fields_of(LookupdOptions, values))


@click.command(
    "lookupd",
    cls=GoFlagsCommand,
    params=[CONFIG, *SETTINGS],
    short_help="Run a discovery service.",
    examples={
        "on this machine only": "qcli lookupd",
        "a broker that registers with it": "qcli serve --lookupd-tcp-address 127.0.0.1:4160",
        "for the whole network, on nsqlookupd's ports": "qcli lookupd --tcp-address 0.0.0.0:4160 "
        "--http-address 0.0.0.0:4161",
        "one that remembers topics which no broker has at the time": "qcli lookupd --data-path /var/lib/qcli-lookupd",
    },
    exits={
        ExitCode.OK: "It was stopped by SIGINT or SIGTERM, in good order.",
        ExitCode.FAILURE: "It could not start (an address is taken, the folder is in use or cannot be written, the "
        "configuration file is wrong), or it failed.",
        ExitCode.USAGE: "The command line is wrong, or a variable of the environment.",
        ExitCode.INTERRUPTED: "A second signal, SIGINT, cut the stop short.",
        ExitCode.TERMINATED: "A second signal, SIGTERM, cut the stop short.",
    },
    notes={
        "Questions": "GET /lookup?topic=NAME tells which brokers have a topic, GET /topics which topics there are, GET "
        "/nodes which brokers; docs/how-to/discovery.md has the other requests.",
        "Several of them": "They know nothing of each other. Brokers register with each of them, and consumers ask "
        "each of them, so that one is enough to go on with. A service that comes back is told everything anew by the "
        "brokers, within seconds if they are ours, and by nsqd with its next ping.",
        "What is kept": "A topic or channel that has been there once is listed until it is deleted over HTTP, also "
        "while no broker has it; ephemeral ones go with the last broker that has them. With --data-path the others "
        "are written down within a second, and known again after a restart.",
        "Environment": "Each option can also be given by a variable named QCLI_ and the option in capitals with "
        "underscores, such as QCLI_TCP_ADDRESS, as for 'qcli serve'; an empty variable counts as none. A flag wins "
        "over the environment, and that over the configuration file.",
        "Reloading": "SIGHUP has it read log_level in the configuration file again, unless a flag or a variable says "
        "another. All else holds from a restart on.",
        "Configuration file": "TOML with nsqlookupd's keys: the option with underscores, such as tcp_address. A "
        'duration is a string such as "1m30s", or an integer, milliseconds. A key that is not known is named in the '
        "log and changes nothing.",
        "Differences from nsqlookupd": "It listens on the loopback interface unless told otherwise; nsqlookupd "
        "listens on all. Options may be written in Go's way, as for nsqlookupd: -name, --name=value; an option that "
        "is shown with [=...] takes a value behind '=' only. --verbose is accepted and has no effect: see --log-level.",
    },
)
@version_option
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> int:
    """Run a discovery service, until SIGINT or SIGTERM.

    It does the job of nsqlookupd, for any NSQ broker and client: brokers tell it which topics and channels they have,
    and consumers ask it which brokers have a topic. Once it is ready, a line that begins with 'ready' and names the
    addresses is written to standard error.

    The first signal stops it in good order; a second one at once.
    """
    from trio_nsq.lookup.service.server import serve

    from ..framework.daemon.run import run_server

    if values["data_path"] is not None:
        # What is said about the folder is to be clear wherever it is read.
        values["data_path"] = values["data_path"].absolute()
    options = lookupd_options(values)
    run_server(ctx, serve, options, "trio_nsq.lookup", lambda bound: _described(bound, options))
    return ExitCode.OK


def _described(bound: LookupdAddresses, options: LookupdOptions) -> str:
    data = f", data {options.data_path}" if options.data_path is not None else ""
    return f"tcp {bound.tcp_address}, http {bound.http_address}{data}"
