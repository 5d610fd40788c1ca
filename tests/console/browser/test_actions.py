"""Each action in a browser, with JavaScript and without: on all brokers, after a page that asks for confirmation."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from cli.support import Cli, fail_messages
from console.browser.links import get
from console.browser.lively_fleet import LivelyFleet
from console.browser.support import (
    PHONE,
    Visitor,
    accessibility_faults,
    confirm,
    done,
    overflow_px,
    small_targets,
)
from fleet.support import Fleet, running_fleet, wait_until
from interop.peers import Broker, RunningConsole, qcli_admin
from soak import in_soak

pytestmark = pytest.mark.interop

_numbers = count()

both = pytest.mark.parametrize("javascript", [True, False])
mostly = pytest.mark.parametrize("javascript", [True, *in_soak(False)])
"""For forms that `tests/console` sends without a browser, as one does without JavaScript."""


@pytest.fixture
def fleet(lively: LivelyFleet) -> Fleet:
    """The fleet; each test has topics of its own."""
    return lively.fleet


@pytest.fixture
def topic() -> str:
    """A new name for a topic."""
    return f"act{next(_numbers)}"


def stats(broker: Broker, topic: str) -> dict[str, Any]:
    """Return the statistics of a topic; empty if the broker does not have it."""
    found = json.loads(broker.http("GET", "/stats", format="json", topic=topic))["topics"]
    return dict(found[0]) if found else {}


def channel(broker: Broker, topic: str, name: str) -> dict[str, Any]:
    """Return the statistics of a channel."""
    (found,) = [each for each in stats(broker, topic)["channels"] if each["channel_name"] == name]
    return dict(found)


def has_depth(broker: Broker, topic: str, depth: int) -> bool:
    """Return whether the channel `work` has this depth."""
    return bool(channel(broker, topic, "work")["depth"] == depth)


def fill(fleet: Fleet, topic: str, each: int) -> None:
    """Create a topic with the channel `work`, and publish to each broker."""
    fleet.create(topic, "work")
    for broker in fleet.brokers:
        Cli("", broker.http_address).publish(topic, [b'{"n": %d}' % number for number in range(each)])
        wait_until(partial(has_depth, broker, topic, each), "all arrived")


def await_known(console: RunningConsole, fleet: Fleet, topic: str, name: str = "work") -> None:
    """Wait until the console has seen a channel on all brokers that have it: it asks them every two seconds."""
    path = f"/topics/{topic}/{name}"
    having = [
        broker.http_address
        for broker in fleet.brokers
        if any(each["channel_name"] == name for each in (stats(broker, topic).get("channels") or ()))
    ]

    def is_shown() -> bool:
        page = get(console.http_address, path)
        return page.status == 200 and all(address.encode() in page.body for address in having)

    wait_until(is_shown, f"{path} is shown with {having}")


@both
def test_create(
    console: RunningConsole, fleet: Fleet, visit: Callable[..., Visitor], topic: str, javascript: bool
) -> None:
    visitor = visit(console.origin, javascript=javascript)
    page = visitor.open("/")
    page.get_by_role("link", name="Create topic").click()
    with visitor.expects("status of 422"):
        page.get_by_label("Topic").fill("not a name")
        page.get_by_role("button", name="Create", exact=True).click()
        expect(page.get_by_role("alert")).to_contain_text("is no name")
    page.get_by_label("Topic").fill(topic)
    page.get_by_label("Channel").fill("work")
    page.get_by_role("button", name="Create", exact=True).click()
    done(page)
    assert all(channel(broker, topic, "work") for broker in fleet.brokers)


@both
def test_pause_empty_and_delete(
    console: RunningConsole, fleet: Fleet, visit: Callable[..., Visitor], topic: str, javascript: bool
) -> None:
    fill(fleet, topic, 7)
    await_known(console, fleet, topic)
    visitor = visit(console.origin, javascript=javascript)
    page = visitor.open(f"/topics/{topic}/work")
    page.get_by_role("link", name="Pause", exact=True).click()
    confirm(page, "Pause channel")
    done(page)
    assert all(channel(broker, topic, "work")["paused"] for broker in fleet.brokers)
    page.get_by_role("link", name="Unpause", exact=True).click()
    confirm(page, "Unpause channel")
    done(page)
    assert not any(channel(broker, topic, "work")["paused"] for broker in fleet.brokers)

    page.get_by_role("link", name="Empty", exact=True).click()
    expect(page.locator("tr.sum")).to_contain_text("21")  # of three brokers
    if javascript:
        assert accessibility_faults(page) == []
    confirm(page, "Empty channel", f"{topic}/work")
    done(page)
    assert [channel(broker, topic, "work")["depth"] for broker in fleet.brokers] == [0, 0, 0]

    visitor.open(f"/topics/{topic}")
    page.get_by_role("link", name="Delete", exact=True).click()
    page.get_by_label(f"Type {topic} to confirm").fill("another")
    delete = page.get_by_role("button", name="Delete topic", exact=True)
    if javascript:
        expect(delete).to_be_disabled()
    else:
        with visitor.expects("status of 422"):
            delete.click()
            expect(page.get_by_role("alert")).to_be_visible()
    assert all(stats(broker, topic) for broker in fleet.brokers)
    confirm(page, "Delete topic", topic)
    done(page)
    assert not any(stats(broker, topic) for broker in fleet.brokers)


@mostly
def test_time_travel(
    console: RunningConsole, fleet: Fleet, visit: Callable[..., Visitor], topic: str, javascript: bool
) -> None:
    """Forward and back; nsqd takes no part. What is shown before is what happens."""
    fill(fleet, topic, 5)
    await_known(console, fleet, topic)
    page = visit(console.origin, javascript=javascript).open(f"/topics/{topic}/work/seek")
    expect(page.locator("main")).to_contain_text(fleet.nsqd.http_address)  # it cannot
    page.get_by_label("The end: skip the backlog").check()
    page.get_by_role("button", name="Show what would happen").click()
    expect(page.locator("main")).to_contain_text("10 messages skipped")
    assert [channel(broker, topic, "work")["depth"] for broker in fleet.brokers] == [5, 5, 5]
    if javascript:
        assert accessibility_faults(page) == []
    confirm(page, "Move the channel", f"{topic}/work")
    done(page)
    assert [channel(broker, topic, "work")["depth"] for broker in fleet.brokers] == [0, 0, 5]
    page.goto(f"/topics/{topic}/work/seek")
    page.get_by_label("The oldest message that is kept").check()
    page.get_by_role("button", name="Show what would happen").click()
    expect(page.locator("main")).to_contain_text("10 messages delivered again")
    confirm(page, "Move the channel")
    done(page)
    assert [channel(broker, topic, "work")["depth"] for broker in fleet.brokers] == [5, 5, 5]


@mostly
def test_dead_letters(
    console: RunningConsole, fleet: Fleet, visit: Callable[..., Visitor], topic: str, javascript: bool
) -> None:
    """One goes back to its channel, the others are dropped."""
    broker, dead = fleet.ours[0], f"{topic}.dead"
    fleet.create(topic, "work")
    settings = json.dumps({"max_attempts": 1, "dead_letter_topic": dead}).encode()
    broker.put("/channel/settings", settings, topic=topic, channel="work")
    Cli("", broker.http_address).publish(topic, [b"failing %d" % number for number in range(3)])
    fail_messages(broker.tcp_address, topic, "work", 3)
    wait_until(lambda: stats(broker, dead).get("message_count") == 3, "the dead letters arrived")
    await_known(console, fleet, dead, "dead-letters")

    visitor = visit(console.origin, javascript=javascript)
    page = visitor.open(f"/dead-letters/{dead}")
    expect(page.locator("main")).to_contain_text(f"{topic}/work")
    expect(page.locator("main")).to_contain_text("requeued")
    page.locator("summary", has_text="failing 1").click()
    page.locator("tr", has_text="failing 1").get_by_role("checkbox").check()
    page.get_by_role("button", name="Requeue selected").click()
    done(page)
    assert channel(broker, topic, "work")["depth"] == 1
    visitor.open(f"/dead-letters/{dead}")
    page.get_by_role("button", name="Drop all").click()
    confirm(page, "Drop 2 dead letters", dead)
    done(page)
    assert channel(broker, dead, "dead-letters")["depth"] == 0


@mostly
def test_deferred_messages(
    console: RunningConsole, fleet: Fleet, visit: Callable[..., Visitor], topic: str, javascript: bool
) -> None:
    fleet.create(topic, "work")
    broker = fleet.ours[1]
    for number in range(3):
        broker.post("/pub", b"later %d" % number, topic=topic, defer=3_600_000 + number)
    wait_until(lambda: channel(broker, topic, "work")["deferred_count"] == 3, "all are deferred")
    await_known(console, fleet, topic)
    page = visit(console.origin, javascript=javascript).open(f"/topics/{topic}/work/deferred")
    page.locator("tr", has_text="later 1").get_by_role("checkbox").check()
    page.get_by_role("button", name="Cancel selected").click()
    confirm(page, "Cancel 1 message", f"{topic}/work")
    done(page)
    expect(page.locator("main")).not_to_contain_text("later 1")
    assert channel(broker, topic, "work")["deferred_count"] == 2


@mostly
def test_settings(
    console: RunningConsole, fleet: Fleet, visit: Callable[..., Visitor], topic: str, javascript: bool
) -> None:
    """A wrong value is refused; the preview shows what changes, and nsqd takes no part."""
    fill(fleet, topic, 5)
    await_known(console, fleet, topic)
    visitor = visit(console.origin, javascript=javascript)
    page = visitor.open(f"/topics/{topic}/work/settings")
    with visitor.expects("status of 422"):
        page.get_by_label("max_attempts", exact=True).fill("many")
        page.get_by_role("button", name="Preview").click()
        expect(page.get_by_role("alert").first).to_be_visible()
    page.get_by_label("max_attempts", exact=True).fill("4")
    page.get_by_role("button", name="Preview").click()
    confirm(page, "Change")
    done(page)
    for broker in fleet.ours:
        found = json.loads(broker.http("GET", "/channel/settings", topic=topic, channel="work"))
        assert found["max_attempts"] == 4


@mostly
def test_publish(
    console: RunningConsole, fleet: Fleet, visit: Callable[..., Visitor], topic: str, javascript: bool
) -> None:
    fleet.create(topic, "work")
    await_known(console, fleet, topic)
    page = visit(console.origin, javascript=javascript).open(f"/topics/{topic}/publish")
    page.get_by_label("Body").fill('{"by": "hand"}')
    page.locator("main").get_by_role("button", name="Publish").click()
    expect(page.get_by_role("status").filter(has_text="has stored")).to_be_visible()
    assert sum(stats(broker, topic)["message_count"] for broker in fleet.brokers) == 1


@pytest.fixture
def own_fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A fleet for this test alone."""
    with running_fleet(tmp_path, ours=1) as running:
        running.create("orders", "billing")
        yield running


def test_drain_and_tombstone(own_fleet: Fleet, visit: Callable[..., Visitor]) -> None:
    broker = own_fleet.ours[0]
    with qcli_admin(
        *(f"--lookupd-http-address={each}" for each in own_fleet.lookupd_addresses), "--poll-interval=200ms"
    ) as console:
        visitor = visit(console.origin)
        page = visitor.open(f"/nodes/{broker.http_address}")
        page.get_by_role("link", name="Drain", exact=True).click()
        confirm(page, "Drain")
        done(page)
        with pytest.raises(RuntimeError, match="DRAINING"):
            broker.post("/pub", b"x", topic="orders")
        page.get_by_role("link", name="Stop draining", exact=True).click()
        confirm(page, "End draining")
        done(page)
        broker.post("/pub", b"x", topic="orders")
        visitor.open(f"/nodes/{own_fleet.nsqd.http_address}")
        page.get_by_role("link", name="Tombstone and delete").first.click()
        confirm(page, "Tombstone and delete", "orders")
        done(page)
        assert not stats(own_fleet.nsqd, "orders")
        assert stats(broker, "orders")
        page.close()  # before the console ends


def test_definitions_on_a_phone_with_the_keyboard(
    console: RunningConsole, fleet: Fleet, visit: Callable[..., Visitor], topic: str
) -> None:
    """Also a file that is far too large is answered with a page."""
    visitor = visit(console.origin, size=PHONE)
    page = visitor.open("/")
    page.keyboard.press("g")
    page.keyboard.press("f")
    heading = page.get_by_role("heading", level=1)
    expect(heading).to_have_text("Definitions")

    def upload(content: bytes) -> None:
        file: Any = {"name": "d.json", "mimeType": "application/json", "buffer": content}
        page.locator("#definitions").set_input_files(file)
        page.get_by_role("button", name="Show changes").press("Enter")

    upload(b'{"version": 1, "topics": {"%s": {"paused": true}}}' % topic.encode())
    expect(heading).to_have_text("6 changes")
    assert accessibility_faults(page) == []
    assert (overflow_px(page), small_targets(page)) == (0, [])
    page.get_by_role("button", name="Apply 6 changes").press("Enter")
    expect(page.locator("#notice")).to_contain_text("6 changes made")
    for broker in fleet.brokers:
        assert stats(broker, topic)["paused"] is True
    with visitor.expects("status of 413"):
        upload(b" " * (10 * 1024 * 1024))
        expect(page.locator("main")).to_contain_text("8192 KiB")
