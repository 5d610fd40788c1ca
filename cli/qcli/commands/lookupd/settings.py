"""The options of `qcli lookupd`, in the same kind of table as those of `qcli serve`.

Names, defaults and keys are nsqlookupd's. What differs stands in docs/differences.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ...framework.daemon.setting import (
    ADDRESSES,
    DURATION,
    FILE,
    FOLDER,
    HOST,
    LOG_SETTINGS,
    POSITIVE,
    POSITIVE_DURATION,
    STORAGE,
    Kind,
    Setting,
    field_names,
)
from ...framework.params import tcp_listen_address

if TYPE_CHECKING:
    from trio_nsq.lookup.service.options import LookupdOptions

PRODUCERS = "Producers"
IGNORED = "Accepted from nsqlookupd, without effect here"

LISTEN = Kind(tcp_listen_address, "HOST:PORT")

SETTINGS = [
    Setting(
        "tcp-address",
        ADDRESSES,
        LISTEN,
        "127.0.0.1:4160",
        help="Where brokers register. Port 0 picks a free one; :4160 is every interface.",
    ),
    Setting(
        "http-address",
        ADDRESSES,
        LISTEN,
        "127.0.0.1:4161",
        help="Where consumers and administrators ask, likewise.",
    ),
    Setting(
        "broadcast-address",
        ADDRESSES,
        HOST,
        help="The host that brokers are told to ask at. Not given: this machine's host name, or the loopback address "
        "if HTTP is served there alone.",
    ),
    Setting(
        "address-file",
        ADDRESSES,
        FILE,
        help="Once ready, write the bound addresses here, as JSON with the keys tcp_address and http_address. The "
        "file appears whole, and goes away with the service.",
    ),
    Setting(
        "inactive-producer-timeout",
        PRODUCERS,
        POSITIVE_DURATION,
        "5m",
        field="inactive_producer_timeout_ms",
        help="A broker that has not pinged for longer is not told to anybody; after twice that, and a minute at "
        "least, its connection is closed. Brokers ping every 15 seconds.",
    ),
    Setting(
        "tombstone-lifetime",
        PRODUCERS,
        DURATION,
        "45s",
        field="tombstone_lifetime_ms",
        help="How long a tombstone hides a broker from the consumers of a topic that is being deleted there.",
    ),
    Setting(
        "max-registrations",
        PRODUCERS,
        POSITIVE,
        100_000,
        help="Topics and channels that one broker may register.",
    ),
    Setting(
        "data-path",
        STORAGE,
        FOLDER,
        help="A folder in which the names of topics and channels outlive a restart. Made if it is missing; its parent "
        "has to exist. Not given: those that no broker has at the time are forgotten.",
    ),
    *LOG_SETTINGS,
    Setting(
        "verbose",
        IGNORED,
        Kind(click.STRING, "[=BOOL]", (bool, str), "true or false"),
        alone="true",
        ignored="see --log-level",
        help="See --log-level.",
    ),
]


def lookupd_options(values: dict[str, Any]) -> LookupdOptions:
    """Put values, by field, where the service expects them; those that are no fields of it are left alone."""
    from trio_nsq.lookup.service.options import LookupdOptions

    return LookupdOptions(**{name: values[name] for name in field_names(LookupdOptions) & values.keys()})
