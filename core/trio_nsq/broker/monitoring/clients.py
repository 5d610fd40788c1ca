"""The clients of `/stats`: consumers of channels, and producers.

What clients have in common, such as settings, is made once for each answer; compiled, because brokers have thousands.
"""

from collections.abc import Iterable
from typing import Any, Final

from ...access.policy import Identity
from ..session.description import Description, SharedFields
from ..session.session import Session
from ..state.consumer import Consumer
from .forms import Form, Layout

_COUNTS: Final[Layout] = {
    "state": int,
    "ready_count": int,
    "in_flight_count": int,
    "message_count": int,
    "finish_count": int,
    "requeue_count": int,
    "connect_ts": int,
}
_INDENT_OF_CONSUMERS: Final = "        "
_INDENT_OF_PRODUCERS: Final = "   "
_MOST_SHARED: Final = 1000
"""Limit of the different fields that are remembered: clients may send anything as their user agent."""
_PUB_COUNT: Final[Layout] = {"topic": str, "count": int}


class ClientDescriber:
    """Describes clients in some form."""

    def describe(self, client: Session, topic: str) -> Any:
        """Describe a client. `topic`: list only publishes to this one; empty: all."""
        raise NotImplementedError

    def of_consumers(self, consumers: Iterable[Consumer], topic: str) -> list[Any]:
        """Describe the clients of these consumers; `topic` as of `describe`. A broker's own consumers are left out.

        Returns descriptions, or parts of a text of them: see `together`.
        """
        described = []
        for consumer in consumers:
            session = consumer.subscriber
            if isinstance(session, Session) and session.subscription is not None:
                described.append(self.describe(session, topic))
        return self.together(described, _INDENT_OF_CONSUMERS) if described else described

    def of_producers(self, sessions: Iterable[Session], topic: str) -> list[Any]:
        """Describe those of these clients that have published; `topic` and the result as of `of_consumers`."""
        described = []
        for session in sessions:
            if session.pub_counts:
                described.append(self.describe(session, topic))
        return self.together(described, _INDENT_OF_PRODUCERS) if described else described

    def together(self, described: list[Any], indent: str) -> list[Any]:
        """Join descriptions, at least one, if they are texts: the memory of each is free for the next clients then.

        Args:
            indent: Begins each line of text.
        """
        raise NotImplementedError


class Clients(ClientDescriber):
    """Describes clients as objects, in a form.

    Args:
        keeps: Each session keeps the part that changes only with IDENTIFY and AUTH, until another instance keeps its
            own there. To make it reads ten objects of a client, and with thousands of clients none is in a cache of the
            processor.
    """

    def __init__(self, form: Form, *, keeps: bool = False) -> None:
        self._form = form
        self._keeps = keeps
        self._counts = form.prepared(_COUNTS)
        self._pub_count = form.prepared(_PUB_COUNT)
        self._shared: dict[tuple[Any, ...], SharedFields] = {}  # by what they are made from

    def describe(self, client: Session, topic: str) -> Any:
        form = self._form
        ready, in_flight, messages, finished, requeued = counts_of(client)
        identity = client.authorizer.identity
        about = client.description
        if about is None or about.shared.maker is not self or about.identity is not identity:
            about = self._unchanging(client, identity)
            if self._keeps:
                client.description = about
        shared = about.shared
        more = shared.both
        if client.pub_counts and (published := publishes_of(client, topic)):
            counts = [form.describe(self._pub_count, (form.text(name), count)) for name, count in published]
            more = form.with_list(shared.before, "pub_counts", counts, shared.after)
        values = (
            int(client.reader.state), ready, in_flight, messages, finished, requeued, client.connected_s,
        )  # fmt: skip
        return form.describe(self._counts, values, more, first=about.names)

    def _unchanging(self, client: Session, identity: Identity | None) -> Description:
        request, upgrades, tls = client.handshake.identity, client.handshake.upgrades, client.transport.tls
        key = (
            client.handshake.settings.sample_rate, upgrades.deflate, upgrades.snappy, request.user_agent,
            request.topology_region, request.topology_zone,
            None if identity is None else (identity.name, identity.url),
            None if tls is None else (tls.cipher_suite, tls.version),
        )  # fmt: skip
        shared = self._shared.get(key)
        if shared is None:
            if len(self._shared) >= _MOST_SHARED:
                self._shared.clear()
            before, after = (
                self._form.fields(_before_counts(client)),
                self._form.fields(_after_counts(client)),
            )
            shared = self._shared[key] = SharedFields(self, before, after, self._form.joined(before, after))
        names = {
            "client_id": request.client_id,
            "hostname": request.hostname,
            "version": "V2",
            "remote_address": client.peer,
        }
        return Description(self._form.fields(names), shared, identity)

    def together(self, described: list[Any], indent: str) -> list[Any]:
        return self._form.together(described)


def counts_of(client: Session) -> tuple[int, int, int, int, int]:
    """Return RDY, and the messages in flight, sent, finished and requeued, of a client; 0 before SUB."""
    subscription = client.subscription
    if subscription is None:
        return 0, 0, 0, 0, 0
    consumer = subscription.consumer
    return (
        consumer.ready_count, consumer.in_flight.count, consumer.message_count, consumer.finish_count,
        consumer.requeue_count,
    )  # fmt: skip


def publishes_of(client: Session, topic: str) -> list[tuple[str, int]]:
    """Return the topics that a client has published to, with the counts; nsqd lists one of them.

    Args:
        topic: Only this one; empty: all.
    """
    counts = client.pub_counts
    if topic:
        return [(topic, counts[topic])] if topic in counts else []
    return sorted(counts.items())


def _before_counts(client: Session) -> dict[str, Any]:
    request, upgrades = client.handshake.identity, client.handshake.upgrades
    identity = client.authorizer.identity
    fields: dict[str, Any] = {
        "sample_rate": client.handshake.settings.sample_rate,
        "deflate": upgrades.deflate,
        "snappy": upgrades.snappy,
        "user_agent": request.user_agent,
    }
    if request.topology_region or request.topology_zone:
        fields |= {"topology_region": request.topology_region, "topology_zone": request.topology_zone}
    if identity is not None:
        fields["authed"] = True
        about = {"auth_identity": identity.name, "auth_identity_url": identity.url}
        fields |= {name: text for name, text in about.items() if text}
    return fields


def _after_counts(client: Session) -> dict[str, Any]:
    tls = client.transport.tls
    return {
        "tls": tls is not None,
        "tls_cipher_suite": "" if tls is None else tls.cipher_suite,
        "tls_version": "" if tls is None else tls.version,
        "tls_negotiated_protocol": "",
        "tls_negotiated_protocol_is_mutual": tls is not None,  # as Go reports for every session
    }
