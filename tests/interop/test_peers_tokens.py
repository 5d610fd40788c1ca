"""Test third-party NSQ clients with a broker that has an auth file: tokens over TLS, as the AUTH secret."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from client.support.tokens import SECRETS, UNKNOWN, AuthFile
from interop.deliveries import counted, some_bodies
from interop.peers import CLIENTS, Broker, Client, qcli_serve
from interop.same.certificates import Certificates
from trio_nsq.access.secret import Secret
from trio_nsq.api.broker import stats
from trio_nsq.client.connection.tls import TLSFiles
from trio_nsq.client.http.broker_http import BrokerHTTP

pytestmark = pytest.mark.interop

each_client = pytest.mark.parametrize("client", [pytest.param(client, id=client.name) for client in CLIENTS])

ONLY_CONSUMES = {"gnsq"}
"""Its Producer treats the reply to AUTH as the reply to a publish; see test_peers_upgrades."""


class Guarded(NamedTuple):
    """A broker that requires TLS and a token."""

    broker: Broker
    http: BrokerHTTP
    tls: list[str]

    def connection(self, token: str) -> list[str]:
        """Return a client's flags to connect with this token."""
        return [*self.tls, f"--auth={token}"]

    def depth(self, topic: str) -> int:
        """Return the number of messages in the channel `ch`, including those in flight."""
        (channel,) = self.http.ask(stats(topic))["topics"][0]["channels"]
        return channel["depth"] + channel["in_flight_count"] + channel["deferred_count"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("tokens")
    certificates, auth_file = Certificates.make(folder / "certificates"), AuthFile(folder)
    flags = [*certificates.flags, "--tls-required=true", f"--auth-file={auth_file.path}"]
    with qcli_serve(folder / "data", *flags) as broker:
        address = f"https://{broker.https_address}"
        http = BrokerHTTP(address, TLSFiles(certificates.ca), Secret(SECRETS["all"]))
        yield Guarded(broker, http, ["--tls", f"--ca={certificates.ca}"])


@each_client
def test_tokens_over_tls(guarded: Guarded, client: Client) -> None:
    topic, bodies = f"tokens.{client.name}", some_bodies(20)
    guarded.http.post("/topic/create", {"topic": topic})
    guarded.http.post("/channel/create", {"topic": topic, "channel": "ch"})
    if client.name in ONLY_CONSUMES:
        for body in bodies:
            guarded.http.post("/pub", {"topic": topic}, body)
    else:
        connection = guarded.connection(SECRETS["publish"])
        client.publish(guarded.broker.tcp_address, topic, bodies[:10], connection=connection)
        client.publish(guarded.broker.tcp_address, topic, bodies[10:], batch=10, connection=connection)
    connection = guarded.connection(SECRETS["consume"])
    with client.subscribe(
        guarded.broker.tcp_address, topic, "ch", len(bodies), connection=connection
    ) as subscriber:
        assert Counter(subscriber.rest()) == counted(bodies)
    assert guarded.depth(topic) == 0


@each_client
@pytest.mark.parametrize(
    ("token", "refusal"),
    [
        pytest.param(UNKNOWN, "AUTH failed: the token is unknown, expired or revoked", id="unknown"),
        pytest.param(SECRETS["publish"], "AUTH failed for SUB on", id="other role"),
    ],
)
def test_refused_tokens(guarded: Guarded, client: Client, token: str, refusal: str) -> None:
    topic = f"refused.{client.name}"
    guarded.http.post("/topic/create", {"topic": topic})
    with (
        client.subscribe(
            guarded.broker.tcp_address, topic, "ch", 1, connection=guarded.connection(token)
        ) as subscriber,
        pytest.raises(pytest.fail.Exception, match=refusal),
    ):
        subscriber.rest()
