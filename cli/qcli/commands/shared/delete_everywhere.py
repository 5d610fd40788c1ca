"""Deletes topics or channels on all brokers and in all discovery services, and checks that they stay deleted.

A consumer that finds a broker by an old registration creates a deleted topic again. So discovery services hide the
brokers first, and forget the topic last.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...broker.admin_client import AdminClient
from ...broker.at_once import at_once
from ...broker.brokers import Brokers, combined
from ...broker.failures import Refused
from ...broker.lookupd_client import LookupdClient, LookupdRefused
from ...broker.refusals import NotFound, missing, not_found
from ...framework.errors import Failure
from ...framework.output import print_diagnostic
from ...framework.params import Source

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


def _delete(kind: str, name: Source, brokers: Brokers) -> tuple[bool, dict[str, Failure]]:
    """Delete one topic or channel. Returns whether a server had it, and the failures by address."""
    failures: dict[str, Failure] = {}
    names = {"topic": name.topic} | ({"channel": name.channel} if name.channel is not None else {})

    def run(servers: Iterable[str], act: Callable[[str], bool], done: str) -> bool:
        """Return whether a server had the topic or channel."""
        found = False
        for address, answer in at_once(tuple(servers), act).items():
            if isinstance(answer, NotFound):
                continue
            if isinstance(answer, Failure):
                failures[address] = answer
            elif answer:
                found = True
                print_diagnostic(f"{kind} {name} {done} {address}")
        return found

    def hide(lookupd: str) -> bool:
        client = LookupdClient(lookupd)
        nodes = [node for node in client.nodes() if name.topic in node.topics and node.http_address]
        for node in nodes:
            client.post("/topic/tombstone", {"topic": name.topic, "node": str(node.http_address)})
        return bool(nodes)

    def delete(broker: str) -> bool:
        try:
            AdminClient(broker).request("POST", f"/{kind}/delete", names)
        except Refused as error:
            raise not_found(broker, name, error.text, creation=False) or error from error
        return True

    def forget(lookupd: str) -> bool:
        client = LookupdClient(lookupd)
        known = client.topics() if name.channel is None else client.channels(name.topic)
        if (name.channel or name.topic) not in known:
            return False
        try:
            client.post(f"/{kind}/delete", names)
        except LookupdRefused as error:
            if error.text != "CHANNEL_NOT_FOUND":
                raise
        return True

    found = False
    if name.channel is None:
        run(brokers.lookupds, hide, "hidden from consumers at")
    found |= run(brokers.addresses, delete, "deleted on")
    # A broker that failed may register the topic again.
    found |= run([each for each in brokers.lookupds if each not in failures], forget, "deleted in nsqlookupd")
    return found, failures


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
    channels: list[dict[str, Any]] | None = None
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
