"""The brokers of `to-parquet`: find them, and describe their failures."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import click

from trio_nsq.bodies.errors import RegistryUnavailable
from trio_nsq.client.errors import BrokerUnreachable, NotABroker, RequestRefused
from trio_nsq.client.reading.broker_log import LogReplaced, broker_label
from trio_nsq.protocol.address import format_address
from trio_nsq.spark.tables.target import TableUnavailable
from trio_nsq.storage import ChangedMeanwhile, LeaseLost, StorageError

from ...broker.address_options import HTTP_OPTION, LOOKUPD_OPTION, TCP_OPTION
from ...broker.admin_client import AdminClient, channels_by_topic
from ...broker.at_once import at_once
from ...broker.connection_options import ConnectOptions
from ...broker.failures import lookupd_unreachable
from ...broker.refusals import read_failure
from ...framework.errors import ExitCode, Failure
from ...framework.output import print_diagnostic
from ..shared.engine import failure_from
from .options import ToParquetOptions

GO_ON = "Run the same command again to continue."


class NoBrokerKnown(Failure):
    """No discovery service knows a broker that has the topic."""


def find_brokers(options: ToParquetOptions) -> Sequence[str]:
    """Return the brokers' addresses, or with --from-segments the folders of their logs.

    Raises Failure: discovery services do not answer, or have no broker.
    """
    if options.from_segments:
        from trio_nsq.spark.segments.places import parse_places

        return [
            f"{place.label}={place.folder}" for place in parse_places(options.from_segments, options.topic)
        ]
    lookupds = options.lookupd_addresses
    if not lookupds:
        return options.broker_addresses
    # Imported here because trio, which other exports do not need, makes the start slower.
    from ...broker.discovery import ask_lookupds
    from ...framework.signals import run_trio

    connecting = ConnectOptions.of_command()
    if not options.consume:
        check_encryption(connecting)
    brokers, failures = run_trio(
        partial(ask_lookupds, lookupds, options.topic, connecting, options.lookupd_allowed_hosts)
    )
    if len(failures) == len(lookupds):
        raise lookupd_unreachable(failures[0].address, failures[0].reason)
    for failure in failures:
        print_diagnostic(f"Warning: {failure}; brokers that only this service knows are left out.")
    if not brokers:
        raise NoBrokerKnown(f"The discovery services know no broker with topic {options.topic}.")
    return sorted(
        {
            format_address(each.broadcast_address, each.tcp_port if options.consume else each.http_port)
            for each in brokers
        }
    )


def check_encryption(connecting: ConnectOptions) -> None:
    """Raises UsageError if discovery services would make a secret travel in the clear."""
    if connecting.auth_secret and connecting.encrypts_tcp:
        raise click.UsageError(
            f"{LOOKUPD_OPTION} finds ports of plain HTTP, over which the secret would not be encrypted: give the "
            f"brokers with {HTTP_OPTION} https://HOST:PORT, or use --consume."
        )


def note_new_channel(options: ToParquetOptions, addresses: Mapping[str, Sequence[str]]) -> None:
    """Print a note for each broker where --channel is a new channel that begins after a topic's messages.

    Args:
        addresses: The brokers of each topic. Each broker is asked once.
    """
    brokers = list(dict.fromkeys(each for having in addresses.values() for each in having))
    if options.channel is None or options.quiet or not brokers:
        return
    only = next(iter(addresses)) if len(addresses) == 1 else None
    found = at_once(brokers, lambda address: AdminClient(address).stats(only)["topics"])
    for address, topics in found.items():
        if isinstance(topics, Failure):
            continue  # the export reports it, or waits for the broker
        for topic, channels in channels_by_topic(topics).items():
            # The first channel gets all messages.
            if address in addresses.get(topic, ()) and channels and options.channel not in channels:
                source = f"{topic}/{options.channel}"
                print_diagnostic(
                    f"Note: channel {source} is new on {address} and begins after the newest message. To export older "
                    f"messages too, run 'qcli channel seek {source} --to earliest', then the same command again."
                )


def healthy(addresses: Iterable[str], failures: Mapping[str, Exception]) -> list[str]:
    """Return the addresses of the brokers that have no failure; those are by label."""
    return [address for address in addresses if broker_label(address) not in failures]


def is_temporary(error: Exception) -> bool:
    """Whether a broker, a table or a registry may answer later, so that a continuous export waits for it."""
    if isinstance(error, RequestRefused):
        return not error.is_about_secret and error.text != "NOT_FOUND"
    if isinstance(error, NotABroker):
        return False
    return isinstance(error, BrokerUnreachable | TableUnavailable | RegistryUnavailable)


def may_pass(error: Exception) -> bool:
    """Whether an error is temporary if the same export worked before: a store may be down, or its keys expired."""
    return isinstance(error, StorageError | NotABroker) and not isinstance(
        error, ChangedMeanwhile | LeaseLost
    )


def incomplete(failures: Iterable[Exception], *, others: bool = False) -> Failure:
    """Return the failure of an export that wrote some files: why not all, and how to continue.

    Args:
        others: Whether other brokers were exported.
    """
    known = list(failures)
    texts = dict.fromkeys(failure_from(error, when_refused).brief for error in known)
    texts |= {"The other brokers are exported.": ""} if others else {}
    if not any(isinstance(error, LogReplaced) for error in known):
        texts[GO_ON] = ""
    return Failure(" ".join(texts), ExitCode.PARTIAL)


def when_refused(error: RequestRefused) -> Failure:
    failure = read_failure(error)
    if error.text == "NOT_FOUND":
        hint = f"To consume a channel, at least once: {TCP_OPTION} HOST:PORT --channel NAME."
        failure = Failure(f"{failure.message} {hint}", failure.exit_code)
    return failure
