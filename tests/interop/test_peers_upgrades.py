"""TLS, compression, AUTH and backoff of NSQ clients nobody here wrote, with our broker; and with nsqd."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest

from interop.peers import CLIENTS, Broker, Client, nsqd, qcli_serve
from interop.same.certificates import Certificates
from interop.test_peers import assert_drained, counted, some_bodies

pytestmark = pytest.mark.interop

each_client = pytest.mark.parametrize("client", [pytest.param(client, id=client.name) for client in CLIENTS])
each_broker = pytest.mark.parametrize("broker", ["ours", "nsqd"], indirect=True)

UPGRADES = {
    "tls": ["--tls"],
    "snappy": ["--snappy"],
    "deflate": ["--deflate"],
    "tls-snappy": ["--tls", "--snappy"],
    "tls-deflate": ["--tls", "--deflate"],
}

UNABLE: dict[tuple[str, str], str] = {
    # client and upgrade: why the client cannot do it, with nsqd no more than with us
}


@dataclass(frozen=True)
class Secured:
    """A broker, and the certificates for its clients."""

    broker: Broker
    certificates: Certificates


def start(name: str) -> Callable[..., AbstractContextManager[Broker]]:
    return {"ours": qcli_serve, "nsqd": nsqd}[name]


@pytest.fixture(scope="module", params=["ours", "nsqd"])
def open_broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    """A broker with which TLS is possible."""
    folder = tmp_path_factory.mktemp("open")
    certificates = Certificates.make(folder / "certificates")
    with start(request.param)(folder / "data", *certificates.flags) as broker:
        yield Secured(broker, certificates)


@pytest.mark.parametrize("upgrade", UPGRADES)
@each_client
def test_messages_pass_through_an_upgraded_connection(
    open_broker: Secured, client: Client, upgrade: str
) -> None:
    if reason := UNABLE.get((client.name, upgrade)):
        with pytest.raises(pytest.fail.Exception):
            pass_messages(open_broker, client, upgrade)
        pytest.skip(reason)
    pass_messages(open_broker, client, upgrade)


def pass_messages(secured: Secured, client: Client, upgrade: str) -> None:
    broker = secured.broker
    topic = f"{upgrade}.{client.name}"
    broker.create(topic, "ch")
    connection = [*UPGRADES[upgrade], f"--ca={secured.certificates.ca}"]
    bodies = some_bodies(120)
    client.publish(broker.tcp_address, topic, bodies[::2], connection=connection)
    client.publish(broker.tcp_address, topic, bodies[1::2], batch=30, connection=connection)
    with client.subscribe(
        broker.tcp_address, topic, "ch", len(bodies), touch=True, hold_first=True, connection=connection
    ) as subscriber:
        first = subscriber.next()
        assert first is not None
        (seen,) = broker.channel_stats(topic, "ch")["clients"]
        assert {name for name in ("tls", "snappy", "deflate") if seen[name]} == set(upgrade.split("-"))
        subscriber.release()
        assert Counter([first, *subscriber.rest()]) == counted(bodies)
    assert_drained(broker, topic, "ch")
