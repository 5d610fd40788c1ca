"""Changes on a fleet: who gets which request, and what is reported about servers that fail."""

import json
from collections.abc import Iterator

import pytest

from console.support import console_of
from fleet.support import Fleet, hung, nodes, running_fleet, take_down, wait_until
from trio_nsq.console.actions.cluster import apply, tombstone
from trio_nsq.fleet.changes import Change, Places, Step, rounds

PLACES = Places(
    lookupds=("l1", "l2"), brokers=("b1", "b2"), listed={"l1": ["b1:1", "b2:1"], "l2": []}, may_create=()
)


def shown(plan: list[list[Step]]) -> list[list[str]]:
    """Return the requests as text."""

    def text(step: Step) -> str:
        return " ".join([step.server, step.request.path, *step.request.params.values()])

    return [[text(step) for step in steps] for steps in plan]


def test_pause_goes_to_the_brokers_only() -> None:
    assert shown(rounds(Change("pause", "t", "c"), PLACES)) == [
        ["b1 /channel/pause t c", "b2 /channel/pause t c"]
    ]


def test_create_topic_goes_to_discovery_services_or_else_to_the_brokers() -> None:
    assert shown(rounds(Change("create", "t"), PLACES)) == [["l1 /topic/create t", "l2 /topic/create t"]]
    direct = Places(brokers=("b1",), may_create=("b1",))
    assert shown(rounds(Change("create", "t"), direct)) == [["b1 /topic/create t"]]


def test_create_channel_creates_the_topic_first() -> None:
    assert shown(rounds(Change("create", "t", "c"), PLACES)) == [
        ["l1 /topic/create t", "l2 /topic/create t"],
        [
            "l1 /channel/create t c",
            "l2 /channel/create t c",
            "b1 /channel/create t c",
            "b2 /channel/create t c",
        ],
    ]


def test_delete_topic_hides_deletes_and_forgets() -> None:
    assert shown(rounds(Change("delete", "t"), PLACES)) == [
        ["l1 /topic/tombstone t b1:1", "l1 /topic/tombstone t b2:1"],
        ["b1 /topic/delete t", "b2 /topic/delete t"],
        ["l1 /topic/delete t", "l2 /topic/delete t"],
    ]


def test_delete_channel_hides_no_broker() -> None:
    assert shown(rounds(Change("delete", "t", "c"), PLACES)) == [
        [],
        ["b1 /channel/delete t c", "b2 /channel/delete t c"],
        ["l1 /channel/delete t c", "l2 /channel/delete t c"],
    ]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), ours=2) as running:
        yield running


@pytest.mark.interop
async def test_every_action_on_a_mixed_fleet(fleet: Fleet) -> None:
    fleet.create("mixed", "a")
    async with console_of(lookupd_addresses=fleet.lookupd_addresses) as console:
        for change in (
            Change("pause", "mixed"),
            Change("unpause", "mixed"),
            Change("create", "mixed", "b"),
            Change("pause", "mixed", "b"),
            Change("empty", "mixed", "b"),
        ):
            outcome = await apply(console, change)
            assert (outcome.failed, outcome.missing) == ([], []), change
            assert sorted(outcome.brokers) == sorted(fleet.http_addresses)
        for broker in fleet.brokers:
            assert broker.channel_stats("mixed", "b")["paused"] is True
            assert broker.channel_stats("mixed", "a")["paused"] is False
        outcome = await apply(console, Change("delete", "mixed", "b"))
        assert outcome.failed == []
        outcome = await apply(console, Change("delete", "mixed"))
        assert outcome.failed == []
        for broker in fleet.brokers:
            assert b"mixed" not in broker.http("GET", "/stats", format="json")
        for lookupd in fleet.lookupds:
            wait_until(lambda lookupd=lookupd: b"mixed" not in lookupd.http("GET", "/topics"), "forgotten")  # type: ignore[misc]


@pytest.mark.interop
async def test_missing_channel_is_told_for_each_server(fleet: Fleet) -> None:
    fleet.create("known")
    async with console_of(lookupd_addresses=fleet.lookupd_addresses) as console:
        outcome = await apply(console, Change("pause", "known", "absent"))
        assert sorted(step.server for step in outcome.missing) == sorted(fleet.http_addresses)
        assert (outcome.done, outcome.failed) == ([], [])
        outcome = await apply(console, Change("pause", "absent"))
        assert list(outcome.steps) == []
        assert {error.code for error in outcome.lookups} == {"TOPIC_NOT_FOUND"}


@pytest.mark.interop
async def test_tombstone_hides_one_broker_and_deletes_the_topic_there(fleet: Fleet) -> None:
    fleet.create("hidden")
    node = fleet.ours[0].http_address
    async with console_of(lookupd_addresses=fleet.lookupd_addresses) as console:
        outcome = await tombstone(console, "hidden", node)
        assert outcome.failed == []
        marks = {
            (each["http_port"], mark)
            for each in nodes(fleet.lookupds[1])
            for topic, mark in zip(each["topics"], each["tombstones"], strict=True)
            if topic == "hidden"
        }
        assert {port for port, mark in marks if mark} == {int(node.rpartition(":")[2])}
        outcome = await tombstone(console, "hidden", node, node)
        assert outcome.brokers == [node]
    assert b"hidden" not in fleet.ours[0].http("GET", "/stats", format="json")
    assert b"hidden" in fleet.ours[1].http("GET", "/stats", format="json")


@pytest.mark.interop
async def test_brokers_that_hang_or_are_down_delay_no_other(fleet: Fleet) -> None:
    fleet.create("wounded")
    addresses = fleet.http_addresses
    with hung(fleet.ours[0]):
        take_down(fleet.ours[1])
        async with console_of(addresses, request_timeout_ms=500) as console:
            outcome = await apply(console, Change("pause", "wounded"))
    assert outcome.brokers == [fleet.nsqd.http_address]
    assert [step.server for step in outcome.failed] == addresses[:2]
    hanging, down = (step.error for step in outcome.failed)
    assert hanging is not None
    assert "no answer within 0.5 s" in hanging.reason
    assert down is not None
    assert down.status == 0
    (topic,) = json.loads(fleet.nsqd.http("GET", "/stats", format="json", topic="wounded"))["topics"]
    assert topic["paused"] is True
