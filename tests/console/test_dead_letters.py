"""Dead letters on the pages: counts, lists, filters, requeue and drop on several brokers."""

import json
import re
import shlex
from base64 import b64encode

import pytest

from cli.support import Cli, fail_messages
from console.acting import Page, Site
from console.support import console_of
from fleet.support import hung, wait_until
from interop.peers import Broker
from trio_nsq.console.actions.dead_letters import Filter, move
from trio_nsq.console.actions.listed_message import body_of

HOSTILE = b"<script>alert(1)</script>"


def count(broker: Broker, topic: str) -> int:
    """Return the number of letters in a dead-letter topic."""
    found = broker.channel_stats(topic, "dead-letters")["depth"]
    assert isinstance(found, int)
    return found


def failing(site: Site, topic: str, *bodies: bytes) -> str:
    """Make these messages of a topic dead letters on both brokers of ours; return the path of their page."""
    site.fleet.create(topic, "c", "d")
    for broker in site.fleet.ours:
        for channel in ("c", "d"):
            rule = {"max_attempts": 1, "dead_letter_topic": f"{topic}.dead"}
            broker.put("/channel/settings", json.dumps(rule).encode(), topic=topic, channel=channel)
        for body in bodies:
            broker.post("/pub", body, topic=topic)
        fail_messages(broker.tcp_address, topic, "c", len(bodies))
        wait_until(lambda broker=broker: has(broker, f"{topic}.dead", len(bodies)), "the letters")  # type: ignore[misc]
    site.await_known(f"{topic}.dead", "dead-letters", *site.fleet.ours)
    return f"/dead-letters/{topic}.dead"


def has(broker: Broker, topic: str, number: int) -> bool:
    try:
        return count(broker, topic) == number
    except (IndexError, RuntimeError):
        return False


def letters(page: Page) -> list[str]:
    """Return the values of the check boxes."""
    return re.findall(r'name="letter" value="([^"]*)"', page.html)


def test_overview_and_what_failed_where(site: Site) -> None:
    path = failing(site, "fails", b"one", HOSTILE, b"\xff\xfe")
    first, second = site.fleet.ours
    row = re.compile(rf"fails.dead 6 0 \S+ \S+ {first.http_address}: 3 {second.http_address}: 3")
    wait_until(lambda: bool(row.search(site.get("/dead-letters").text)), "the letters in the overview")
    overview = site.get("/dead-letters")
    assert f"fails/c {first.http_address} 1 fails.dead 3 0" in overview.text
    assert (
        "nsqd has no dead letters: it delivers a failing message again and again. This leaves out "
        in overview.text
    )
    page = site.get(path)
    assert "fails/c requeued 6" in page.text
    assert f"{first.http_address}: 3 {second.http_address}: 3" in page.text
    assert "<script>alert(1)</script>" in page.text
    assert "<script>alert" not in page.html
    assert "ff fe" in page.text
    assert "Not UTF-8: shown in hexadecimal digits." in page.text
    assert len(letters(page)) == 6
    links = re.findall(r'href="([^"]*)">The whole message', page.html)
    assert len(links) == 6
    assert "one" in site.get(links[0]).text


def test_requeue_one_to_its_channel(site: Site) -> None:
    path = failing(site, "once", b"a", b"b")
    page = site.get(path)
    action, hidden = page.form("requeue-selected")
    done = site.post(action, [*hidden.items(), ("letter", letters(page)[0]), ("action", "requeue-selected")])
    assert "1 dead letter of once.dead requeued" in done.text
    first, second = site.fleet.ours
    assert (count(first, "once.dead"), count(second, "once.dead")) == (1, 2)
    assert first.channel_stats("once", "c")["depth"] == 1
    assert first.channel_stats("once", "d")["depth"] == 2  # as before


def test_requeue_all_to_all_channels_names_the_count(site: Site) -> None:
    path = failing(site, "again", b"a", b"b", b"c")
    question = site.send(site.get(path), "requeue-all", action="requeue-all", to="topic")
    assert "Requeue 6 dead letters of again.dead" in question.text
    assert "published again to its topic of origin, for all channels" in question.text
    assert "--to-topic" in shlex.split(question.command)
    assert [count(broker, "again.dead") for broker in site.fleet.ours] == [3, 3]
    done = site.send(question)
    assert "6 dead letters of again.dead requeued" in done.text
    for broker in site.fleet.ours:
        assert f"{broker.http_address} : 3 requeued" in done.text
        assert broker.channel_stats("again", "d")["depth"] == 6
    assert [count(broker, "again.dead") for broker in site.fleet.ours] == [0, 0]


def test_drop_wants_the_name_and_its_command_does_the_same(site: Site) -> None:
    path = failing(site, "drops", b"a", b"b", b"c")
    page = site.get(path)
    action, hidden = page.form("drop-selected")
    chosen = letters(page)[1]
    question = site.post(action, [*hidden.items(), ("letter", chosen), ("action", "drop-selected")])
    assert "Drop 1 dead letter of drops.dead" in question.text
    assert site.send(question, typed="").status == 422
    assert [count(broker, "drops.dead") for broker in site.fleet.ours] == [3, 3]
    site.send(question, typed="drops.dead")
    assert [count(broker, "drops.dead") for broker in site.fleet.ours] == [2, 3]
    question = site.send(site.get(path), "drop-all", action="drop-all")
    done = Cli("", "")(*shlex.split(question.command)[1:])
    assert done.code == 0, done.err
    assert [count(broker, "drops.dead") for broker in site.fleet.ours] == [0, 0]
    gone = site.send(question, typed="drops.dead")
    assert "0 dead letters of drops.dead dropped" in gone.text


def test_filters_apply_to_the_list_and_to_all(site: Site) -> None:
    path = failing(site, "mixed", b"a", b"b")
    for broker in site.fleet.ours:
        fail_messages(broker.tcp_address, "mixed", "d", 1)
        wait_until(lambda broker=broker: has(broker, "mixed.dead", 4), "the message in flight, too")  # type: ignore[misc]
        broker.post("/pub", b"not a letter", topic="mixed.dead")
    page = site.get(f"{path}?origin=mixed/d&reason=requeued")
    assert len(letters(page)) == 2
    assert "published to this topic" in page.text
    question = site.send(page, "drop-all", action="drop-all")
    assert "All dead letters of mixed.dead from mixed/d with reason requeued: 2." in question.text
    site.send(question, typed="mixed.dead")
    assert [count(broker, "mixed.dead") for broker in site.fleet.ours] == [4, 4]
    question = site.send(site.get(path), "requeue-all", action="requeue-all")
    done = site.send(question)
    assert "3 requeued; 1 kept: they have no origin" in done.text
    assert [count(broker, "mixed.dead") for broker in site.fleet.ours] == [1, 1]


def test_many_more_letters_are_shown_again(site: Site) -> None:
    path = failing(site, "flood", b"a")
    question = site.send(site.get(path), "drop-all", action="drop-all")
    broker = site.fleet.ours[0]
    broker.post("/mpub", b"\n".join(b"%d" % number for number in range(150)), topic="flood.dead")
    again = site.send(question, typed="flood.dead")
    assert again.status == 409
    assert count(broker, "flood.dead") == 151


def test_pages_of_one_broker(site: Site) -> None:
    path = failing(site, "pages", *(b"%d" % number for number in range(25)))
    page = site.get(path)
    assert len(letters(page)) == 40
    following = re.findall(r'href="([^"]*from=[^"]*)">Next letters', page.html)
    assert len(following) == 2
    second = site.get(following[0].replace("&amp;", "&"))
    assert len(letters(second)) == 5
    assert {letter.partition(" ")[0] for letter in letters(second)} == {site.fleet.ours[0].http_address}


def test_hung_broker_is_named_and_the_other_requeued(site: Site) -> None:
    path = failing(site, "slow", b"a")
    with hung(site.fleet.ours[0]):
        page = site.get(path)
        assert f"{site.fleet.ours[0].http_address} does not answer: no " in page.text
        done = site.send(site.send(page, "requeue-all", action="requeue-all"))
        assert "Partly done: 1 dead letter of slow.dead requeued" in done.text
        assert f"failed: {site.fleet.ours[0].http_address} : no answer within" in done.text
    assert [count(broker, "slow.dead") for broker in site.fleet.ours] == [1, 0]


def test_forms_with_strange_fields_change_nothing(site: Site) -> None:
    path = failing(site, "strange", b"a")
    one = site.fleet.ours[0].http_address
    for fields in (
        {"action": "explode-all"},
        {"action": "requeue"},
        {"action": "requeue-selected", "letter": f"127.0.0.1:1 {'0' * 16}"},
        {"action": "requeue-selected", "letter": f"{one} ../../{'0' * 16}"},
        {"action": "requeue-selected", "letter": f"{one} {'0' * 16},{'1' * 16}"},
    ):
        page = site.post(path, fields)
        assert page.status in (200, 403), page.text
        assert [count(broker, "strange.dead") for broker in site.fleet.ours] == [1, 1]


def test_topics_without_dead_letters_say_why(site: Site) -> None:
    site.fleet.nsqd.create("nodead", "dead-letters")
    site.await_known("nodead", "dead-letters", site.fleet.nsqd)
    assert "nsqd has no dead letters" in site.get("/dead-letters/nodead").text
    assert "This topic has no dead letters" in site.get("/dead-letters/nothing").text


@pytest.mark.parametrize(
    ("line", "text", "is_binary", "is_cut"),
    [
        ({"body": "x" * 3000}, "x" * 2000, False, True),
        ({"body_base64": b64encode(b"\xff" * 3).decode()}, "ff ff ff", True, False),
        ({"body_base64": b64encode(b"\xff" * 300).decode()}, " ".join(["ff"] * 256), True, True),
        ({"body_base64": "!"}, "", True, False),
        ({"gap": "damaged"}, "damaged or missing in the log", False, False),
        ({"body": 7}, "no longer kept", False, False),
    ],
)
def test_bodies_in_lists(line: dict[str, object], text: str, is_binary: bool, is_cut: bool) -> None:
    found = body_of(line)
    assert (found.text, found.is_binary, found.is_cut) == (text, is_binary, is_cut)


def test_continuing_goes_on_from_a_sequence_of_each_broker(site: Site) -> None:
    path = failing(site, "rest", b"a", b"b", b"c")
    first, second = (broker.http_address for broker in site.fleet.ours)
    fields = [
        ("action", "drop-all"),
        ("start", f"{first} 1"),
        ("start", f"{second} 2"),
        ("start", "127.0.0.1:1 0"),
    ]
    done = site.post(path, fields)
    assert f"{first} : 2 dropped" in done.text
    assert f"{second} : 1 dropped" in done.text
    assert [count(broker, "rest.dead") for broker in site.fleet.ours] == [1, 2]


async def test_move_without_time_left_says_where_to_continue(site: Site) -> None:
    failing(site, "late", b"a")
    addresses = [broker.http_address for broker in site.fleet.ours]
    async with console_of(addresses) as console:
        done, stopped = await move(
            console.upstream,
            addresses,
            "late.dead",
            "drop",
            Filter(),
            starts={addresses[1]: 1},
            limit_s=-1,
        )
    assert [(done[each].done, done[each].next_sequence) for each in addresses] == [(0, 0), (0, 1)]
    assert stopped == {}
    assert [count(broker, "late.dead") for broker in site.fleet.ours] == [1, 1]
