"""Streams and batches read a log once, at whatever addresses its broker is found, now and later."""

import json
from pathlib import Path

import pytest

from cli.support import Cli
from interop.peers import Broker, free_address, qcli_serve
from spark.queries import Query, broker_on, options_for
from spark.support import cli_of, numbers
from trio_nsq.client.errors import BrokerUnreachable
from trio_nsq.spark.data_source import NsqDataSource
from trio_nsq.spark.source.options import SourceError

HOSTS = ("localhost", "127.0.0.1", "[::ffff:127.0.0.1]")


def spelled(broker: Broker, *hosts: str) -> str:
    port = broker.http_address.rpartition(":")[2]
    return ",".join(f"{host}:{port}" for host in hosts)


def free_port() -> str:
    """Return a port that no other server gets while none listens there."""
    return free_address().rpartition(":")[2]


def of_older_version(checkpoint: list[str]) -> list[str]:
    """Return the offsets as a version wrote them that knew a log by the address of its broker only."""
    offsets = [json.loads(each) for each in checkpoint]
    for offset in offsets:
        for position in offset.values():
            assert position.pop("incarnation")
    return [json.dumps(each) for each in offsets]


def everything(query: Query) -> list[tuple[str, int]]:
    return [(broker, seq) for batch in query.batches() for broker, seq in batch]


@pytest.mark.parametrize("older", [False, True], ids=["", "of an older version"])
def test_stream_goes_on_at_another_spelling(broker: Broker, qcli: Cli, topic: str, older: bool) -> None:
    qcli.publish(topic, numbers(20))
    query = Query([], **options_for(qcli, topic))
    assert everything(query) == [(broker.http_address, n) for n in range(20)]
    checkpoint = of_older_version(query.checkpoint) if older else query.checkpoint
    again = Query(checkpoint, topic=topic, nsqdHttpAddress=spelled(broker, "localhost"))
    qcli.publish(topic, numbers(10))
    # The name stays, so that broker and seq identify a message.
    assert everything(again) == [(broker.http_address, n) for n in range(20, 30)]
    both = Query(again.checkpoint, topic=topic, nsqdHttpAddress=spelled(broker, *HOSTS))
    qcli.publish(topic, numbers(5))
    assert everything(both) == [(broker.http_address, n) for n in range(30, 35)]


@pytest.mark.parametrize("filled", [True, False], ids=["with messages", "empty at first"])
def test_stream_of_several_spellings(broker: Broker, qcli: Cli, topic: str, filled: bool) -> None:
    broker.create(topic)
    query = Query([], topic=topic, nsqdHttpAddress=spelled(broker, *HOSTS))
    if not filled:
        assert everything(query) == []
    qcli.publish(topic, numbers(20))
    assert sorted(n for _, n in everything(query)) == [*range(20)]
    # Only one of them is needed later.
    again = Query(query.checkpoint, topic=topic, nsqdHttpAddress=spelled(broker, HOSTS[-1]))
    qcli.publish(topic, numbers(3))
    assert [n for _, n in everything(again)] == [20, 21, 22]


def test_batch_of_several_spellings(broker: Broker, qcli: Cli, topic: str) -> None:
    qcli.publish(topic, numbers(20))
    source = NsqDataSource(
        {"topic": topic, "nsqdHttpAddress": spelled(broker, *HOSTS), "columns": "broker,seq"}
    )
    planner = source.reader(source.schema())
    assert [n for each in planner.partitions() for n in range(*each.span)] == [*range(20)]


def test_batch_from_the_offset_of_a_stream(broker: Broker, qcli: Cli, topic: str) -> None:
    """An entry of the offset is found by the identity of the log."""
    qcli.publish(topic, numbers(20))
    query = Query([], **options_for(qcli, topic))
    assert len(everything(query)) == 20
    qcli.publish(topic, numbers(3))
    address = spelled(broker, "localhost")
    source = NsqDataSource(
        {"topic": topic, "nsqdHttpAddress": address, "startingOffsets": query.checkpoint[-1]}
    )
    planner = source.reader(source.schema())
    assert [n for each in planner.partitions() for n in range(*each.span)] == [20, 21, 22]


def test_planned_batch_is_read_at_the_new_address(tmp_path: Path) -> None:
    with broker_on(tmp_path / "data") as (broker, old):
        cli_of(broker).publish("t", numbers(20))
        query = Query([], topic="t", nsqdHttpAddress=broker.http_address)
        assert query.plan()
        name = broker.http_address
    with broker_on(tmp_path / "data") as (broker, new):
        assert new != old
        again = Query(query.checkpoint, topic="t", nsqdHttpAddress=broker.http_address)
        assert again.rows() == [(name, n) for n in range(20)]
        cli_of(broker).publish("t", numbers(5))
        assert everything(again) == [(name, n) for n in range(20, 25)]


def test_running_stream_goes_on_at_the_new_address(tmp_path: Path) -> None:
    """The query has both addresses, and the broker is at one of them."""
    with broker_on(tmp_path / "data") as (broker, old):
        cli_of(broker).publish("t", numbers(20))
        name, other = broker.http_address, "localhost:1"
    with broker_on(tmp_path / "data") as (broker, _):
        other = broker.http_address
    both = f"{name},{other}"
    with broker_on(tmp_path / "data", old):
        query = Query([], topic="t", nsqdHttpAddress=both)
        assert everything(query) == [(name, n) for n in range(20)]
    with broker_on(tmp_path / "data", other.rpartition(":")[2]) as (broker, _):
        cli_of(broker).publish("t", numbers(5))
        assert everything(query) == [(name, n) for n in range(20, 25)]
    with broker_on(tmp_path / "data", old) as (broker, _):
        cli_of(broker).publish("t", numbers(5))
        found: list[tuple[str, int]] = []
        while len(found) < 5:  # it is asked again after a pause
            found += everything(query)
        assert found == [(name, n) for n in range(25, 30)]


def test_brokers_that_change_places(tmp_path: Path) -> None:
    with broker_on(tmp_path / "1") as (one, here), broker_on(tmp_path / "2") as (two, there):
        cli_of(one).publish("t", numbers(20))
        cli_of(two).publish("t", numbers(10))
        names = one.http_address, two.http_address
        query = Query([], topic="t", nsqdHttpAddress=",".join(names))
        assert sorted(everything(query)) == sorted(
            [(names[0], n) for n in range(20)] + [(names[1], n) for n in range(10)]
        )
    with broker_on(tmp_path / "1", there) as (one, _), broker_on(tmp_path / "2", here) as (two, _):
        cli_of(one).publish("t", numbers(2))
        cli_of(two).publish("t", numbers(3))
        again = Query(query.checkpoint, topic="t", nsqdHttpAddress=",".join(names))
        for each in (query, again):  # one was running, the other is started again
            assert sorted(everything(each)) == sorted(
                [(names[0], n) for n in (20, 21)] + [(names[1], n) for n in (10, 11, 12)]
            )
            each.checkpoint[:] = each.checkpoint[:-1]


@pytest.mark.parametrize("fails", ["true", "false"])
@pytest.mark.parametrize("topics", [{"topic": "t"}, {"subscribePattern": "t"}], ids=["topic", "pattern"])
def test_planned_batch_waits_for_a_broker_that_has_moved(
    broker: Broker, tmp_path: Path, topics: dict[str, str], fails: str
) -> None:
    """Only the address where the broker was found first is in the checkpoint."""
    broker.create("t")
    options = {**topics, "failOnDataLoss": fails, "patienceMs": "500"}
    checkpoint: list[str] = []

    def query(other: str) -> Query:
        return Query(checkpoint, nsqdHttpAddress=f"{broker.http_address},{other}", **options)

    with broker_on(tmp_path) as (moving, _):
        cli_of(moving).publish("t", numbers(5))
        name = moving.http_address
        before = everything(query(name))
    port = free_port()
    with broker_on(tmp_path, port) as (moving, _):
        cli_of(broker).publish("t", numbers(3))
        cli_of(moving).publish("t", numbers(7))
        assert query(moving.http_address).plan()
    with pytest.raises(BrokerUnreachable, match=moving.http_address):
        query(moving.http_address).rows()
    with broker_on(tmp_path, port):
        again = query(moving.http_address)
        rows = again.rows()
        assert [row for row in rows if row[-2] == name] == [(*rows[-1][:-2], name, n) for n in range(5, 12)]
        assert len(rows) - 7 == 3 + len(everything(again)) == 3
    assert len(before) >= 5


@pytest.mark.parametrize("planned", [True, False], ids=["planned before", "next"])
@pytest.mark.parametrize("has_topic", [True, False], ids=["", "without the topic"])
def test_another_broker_at_the_address_while_the_new_one_is_away(
    tmp_path: Path, planned: bool, has_topic: bool
) -> None:
    """The log is not replaced: it may be at the address that does not answer."""
    options = {"topic": "t", "patienceMs": "500"}
    here, there = free_port(), free_port()
    with broker_on(tmp_path / "1", here) as (one, _), broker_on(tmp_path / "2", there) as (two, _):
        cli_of(one).publish("t", numbers(5))
        both = f"{one.http_address},{two.http_address}"
        query = Query([], nsqdHttpAddress=both, **options)
        (query.plan if planned else query.batches)()
    with broker_on(tmp_path / "2", here) as (two, _):
        if has_topic:
            cli_of(two).publish("t", numbers(2))
        again = Query(query.checkpoint, nsqdHttpAddress=both, **options)
        with pytest.raises(BrokerUnreachable, match=f":{there} "):
            (again.rows if planned else again.plan)()
        with broker_on(tmp_path / "1", there) as (one, _):
            cli_of(one).publish("t", numbers(3))
            again = Query(query.checkpoint, nsqdHttpAddress=both, **options)
            found = (again.rows() if planned else []) + everything(again)
    name = f"127.0.0.1:{here}"
    assert sorted(n for broker, n in found if broker == name) == [*range(0 if planned else 5, 8)]
    assert len(found) == (8 if planned else 3) + 2 * has_topic


def test_log_of_a_broker_that_has_left_its_address_to_another(tmp_path: Path) -> None:
    """It is removed, although another broker has its address."""
    with broker_on(tmp_path / "1") as (one, here):
        cli_of(one).publish("t", numbers(5))
        address = one.http_address
        query = Query([], topic="t", nsqdHttpAddress=address)
        assert len(everything(query)) == 5
    with broker_on(tmp_path / "1") as (one, _), broker_on(tmp_path / "2", here) as (two, _):
        cli_of(two).publish("t", numbers(2))
        both = Query(query.checkpoint, topic="t", nsqdHttpAddress=f"{address},{one.http_address}")
        assert len(everything(both)) == 2
        cli_of(one).publish("t", numbers(2))
        with pytest.raises(
            SourceError, match=f"broker {address}, which nsqdHttpAddress does not have: add it"
        ):
            Query(query.checkpoint, topic="t", nsqdHttpAddress=address).plan()


def test_log_that_no_address_has_is_missed(broker: Broker, qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(20))
    query = Query([], **options_for(qcli, topic))
    assert len(everything(query)) == 20
    with qcli_serve(tmp_path / "data") as other:
        cli_of(other).publish(topic, numbers(20))
        again = Query(query.checkpoint, topic=topic, nsqdHttpAddress=other.http_address)
        with pytest.raises(SourceError, match="nsqdHttpAddress does not have: add it"):
            again.batch()
