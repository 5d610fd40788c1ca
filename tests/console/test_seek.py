"""Time travel: positions, the dry run on each broker, and the move."""

import json
import shlex
from datetime import UTC, datetime
from functools import partial

import pytest

from cli.support import Cli, fail_messages
from console.acting import Site
from fleet.support import hung, wait_until
from interop.peers import Broker
from trio_nsq.console.actions.seek import destination


@pytest.mark.parametrize(
    ("kind", "value", "http", "qcli"),
    [
        ("earliest", "", "earliest", "earliest"),
        ("latest", "ignored", "latest", "latest"),
        ("ago", "2h", "-7200000ms", "2h"),
        ("ago", " 1d12h ", "-129600000ms", "1d12h"),
        ("time", "2026-11-23T14:05", "@2026-11-23T14:05:00Z", "2026-11-23T14:05:00Z"),
        (
            "time",
            "2026-11-23T14:05:01.25+01:00",
            "@2026-11-23T13:05:01.250000Z",
            "2026-11-23T13:05:01.250000Z",
        ),
        ("sequence", "0010", "10", "10"),
    ],
)
def test_positions(kind: str, value: str, http: str, qcli: str) -> None:
    found = destination(kind, value)
    assert (found.http, found.qcli, found.is_sequence) == (http, qcli, kind == "sequence")


@pytest.mark.parametrize(
    ("kind", "value", "error"),
    [
        ("ago", "2", "'2' has no unit"),
        ("ago", "soon", "'soon' is not a duration"),
        ("time", "yesterday", "'yesterday' is not a time"),
        ("time", "0001-01-01T00:00+14:00", "is not a time"),
        ("time", "1969-12-31T23:59", "is before 1970"),
        ("sequence", "-1", "'-1' is not a sequence"),
        ("sequence", "9" * 19, "is not a sequence"),
        ("sequence", "²", "is not a sequence"),
        ("", "", "choose where to"),
        ("elsewhere", "", "choose where to"),
    ],
)
def test_wrong_positions(kind: str, value: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        destination(kind, value)


def depth(broker: Broker, topic: str) -> int:
    found = broker.channel_stats(topic, "c")["depth"]
    assert isinstance(found, int)
    return found


def _has(broker: Broker, topic: str, messages: int) -> bool:
    return depth(broker, topic) == messages


def finished(site: Site, topic: str, *, messages: int = 5) -> None:
    """Publish to all brokers, with retention on ours, and finish everything."""
    site.fleet.create(topic, "c")
    for broker in site.fleet.ours:
        broker.put("/topic/settings", b'{"retention_time_ms": 3600000}', topic=topic)
    for broker in site.fleet.brokers:
        for number in range(messages):
            broker.post("/pub", b"%d" % number, topic=topic)
        # nsqd moves them from the topic to its channels after its answer.
        wait_until(partial(_has, broker, topic, messages), f"{broker.http_address} has {topic}")
        broker.http("POST", "/channel/empty", topic=topic, channel="c")
    site.await_known(topic, "c", *site.fleet.brokers)


def test_back_on_all_brokers_that_can(site: Site) -> None:
    finished(site, "back")
    form = site.get("/topics/back/c/seek")
    assert f"{site.fleet.nsqd.http_address} : it is an nsqd, which cannot do this" in form.text
    page = site.get("/topics/back/c/seek?to=ago&ago=1h&broker=")
    assert "10 messages delivered again, 0 messages skipped" in page.text
    for broker in site.fleet.ours:
        assert f"{broker.http_address} 5 0 5 0 0" in page.text
    assert [depth(broker, "back") for broker in site.fleet.brokers] == [0, 0, 0]
    done = site.send(page)
    assert "Channel back/c moved to the messages of the last 1h" in done.text
    for broker in site.fleet.ours:
        assert (
            f"{broker.http_address} : moved from sequence 5 to 0: 5 delivered again, 0 skipped" in done.text
        )
    assert f"left out: {site.fleet.nsqd.http_address} : it is an nsqd" in done.text
    assert [depth(broker, "back") for broker in site.fleet.brokers] == [5, 5, 0]


def test_command_of_a_move_does_the_same(site: Site) -> None:
    finished(site, "moves")
    midnight = datetime.now(UTC).strftime("%Y-%m-%dT00:00:00")
    for query in (
        "to=earliest",
        "to=ago&ago=90m",
        f"to=time&time={midnight}",
        "to=latest",
    ):
        page = site.get(f"/topics/moves/c/seek?{query}")
        program, *words = shlex.split(page.command)
        assert program == "qcli"
        done = Cli("", "")(*words, "--format", "json")
        assert done.code == 0, done.err
        moved = {record["broker"]: record for record in done.records}
        for broker in site.fleet.ours:
            move = moved[broker.http_address]
            numbers = (move["from_sequence"], move["to_sequence"], move["delivered_again"], move["skipped"])
            assert f"{broker.http_address} {' '.join(map(str, numbers))}" in page.text


def test_skipped_messages_want_the_name(site: Site) -> None:
    finished(site, "skips", messages=2)
    for broker in site.fleet.ours:
        broker.http("POST", "/channel/seek", topic="skips", channel="c", to="earliest")
    page = site.get("/topics/skips/c/seek?to=latest")
    assert "0 messages delivered again, 4 messages skipped" in page.text
    assert site.send(page, typed="skips").status == 422
    assert [depth(broker, "skips") for broker in site.fleet.ours] == [2, 2]
    assert "Channel skips/c moved to the end of the topic" in site.send(page, typed="skips/c").text
    assert [depth(broker, "skips") for broker in site.fleet.ours] == [0, 0]


def test_many_more_to_skip_are_shown_again(site: Site) -> None:
    finished(site, "rush", messages=1)
    page = site.get("/topics/rush/c/seek?to=latest")
    site.fleet.ours[0].post("/mpub", b"\n".join(b"%d" % number for number in range(150)), topic="rush")
    again = site.send(page)
    assert again.status == 422  # messages would be skipped now, so the name is wanted
    assert site.send(page, typed="rush/c").status == 409
    assert depth(site.fleet.ours[0], "rush") == 150


def test_sequence_is_for_one_broker(site: Site) -> None:
    finished(site, "seqs")
    wrong = site.get("/topics/seqs/c/seek?to=sequence&sequence=2")
    assert wrong.status == 422
    assert "each broker has its own sequences: choose one broker, or give a time" in wrong.text
    one = site.fleet.ours[1].http_address
    page = site.get(f"/topics/seqs/c/seek?to=sequence&sequence=2&broker={one}")
    assert page.command == f"qcli channel seek seqs/c --to 2 --yes --nsqd-http-address {one}"
    site.send(page)
    assert [depth(broker, "seqs") for broker in site.fleet.brokers] == [0, 3, 0]
    for broker in (site.fleet.nsqd.http_address, "127.0.0.1:1"):
        assert site.get(f"/topics/seqs/c/seek?to=latest&broker={broker}").status == 422


def test_one_broker_of_several(site: Site) -> None:
    finished(site, "single")
    one = site.fleet.ours[0].http_address
    site.send(site.get(f"/topics/single/c/seek?to=earliest&broker={one}"))
    assert [depth(broker, "single") for broker in site.fleet.brokers] == [5, 0, 0]


def test_nsqd_alone_cannot(site: Site) -> None:
    site.fleet.nsqd.create("stock", "c")
    site.await_known("stock", "c", site.fleet.nsqd)
    page = site.get("/topics/stock/c/seek?to=latest")
    assert "nsqd cannot move a channel" in page.text
    assert "It deletes messages when they are finished, and keeps no positions" in page.text


def test_hung_broker_is_named_and_the_other_moved(site: Site) -> None:
    finished(site, "stuck")
    with hung(site.fleet.ours[0]):
        page = site.get("/topics/stuck/c/seek?to=earliest")
        assert f"{site.fleet.ours[0].http_address} unknown: no answer within" in page.text
        done = site.send(page)
        assert "Partly done: channel stuck/c moved" in done.text
        assert f"failed: {site.fleet.ours[0].http_address} : no answer within" in done.text
    assert depth(site.fleet.ours[1], "stuck") == 5


def test_messages_in_flight_are_named(site: Site) -> None:
    finished(site, "flies", messages=1)
    broker = site.fleet.ours[0]
    broker.http("POST", "/channel/seek", topic="flies", channel="c", to="earliest")
    fail_messages(broker.tcp_address, "flies", "c", 1)
    page = site.get(f"/topics/flies/c/seek?to=latest&broker={broker.http_address}")
    assert "1 message skipped" in page.text
    stats = json.loads(broker.http("GET", "/stats", format="json", topic="flies"))
    assert stats["topics"][0]["channels"][0]["depth"] == 1
