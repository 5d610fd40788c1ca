"""Deferred messages on the pages: the calendar, the list and cancellation."""

import re
import shlex
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from cli.support import Cli
from console.acting import Page, Site
from fleet.support import hung
from interop.peers import Broker
from trio_nsq.console.actions.deferred import Bar, Counts, bars, slots

NOON = datetime(2026, 11, 23, 12, 34, tzinfo=UTC)
HOUR_MS = 3_600_000


def test_calendar_has_the_hours_of_today_then_days_then_the_rest() -> None:
    found = slots(NOON.timestamp())
    assert [slot.label for slot in found[:3]] == ["today, 12:00", "today, 13:00", "today, 14:00"]
    assert [slot.label for slot in found[11:14]] == ["today, 23:00", "tomorrow", "Wed 2026-11-25"]
    assert (found[0].start_s, found[-1].label, found[-1].end_s) == (None, "later", None)
    assert len(found) == 12 + 14 + 1
    for one, following in pairwise(found):
        assert one.end_s == following.start_s
    midnight = (NOON + timedelta(days=1)).replace(hour=0, minute=0)
    assert found[11].end_s == midnight.timestamp()


def test_last_minute_of_a_day() -> None:
    found = slots(datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp())
    assert [slot.label for slot in found[:3]] == ["today, 23:00", "tomorrow", "Sat 2027-01-02"]


def test_counts_of_all_brokers_are_added() -> None:
    calendar = slots(NOON.timestamp())
    ends = len(calendar) - 1
    first = Counts(10, 0, 0, [1] * 5 + [4] * (ends - 5))
    second = Counts(3, 0, 0, [0] * ends)
    found = bars(calendar, [first, second])
    assert [(number, bar.count) for number, bar in enumerate(found) if bar.count] == [
        (0, 1),
        (5, 3),
        (ends, 9),
    ]
    assert sum(bar.count for bar in found) == 13
    assert bars(calendar, []) == [Bar(slot, 0) for slot in calendar]


def deferring(site: Site, topic: str, *hours: int) -> str:
    """Publish messages deferred by these hours to all brokers; return the path of the page."""
    site.fleet.create(topic, "c", "other")
    for broker in site.fleet.brokers:
        for number in hours:
            most_ms = HOUR_MS if broker is site.fleet.nsqd else number * HOUR_MS  # nsqd refuses more
            broker.post("/pub", b"<b>in %d h</b>" % number, topic=topic, defer=min(number * HOUR_MS, most_ms))
    site.await_known(topic, "c", *site.fleet.brokers)
    return f"/topics/{topic}/c/deferred"


def deferred(broker: Broker, topic: str, channel: str = "c") -> int:
    found = broker.channel_stats(topic, channel)["deferred_count"]
    assert isinstance(found, int)
    return found


def boxes(page: Page) -> list[str]:
    return re.findall(r'name="message" value="([^"]*)"', page.html)


def test_what_is_due_on_all_brokers(site: Site) -> None:
    page = site.get(deferring(site, "due", 48, 48, 24 * 40))
    first, second = site.fleet.ours
    assert f"{first.http_address} 3 20" in page.text
    assert "All brokers 6" in page.text
    assert re.search(r"Messages \w{3} \d{4}-\d\d-\d\d 4 later 2", page.text)
    assert "<b>in 48 h</b>" in page.text
    assert "<b>in" not in page.html
    dues = [box.split()[0] for box in boxes(page)]
    assert sorted(dues) == sorted([first.http_address, second.http_address] * 3)
    assert f"{site.fleet.nsqd.http_address} : it is an nsqd, which cannot do this" in page.text


def test_cancel_selected_messages_of_two_brokers(site: Site) -> None:
    path = deferring(site, "some", 48, 49, 50)
    page = site.get(path)
    chosen = [boxes(page)[0], boxes(page)[1], boxes(page)[5]]
    action, hidden = page.form("Cancel selected")
    fields = [*hidden.items(), ("action", "cancel"), *(("message", each) for each in chosen)]
    question = site.post(action, fields)
    assert "Cancel 3 selected deferred messages of some/c" in question.text
    assert site.send(question, typed="some").status == 422
    # Hidden fields of one name: a browser sends all.
    inputs = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)"', question.html)
    done = site.post(path, [*inputs, ("typed", "some/c")])
    assert "3 deferred messages cancelled" in done.text
    assert sum(deferred(broker, "some") for broker in site.fleet.ours) == 3
    assert [deferred(broker, "some", "other") for broker in site.fleet.ours] == [3, 3]
    assert site.fleet.nsqd.channel_stats("some", "c")["deferred_count"] == 3
    again = site.post(path, [*inputs, ("typed", "some/c")])
    assert "no longer deferred" in again.text


def test_cancel_all_names_the_count_and_its_command_does_the_same(site: Site) -> None:
    states = []
    for way in ("page", "command"):
        topic = f"all.{way}"
        question = site.send(site.get(deferring(site, topic, 48, 49)), "cancel-all", action="cancel-all")
        assert f"Cancel 4 deferred messages of {topic}/c" in question.text
        if way == "page":
            assert "4 deferred messages cancelled" in site.send(question, typed=f"{topic}/c").text
        else:
            listing, ids, cancel = question.command.split(" | ")
            found = Cli("", "")(*shlex.split(listing)[1:])
            assert (found.code, ids) == (0, "jq -r .id"), found.err
            program, *words = shlex.split(cancel)[1:]
            done = Cli("", "")(*words, *(record["id"] for record in found.records))
            assert (program, done.code) == ("qcli", 0), done.err
        states.append([deferred(broker, topic) for broker in site.fleet.brokers])
    assert states == [[0, 0, 2], [0, 0, 2]]


def test_hung_broker_is_named_and_the_other_cancels(site: Site) -> None:
    path = deferring(site, "partly", 48)
    question = site.send(site.get(path), "cancel-all", action="cancel-all")
    with hung(site.fleet.ours[0]):
        done = site.send(question, typed="partly/c")
        assert "Partly done: 1 deferred message cancelled" in done.text
        assert f"failed: {site.fleet.ours[0].http_address} : no " in done.text
    assert [deferred(broker, "partly") for broker in site.fleet.ours] == [1, 0]


def test_empty_and_nsqd_only(site: Site) -> None:
    assert "No message is deferred" in site.get(deferring(site, "none")).text
    site.fleet.nsqd.create("stock", "c")
    site.await_known("stock", "c", site.fleet.nsqd)
    assert "nsqd cannot list deferred messages" in site.get("/topics/stock/c/deferred").text
