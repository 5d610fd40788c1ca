"""The brokers of a measurement, with the addresses of both protocols."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import click

from ...broker.address_options import HTTP_OPTION, TCP_OPTION, check_tcp_address, next_port
from ...broker.admin_client import AdminClient
from ...broker.brokers import Brokers, chosen
from ...broker.connection_options import ConnectOptions
from ...framework.errors import Failure
from ...framework.params import is_https, is_unix_path
from .options import BenchOptions


@dataclass(frozen=True, slots=True)
class Target:
    """A broker.

    Attributes:
        tcp_address: Where its messages go.
        http_addresses: One of them may be its HTTP address.
    """

    tcp_address: str
    http_addresses: tuple[str, ...]

    def admin(self) -> AdminClient:
        """Return the broker's HTTP interface. Raises UsageError: its address is not known."""
        connecting = ConnectOptions.of_command()
        for address in self.http_addresses:
            plain = connecting.encrypts_tcp and not is_https(address) and not is_unix_path(address)
            # The secret is not sent in clear text to a broker that is reached over TLS otherwise.
            used = dataclasses.replace(connecting, auth_secret="") if plain else connecting
            broker = AdminClient(address, used)
            try:
                if broker.listens_at(self.tcp_address):
                    return broker
            except Failure:
                continue
        raise click.UsageError(
            f"No HTTP address of the broker at {self.tcp_address} is known, so this command could not delete its "
            f"topic: give {TCP_OPTION} and {HTTP_OPTION} of the same broker, or name a topic, which is kept."
        )


def targets_of(options: BenchOptions) -> list[Target]:
    """Return the brokers that the command line names, or that its discovery services list.

    Raises:
        click.UsageError: An address is wrong.
        Failure: No discovery service answers, or none lists a broker.
    """
    given, lookupds = chosen(click.get_current_context(), "nsqd_tcp_addresses")
    for address in given:
        check_tcp_address(address)
    found = [Target(address, (*options.nsqd_http_addresses, next_port(address))) for address in given]
    if lookupds:
        brokers = Brokers((), lookupds, options.lookupd_allowed_hosts)
        for node in brokers.nodes():
            http = [node.http_address] if node.http_address else []
            found.append(Target(node.tcp_address, (*http, *options.nsqd_http_addresses)))
        if not found:
            raise brokers.none_listed(TCP_OPTION)
    return list({target.tcp_address: target for target in found}.values())


def tcp_addresses(targets: Iterable[Target]) -> Sequence[str]:
    """Return the TCP addresses."""
    return [target.tcp_address for target in targets]
