"""Test third-party NSQ clients with our broker. The long form verifies the peer programs themselves, with nsqd."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from interop.deliveries import assert_drained, counted, some_bodies
from interop.peers import CLIENTS, Broker, Client, nsqd, qcli_serve
from soak import in_soak

pytestmark = pytest.mark.interop

each_client = pytest.mark.parametrize("client", [pytest.param(client, id=client.name) for client in CLIENTS])

DEFERRED = "deferred."


@pytest.fixture(scope="module", params=[qcli_serve, *in_soak(nsqd)], ids=["ours", "nsqd"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    start: Callable[[Path], AbstractContextManager[Broker]] = request.param
    data_path = tmp_path_factory.mktemp("broker") / "data"
    # Created before a restart, because nsqd starts the timers of a new channel only after some seconds.
    with start(data_path) as first_run:
        for client in CLIENTS:
            first_run.create(DEFERRED + client.name, "ch")
    with start(data_path) as second_run:
        yield second_run


@each_client
def test_every_body_is_delivered_unchanged(broker: Broker, client: Client) -> None:
    topic = f"bodies.{client.name}"
    broker.create(topic, "ch")
    bodies = some_bodies(240)
    client.publish(broker.tcp_address, topic, bodies[::2])
    client.publish(broker.tcp_address, topic, bodies[1::2], batch=50)
    with client.subscribe(broker.tcp_address, topic, "ch", len(bodies), touch=True) as subscriber:
        assert Counter(subscriber.rest()) == counted(bodies)
    assert_drained(broker, topic, "ch")


@each_client
def test_client_gets_requeued_message_with_more_attempts(broker: Broker, client: Client) -> None:
    topic = f"requeued.{client.name}"
    broker.create(topic, "ch")
    bodies = some_bodies(60)
    client.publish(broker.tcp_address, topic, bodies, batch=len(bodies))
    with client.subscribe(broker.tcp_address, topic, "ch", len(bodies), requeue_first=True) as subscriber:
        assert Counter(subscriber.rest()) == counted(bodies, attempts=2)
    assert_drained(broker, topic, "ch")
    assert broker.channel_stats(topic, "ch")["requeue_count"] == len(bodies)


@each_client
def test_deferred_message_is_delivered_when_due(broker: Broker, client: Client) -> None:
    topic = DEFERRED + client.name
    bodies = some_bodies(20)
    with client.subscribe(broker.tcp_address, topic, "ch", len(bodies)) as subscriber:
        published = time.monotonic()
        client.publish(broker.tcp_address, topic, bodies, defer_ms=700)
        first = subscriber.next()
        waited_s = time.monotonic() - published
        assert first is not None
        assert Counter([first, *subscriber.rest()]) == counted(bodies)
    assert waited_s >= 0.7
    assert_drained(broker, topic, "ch")


@each_client
def test_channels_get_copies_and_consumers_share_them(broker: Broker, client: Client) -> None:
    """Each of two channels gets all messages, and two consumers of one channel receive at the same time."""
    topic = f"shared.{client.name}"
    address = broker.tcp_address
    broker.create(topic, "copied", "shared")
    bodies = some_bodies(40)
    half = len(bodies) // 2
    with (
        client.subscribe(address, topic, "copied", len(bodies)) as copy,
        client.subscribe(address, topic, "shared", half, max_in_flight=1, hold_first=True) as left,
        client.subscribe(address, topic, "shared", half, max_in_flight=1, hold_first=True) as right,
    ):
        client.publish(address, topic, bodies, batch=len(bodies))
        # Each consumer holds its first message until the other has one, so both receive at the same time.
        shared = [left.next(), right.next()]
        left.release()
        right.release()
        shared += left.rest()
        shared += right.rest()
        assert Counter(shared) == counted(bodies)
        assert Counter(copy.rest()) == counted(bodies)
    assert_drained(broker, topic, "copied")
    assert_drained(broker, topic, "shared")
