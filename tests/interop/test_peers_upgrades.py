"""Test TLS, compression, AUTH and backoff of third-party NSQ clients with our broker; the long form also with nsqd."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from broker.auth_server import answer, authorization, threaded_auth_server
from interop.deliveries import assert_drained, counted, some_bodies
from interop.peers import CLIENT_DEADLINE_S, CLIENTS, Broker, Client, nsqd, qcli_serve
from interop.same.certificates import Certificates
from soak import SOAK, in_soak
from trio_nsq.http.messages import Request, Response

pytestmark = pytest.mark.interop

each_client = pytest.mark.parametrize("client", [pytest.param(client, id=client.name) for client in CLIENTS])

UPGRADES = {
    "tls": ["--tls"],
    "snappy": ["--snappy"],
    "deflate": ["--deflate"],
    "tls-snappy": ["--tls", "--snappy"],
    "tls-deflate": ["--tls", "--deflate"],
}
BOTH_COMPRESSED = ("tls-snappy", "tls-deflate")
EACH = [(client, upgrade) for client in CLIENTS for upgrade in UPGRADES]
SHORT = [each for each in EACH if each[0].name == "go-nsq" or each[1] in BOTH_COMPRESSED]
CASES = [*SHORT, *in_soak(*(each for each in EACH if each not in SHORT))]
"""All upgrades with one client, and those of two kinds at once with the others; all with all in the long form."""

# Limitations of the clients, with nsqd as well as with our broker.
ONLY_CONSUMES = {"gnsq"}
"""Its Producer treats the OK of an upgrade, and the reply to AUTH, as the reply to a publish that it never sent."""
NOTHING_IN_A_READ = {"pynsq"}
"""If a read contains no data that can be decompressed yet, the client treats the connection as lost. nsqd splits
compressed data that belongs together across several writes, so the client rarely completes one session. Our broker
sends it in one write, so the client works as long as messages are small and arrive one by one."""
SECRET = "correct horse"
HTTP_SECRET = "battery staple"
"""Permits all HTTP requests; our broker checks permissions over HTTP too."""


@dataclass(frozen=True)
class Brokers:
    """Our broker, in the long form nsqd, and the certificates for their clients."""

    ours: Broker
    nsqd: Broker | None
    certificates: Certificates

    def change_each(self, test: Callable[[Broker], None]) -> None:
        """Run the same test with all of them at once."""
        with ThreadPoolExecutor() as pool:
            brokers = [broker for broker in (self.ours, self.nsqd) if broker is not None]
            for done in [pool.submit(test, broker) for broker in brokers]:
                done.result()


def started(stack: ExitStack, folder: Path, flags: Callable[[Certificates], Sequence[str]]) -> Brokers:
    certificates = Certificates.make(folder / "certificates")
    ours = stack.enter_context(qcli_serve(folder / "ours", *flags(certificates)))
    theirs = stack.enter_context(nsqd(folder / "nsqd", *flags(certificates))) if SOAK else None
    return Brokers(ours, theirs, certificates)


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    """Run brokers with TLS and compression enabled."""
    with ExitStack() as stack:
        yield started(stack, tmp_path_factory.mktemp("upgrades"), lambda certificates: certificates.flags)


@pytest.fixture(scope="module")
def strict_brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    """Run brokers that require a client certificate and a secret."""

    def respond(request: Request) -> Response:
        if request.query["secret"] == HTTP_SECRET:
            return answer(authorization(".*", ".*", "publish", "read", "manage"))
        known = request.query["secret"] == SECRET and request.query["common_name"] == "client-name"
        return answer(authorization()) if known else answer()

    with ExitStack() as stack:
        auth_server = stack.enter_context(threaded_auth_server(respond))
        yield started(
            stack,
            tmp_path_factory.mktemp("strict"),
            lambda certificates: [
                *certificates.flags,
                f"--tls-root-ca-file={certificates.ca}",
                "--tls-client-auth-policy=require-verify",
                "--tls-required=tcp-https",
                f"--auth-http-address={auth_server.address}",
            ],
        )


def publish(broker: Broker, client: Client, topic: str, bodies: list[bytes], connection: list[str]) -> None:
    """Publish one by one and in batches, with this client if it can."""
    if client.name in ONLY_CONSUMES:
        for body in bodies:
            broker.post("/pub", body, topic=topic)
    else:
        half = len(bodies) // 2
        client.publish(broker.tcp_address, topic, bodies[:half], connection=connection)
        client.publish(broker.tcp_address, topic, bodies[half:], batch=10, connection=connection)


def consumer_of(broker: Broker, topic: str) -> dict[str, Any]:
    """Wait until a consumer has sent RDY; return its entry in `/stats`."""
    deadline = time.monotonic() + CLIENT_DEADLINE_S
    while time.monotonic() < deadline:
        for seen in broker.channel_stats(topic, "ch")["clients"]:
            if seen["ready_count"]:
                found: dict[str, Any] = seen
                return found
        time.sleep(0.05)  # leave CPU time for the client
    pytest.fail("the consumer never asked for messages")


@pytest.mark.parametrize(("client", "upgrade"), CASES, ids=lambda value: getattr(value, "name", value))
def test_messages_round_trip_over_an_upgraded_connection(
    brokers: Brokers, client: Client, upgrade: str
) -> None:
    topic = f"{upgrade}.{client.name}"
    connection = [*UPGRADES[upgrade], f"--ca={brokers.certificates.ca}"]
    limited = client.name in NOTHING_IN_A_READ and upgrade != "tls"
    bodies = [body for body in some_bodies(60) if len(body) <= (8_000 if limited else 65_536)]

    def test(broker: Broker) -> None:
        broker.create(topic, "ch")
        with client.subscribe(
            broker.tcp_address,
            topic,
            "ch",
            len(bodies),
            max_in_flight=1 if limited else 50,
            touch=True,
            connection=connection,
        ) as subscriber:
            seen = consumer_of(broker, topic)
            assert {name for name in ("tls", "snappy", "deflate") if seen[name]} == set(upgrade.split("-"))
            publish(broker, client, topic, bodies, connection)
            assert Counter(subscriber.rest()) == counted(bodies)
        assert_drained(broker, topic, "ch")

    if limited:
        test(brokers.ours)
    else:
        brokers.change_each(test)


@each_client
def test_client_connects_with_certificate_and_secret(strict_brokers: Brokers, client: Client) -> None:
    topic = f"secret.{client.name}"
    certificates = strict_brokers.certificates
    connection = [
        "--tls",
        f"--ca={certificates.ca}",
        f"--cert={certificates.pem('client')}",
        f"--key={certificates.key('client')}",
    ]
    bodies = some_bodies(20)

    def test(broker: Broker) -> None:
        broker = replace(broker, secret=HTTP_SECRET)
        broker.create(topic, "ch")
        publish(broker, client, topic, bodies, [*connection, f"--auth={SECRET}"])
        with client.subscribe(
            broker.tcp_address, topic, "ch", len(bodies), connection=[*connection, f"--auth={SECRET}"]
        ) as subscriber:
            assert Counter(subscriber.rest()) == counted(bodies)
        assert_drained(broker, topic, "ch")
        with (
            client.subscribe(
                broker.tcp_address, topic, "ch", 1, connection=[*connection, "--auth=wrong"]
            ) as subscriber,
            pytest.raises(pytest.fail.Exception, match="AUTH no authorizations found"),
        ):
            subscriber.rest()

    strict_brokers.change_each(test)


@each_client
def test_client_backs_off_after_a_failure(brokers: Brokers, client: Client) -> None:
    """The consumer lowers RDY to 0 for a while although the channel has messages, and then continues."""
    topic = f"failed.{client.name}"
    bodies = [b"%d" % number for number in range(5)]

    def test(broker: Broker) -> None:
        broker.create(topic, "ch")
        for body in bodies:
            broker.post("/pub", body, topic=topic)
        backed_off = False
        with client.subscribe(broker.tcp_address, topic, "ch", len(bodies), fail_first=True) as subscriber:
            while subscriber.running:
                channel = broker.channel_stats(topic, "ch")
                asks = [seen["ready_count"] for seen in channel["clients"]]
                waiting = channel["depth"] + channel["deferred_count"]  # some are requeued with a delay
                # A client that connects slowly may connect twice.
                asks_nothing = bool(asks) and not any(asks)
                backed_off |= asks_nothing and waiting > 0 and channel["requeue_count"] > 0
                time.sleep(0.02)  # leave CPU time for the client
            assert Counter(subscriber.rest()) == counted(bodies, attempts=2)
        assert backed_off
        assert_drained(broker, topic, "ch")
        assert broker.channel_stats(topic, "ch")["requeue_count"] == len(bodies)

    brokers.change_each(test)
