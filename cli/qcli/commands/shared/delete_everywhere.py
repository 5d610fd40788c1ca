"""Deletes topics or channels on all brokers and in all discovery services, and checks that they stay deleted."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from trio_nsq.api import lookupd
from trio_nsq.api.answers import ChannelStats
from trio_nsq.fleet.changes import Change, Places, Step, by_server, rounds

from ...broker.admin_client import AdminClient
from ...broker.at_once import at_once
from ...broker.brokers import Brokers, combined
from ...broker.failures import Refused
from ...broker.lookupd_client import LookupdClient, LookupdRefused, listed_with
from ...broker.refusals import NotFound, missing, not_found
from ...framework.errors import Failure
from ...framework.output import print_diagnostic
from ...framework.params import Source

_T = TypeVar("_T")

CHECK_S = 2.0
"""How long a deleted topic or channel is watched: consumers reconnect within a second."""
_CHECK_INTERVAL_S = 0.25


def delete_everywhere(kind: str, names: Sequence[Source], brokers: Brokers) -> None:
    """Delete topics or channels, by `kind`, on all brokers and in all discovery services, and report each.

    Raises Failure: a server failed, no server had one of the names, or one exists again.
    """
    failures: list[Failure] = []
    deleted: list[Source] = []
    failed: set[str] = set()
    for name in names:
        found, complaints = _delete(kind, name, brokers)
        failures += complaints.values()
        failed.update(complaints)
        if found:
            deleted.append(name)
        elif not complaints:
            failures.append(missing(name, *brokers.addresses, creation=False))
    if deleted:
        failures += _watch(kind, deleted, [each for each in brokers.addresses if each not in failed])
    if failures:
        raise combined(failures, partial=bool(deleted))


_DONE = ("hidden from consumers at", "deleted on", "deleted in nsqlookupd")
"""What a server does in each of the rounds."""


def _delete(kind: str, name: Source, brokers: Brokers) -> tuple[bool, dict[str, Failure]]:
    """Delete one topic or channel. Returns whether a server had it, and the failures by address."""
    failures: dict[str, Failure] = {}

    def on_all(servers: Iterable[str], act: Callable[[str], _T]) -> dict[str, _T]:
        answers = at_once([each for each in servers if each not in failures], act)
        for address, answer in answers.items():
            if isinstance(answer, Failure) and not isinstance(answer, NotFound):
                failures[address] = answer
        return {address: answer for address, answer in answers.items() if not isinstance(answer, Failure)}

    known = on_all(brokers.lookupds, partial(_ask_lookupd, name))
    places = Places(list(known), brokers.addresses, {address: nodes for address, (nodes, _) in known.items()})
    found = any(has_it for _, has_it in known.values())
    plan = rounds(Change("delete", name.topic, name.channel or ""), places)
    for steps, done in zip(plan, _DONE, strict=True):
        # A broker that failed may register the topic again.
        for address in on_all(by_server(steps), partial(_make, name, by_server(steps))):
            is_broker = address not in known
            found |= is_broker
            if is_broker or known[address][1]:
                print_diagnostic(f"{kind} {name} {done} {address}")
    return found, failures


def _ask_lookupd(name: Source, address: str) -> tuple[list[str], bool]:
    """Return the brokers of a topic at a discovery service, and whether it knows the topic or channel."""
    client = LookupdClient(address)
    nodes = [] if name.channel else listed_with(client, name.topic)
    names = client.ask(lookupd.topics() if name.channel is None else lookupd.channels(name.topic))
    return nodes, (name.channel or name.topic) in names


def _make(name: Source, steps: Mapping[str, Sequence[Step]], address: str) -> None:
    for step in steps[address]:
        try:
            if step.is_lookupd:
                LookupdClient(address).ask(step.request)
            else:
                AdminClient(address).ask(step.request)
        except LookupdRefused as error:
            if error.text != "CHANNEL_NOT_FOUND":
                raise
        except Refused as error:
            raise not_found(address, name, error.text, creation=False) or error from error


def _watch(kind: str, names: Sequence[Source], addresses: Sequence[str]) -> list[Failure]:
    """Return a failure for each topic or channel that exists again on one of these brokers, or cannot be checked."""
    failures: dict[Source, Failure] = {}
    deadline_s = time.monotonic() + CHECK_S
    while addresses and time.monotonic() < deadline_s and len(failures) < len(names):
        time.sleep(_CHECK_INTERVAL_S)
        for name in names:
            if name in failures:
                continue
            answers = at_once(addresses, lambda address, name=name: _clients(address, name))  # type: ignore[misc]
            again: dict[str, list[str]] = {}
            for address, clients in answers.items():
                if isinstance(clients, Failure):
                    failures[name] = clients
                elif clients is not None:
                    again[address] = clients
            if again:
                failures[name] = _exists_again(kind, name, again)
    for name in names:
        if name not in failures and addresses:
            print_diagnostic(f"{kind} {name} stays deleted ({CHECK_S:g} s)")
    return list(failures.values())


def _clients(address: str, name: Source) -> list[str] | None:
    """Return the consumers of a topic or channel of a broker; None: it does not exist."""
    channels: list[ChannelStats] | None = None
    for topic in AdminClient(address).stats(name.topic, clients=True)["topics"]:
        if topic["topic_name"] == name.topic:
            channels = topic["channels"]
    if channels is None:
        return None
    if name.channel is not None:
        channels = [each for each in channels if each["channel_name"] == name.channel]
        if not channels:
            return None
    clients = [client for channel in channels for client in channel["clients"]]
    return [f"{client.get('remote_address')} ({client.get('user_agent')})" for client in clients]


def _exists_again(kind: str, name: Source, again: dict[str, list[str]]) -> Failure:
    clients = sorted({client for found in again.values() for client in found})
    if clients:
        who = f"Its consumers: {', '.join(clients)}. Stop them first."
    else:
        who = "A producer publishes to it, or a consumer was there. Stop them first."
    return Failure(f"{kind.capitalize()} {name} exists again on {' and '.join(again)}. {who}")
