"""`qcli tombstone`: hides brokers from the consumers of a topic."""

import click

from ..broker.address_options import LOOKUPD_OPTION, lookupd_addresses
from ..broker.at_once import at_once
from ..broker.brokers import combined
from ..broker.connection_options import http_connection
from ..framework.command import DocumentedCommand
from ..framework.errors import ExitCode, Failure
from ..framework.output import print_diagnostic
from ..framework.params import address, topic_name


@click.command(
    "tombstone",
    cls=DocumentedCommand,
    short_help="Hide brokers from the consumers of a topic.",
    examples={
        "hide a broker from a topic's consumers": "qcli tombstone clicks 10.0.0.7:4151 "
        "--lookupd-http-address 127.0.0.1:4161",
        "delete a topic on one broker only": "qcli tombstone clicks 10.0.0.7:4151 && qcli topic delete --yes clicks "
        "--nsqd-http-address 10.0.0.7:4151",
    },
    exits={
        ExitCode.FAILURE: "Nothing was done: no discovery service lists the broker with this topic, or it refused.",
        ExitCode.UNREACHABLE: "No discovery service answers at the addresses.",
        ExitCode.PARTIAL: "Some discovery services or brokers failed; standard error says which.",
    },
    details={
        "Effect": "A discovery service does not return the broker for this topic for its --tombstone-lifetime, 45 "
        "seconds by default. Consumers that are connected stay connected, and the broker keeps its messages. Use it "
        "before a topic is deleted on one broker: otherwise consumers find the broker by its old registration, and "
        "create the topic again. To delete a topic on all brokers, see 'qcli topic delete --everywhere'.",
    },
)
@click.argument("topic", metavar="TOPIC", type=topic_name)
@click.argument("nodes", metavar="HOST:HTTP_PORT...", nargs=-1, required=True, type=address)
@lookupd_addresses("Ask these nsqlookupd to hide the brokers.")
@http_connection
def command(
    topic: str,
    nodes: tuple[str, ...],
    lookupd_addresses: tuple[str, ...],
    lookupd_allowed_hosts: tuple[str, ...],
) -> None:
    """Hide brokers from the consumers of a topic for a short time, in every discovery service.

    A broker has the address that it registered, as 'qcli nodes' shows it.
    """
    from trio_nsq.api import lookupd

    from ..broker.lookupd_client import LookupdClient, listed_with

    if not lookupd_addresses:
        raise click.UsageError(f"Name the discovery services: {LOOKUPD_OPTION}.")

    def hide(address: str) -> list[str]:
        client = LookupdClient(address)
        listed = listed_with(client, topic)
        known = [node for node in nodes if node in listed]
        for node in known:
            client.ask(lookupd.tombstone(topic, node))
        return known

    failures: list[Failure] = []
    hidden: set[str] = set()
    answers = at_once(lookupd_addresses, hide)
    for service, known in answers.items():
        if isinstance(known, Failure):
            failures.append(known)
            continue
        for node in known:
            print_diagnostic(f"topic {topic}: {node} hidden from consumers at {service}")
        hidden.update(known)
    if len(failures) < len(answers):
        services = " or ".join(each for each, known in answers.items() if not isinstance(known, Failure))
        failures += [
            Failure(f"No broker {node} with topic {topic} is registered at {services}. See 'qcli nodes'.")
            for node in nodes
            if node not in hidden
        ]
    if failures:
        raise combined(failures, partial=bool(hidden))
