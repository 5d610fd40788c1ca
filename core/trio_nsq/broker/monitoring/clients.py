"""The clients of `/stats`: consumers of channels, and producers.

What clients have in common, such as settings, is made once for each answer; compiled, because brokers have thousands.
"""

from collections.abc import Iterable
from typing import Any, Final

from ..session.session import Session
from ..state.consumer import Consumer
from .forms import Form, Layout

_CLIENT: Final[Layout] = {
    "client_id": str,
    "hostname": str,
    "version": str,
    "remote_address": str,
    "state": int,
    "ready_count": int,
    "in_flight_count": int,
    "message_count": int,
    "finish_count": int,
    "requeue_count": int,
    "connect_ts": int,
}
_PUB_COUNT: Final[Layout] = {"topic": str, "count": int}


class ClientDescriber:
    """Describes clients in some form."""

    def describe(self, client: Session, topic: str) -> Any:
        """Describe a client. `topic`: list only publishes to this one; empty: all."""
        raise NotImplementedError

    def of_consumers(self, consumers: Iterable[Consumer], topic: str) -> list[Any]:
        """Describe the clients of these consumers; `topic` as of `describe`. A broker's own consumers are left out."""
        described = []
        for consumer in consumers:
            session = consumer.subscriber
            if isinstance(session, Session) and session.subscription is not None:
                described.append(self.describe(session, topic))
        return described

    def of_sessions(self, sessions: Iterable[Session], topic: str) -> list[Any]:
        """Describe these clients; `topic` as of `describe`."""
        described = []
        for session in sessions:
            described.append(self.describe(session, topic))
        return described


class Clients(ClientDescriber):
    """Describes clients as objects, in a form."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._v2 = form.text("V2")
        self._client = form.prepared(_CLIENT)
        self._pub_count = form.prepared(_PUB_COUNT)
        # By what they are made from: the fields before and after `pub_counts`, and both. Many clients have the same.
        self._alike: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}

    def describe(self, client: Session, topic: str) -> Any:
        form, handshake, subscription = self._form, client.handshake, client.subscription
        request = handshake.identity
        ready = in_flight = messages = finished = requeued = 0
        if subscription is not None:
            consumer = subscription.consumer
            ready, in_flight, messages = (
                consumer.ready_count,
                consumer.in_flight.count,
                consumer.message_count,
            )
            finished, requeued = consumer.finish_count, consumer.requeue_count
        before, after, more = self._more(client)
        if client.pub_counts and (counts := self._pub_counts(client.pub_counts, topic)):
            more = form.joined(form.joined(before, form.field("pub_counts", form.listed(counts))), after)
        values = (
            form.text(request.client_id), form.text(request.hostname), self._v2, form.text(client.peer),
            int(client.reader.state), ready, in_flight, messages, finished, requeued, client.connected_s,
        )  # fmt: skip
        return form.describe(self._client, values, more)

    def _more(self, client: Session) -> tuple[Any, Any, Any]:
        """Return the fields before and after `pub_counts`, and both together."""
        request, upgrades = client.handshake.identity, client.handshake.upgrades
        identity, tls = client.authorizer.identity, client.transport.tls
        key = (
            client.handshake.settings.sample_rate, upgrades.deflate, upgrades.snappy, request.user_agent,
            request.topology_region, request.topology_zone,
            None if identity is None else (identity.name, identity.url),
            None if tls is None else (tls.cipher_suite, tls.version),
        )  # fmt: skip
        found = self._alike.get(key)
        if found is None:
            before, after = (
                self._form.fields(_before_counts(client)),
                self._form.fields(_after_counts(client)),
            )
            found = self._alike[key] = before, after, self._form.joined(before, after)
        return found

    def _pub_counts(self, counts: dict[str, int], topic: str) -> list[Any]:
        """Describe all topics that a client has published to; nsqd lists one of them."""
        form = self._form
        if topic:
            return (
                [form.describe(self._pub_count, (form.text(topic), counts[topic]))] if topic in counts else []
            )
        return [form.describe(self._pub_count, (form.text(name), counts[name])) for name in sorted(counts)]


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
