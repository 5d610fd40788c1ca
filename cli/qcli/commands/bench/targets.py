"""The brokers and topics of measurements: by default each run has its own topic, and deletes it at the end."""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import click

from trio_nsq.api import broker as api
from trio_nsq.protocol.address import next_port

from ...broker.address_options import HTTP_OPTION, TCP_OPTION, check_tcp_address
from ...broker.admin_client import AdminClient, client_of
from ...broker.brokers import Brokers, chosen
from ...broker.connection_options import ConnectOptions
from ...broker.failures import Refused
from ...framework.errors import ExitCode, Failure
from ...framework.output import print_diagnostic
from ...terminal.confirm import confirm
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
        """Return the broker's HTTP interface.

        Raises:
            UsageError: Its address is not known.
            Refused: Nor can it be, because a broker requires another secret.
        """
        broker = client_of(self.tcp_address, self.http_addresses, ConnectOptions.of_command())
        if broker is not None:
            return broker
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
    return [target.tcp_address for target in targets]


PREFIX = "bench-"
"""Topics with these names are for measurements: their messages may be consumed without a question."""
CHANNEL = "bench"


def new_name() -> str:
    return f"{PREFIX}{secrets.token_hex(4)}"


def check_consent(topic: str, what: str, agreed: bool) -> None:
    """Return if the messages of a topic may be consumed: it is for measurements, or the user agrees.

    Args:
        what: What the command does, as a sentence without a full stop.
        agreed: The value of `--yes`.

    Raises:
        click.UsageError: The user has to agree, and there is no terminal.
        Failure: The user does not agree.
    """
    if not (agreed or topic.startswith(PREFIX)):
        confirm(f"{what}. Continue?", what)


@contextmanager
def own_topic(targets: Sequence[Target], *, keep: bool, channel: str | None = None) -> Iterator[str]:
    """Create a topic on all brokers for the block, and yield its name.

    Args:
        keep: Do not delete it at the end.
        channel: Create this channel, too.

    Raises:
        click.UsageError: A broker's HTTP address is not known.
        Failure: A broker refuses or does not answer. `PARTIAL`: the topic is not deleted; if the block failed, too, the
            text begins with its reason.
    """
    brokers = [target.admin() for target in targets]
    topic = new_name()
    created: list[AdminClient] = []
    failure: Failure | None = None
    try:
        for broker in brokers:
            created.append(broker)  # also if it does not answer: it may have created the topic
            try:
                broker.ask(api.act("create", topic))
            except Refused:
                created.remove(broker)
                raise
            if channel is not None:
                broker.ask(api.act("create", topic, channel))
        yield topic
    except Failure as error:
        failure = error
        raise
    finally:
        if keep and created:
            print_diagnostic(f"Topic {topic} is kept.")
        elif created:
            _delete(created, topic, failure)


def _delete(brokers: Sequence[AdminClient], topic: str, before: Failure | None) -> None:
    """Delete the topic. Raises Failure: it is left; `before` is why the measurement failed."""
    failures: dict[str, Failure] = {}
    for broker in brokers:
        try:
            broker.ask(api.act("delete", topic))
        except Failure as error:
            failures[broker.address] = error
    if failures:
        options = " ".join(f"{HTTP_OPTION} {address}" for address in failures)
        reason = f"{before.message} " if before is not None else ""
        raise Failure(
            f"{reason}Topic {topic} was not deleted: {next(iter(failures.values())).message} "
            f"Later, delete it: 'qcli topic delete {topic} --yes {options}'.",
            ExitCode.PARTIAL,
        )
