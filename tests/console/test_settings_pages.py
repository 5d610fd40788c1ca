"""Settings on the pages: in force, where they come from, preview and change."""

import json
import shlex
from typing import Any

import pytest

from cli.support import Cli
from console.acting import Page, Site
from interop.peers import Broker
from trio_nsq.console.actions.settings import changes_of, values


def in_force(broker: Broker, topic: str, channel: str = "") -> dict[str, Any]:
    names = {"topic": topic} | ({"channel": channel} if channel else {})
    found: dict[str, Any] = json.loads(
        broker.http("GET", f"/{'channel' if channel else 'topic'}/settings", **names)
    )
    return found


def prepared(site: Site, topic: str) -> str:
    """Create a topic with a channel on all brokers, and return the path of its settings."""
    site.fleet.create(topic, "c")
    site.await_known(topic, "c", *site.fleet.brokers)
    return f"/topics/{topic}/settings"


def filled(page: Page, **texts: str) -> dict[str, str]:
    """Return the fields of the form as a browser sends it: values as shown, but these."""
    _, hidden = page.form("Preview")
    return {**hidden, **{name[4:]: text for name, text in hidden.items() if name.startswith("was_")}, **texts}


def test_change_after_a_preview(site: Site) -> None:
    path = prepared(site, "set")
    page = site.get(path)
    assert f"{site.fleet.nsqd.http_address} : it is an nsqd" in page.text
    question = site.post(path, filled(page, retention_time="7d", max_bytes="10GiB"))
    assert (
        "Changes retention_time to 7d, max_bytes to 10GiB, at once. This drops no message." in question.text
    )
    assert in_force(site.fleet.ours[0], "set")["retention_time_ms"] == 0
    done = site.send(question)
    assert "Topic set: retention_time=7d, max_bytes=10GiB" in done.text
    for broker in site.fleet.ours:
        found = in_force(broker, "set")
        assert (found["retention_time_ms"], found["max_bytes"]) == (7 * 86_400_000, 10 * 2**30)
        assert (
            f"{broker.http_address} 7d set 0 (off) default 0 (off) default 0 (off) default 10GiB set reject default"
            in done.text
        )
        assert f"{broker.http_address} : changed" in done.text
    back = site.send(site.post(path, filled(site.get(path), retention_time="default")))
    assert (
        f"{site.fleet.ours[0].http_address} 0 (off) default 0 (off) default 0 (off) default 0 (off) default 10GiB set"
        in back.text
    )
    assert in_force(site.fleet.ours[1], "set")["retention_time_ms"] == 0


def test_what_a_change_drops_is_counted_on_each_broker_and_confirmed(site: Site) -> None:
    path = prepared(site, "drops")
    for broker, count in zip(site.fleet.ours, (5, 3), strict=True):
        for number in range(count):
            broker.post("/pub", b"%d" % number, topic="drops")
    question = site.post(path, filled(site.get(path), max_messages="2", when_full="drop-oldest"))
    assert "This drops 4 messages that wait." in question.text
    first, second = (broker.http_address for broker in site.fleet.ours)
    assert f"{first} 2 drop-oldest 3" in question.text
    assert f"{second} 2 drop-oldest 1" in question.text
    assert site.send(question, typed="").status == 422
    assert in_force(site.fleet.ours[0], "drops")["max_messages"] == 0
    body = b"\n".join(b"%d" % number for number in range(200))
    site.fleet.ours[0].post("/mpub", body, topic="drops")
    again = site.send(question, typed="drops")
    assert again.status == 409
    assert "This drops 204 messages that wait." in again.text
    site.send(again, typed="drops")
    assert [broker.channel_stats("drops", "c")["depth"] for broker in site.fleet.ours] == [2, 2]


def test_differences_are_shown_and_kept_unless_changed(site: Site) -> None:
    path = prepared(site, "differs")
    site.fleet.ours[0].put("/topic/settings", b'{"ttl_ms": 60000}', topic="differs")
    page = site.get(path)
    assert "The brokers differ in ttl." in page.text
    assert page.form("Preview")[1]["was_ttl"] == "(different)"
    site.send(site.post(path, filled(page, max_messages="9")))
    assert [in_force(broker, "differs")["ttl_ms"] for broker in site.fleet.ours] == [60_000, 0]
    site.send(site.post(path, filled(site.get(path), ttl="1h")))
    assert [in_force(broker, "differs")["ttl_ms"] for broker in site.fleet.ours] == [3_600_000, 3_600_000]


def test_wrong_values_are_named_at_their_fields(site: Site) -> None:
    path = prepared(site, "wrong")
    page = site.post(path, filled(site.get(path), ttl="5", max_bytes="10 apples", max_messages="many"))
    assert page.status == 422
    for text in (
        "'5' has no unit: write 5s",
        "'10 apples' is not a size such as",
        "'many' is not an integer",
    ):
        assert text in page.text
    assert 'value="10 apples"' in page.html
    refused = site.post(path, filled(site.get(path), when_full="explode"))
    assert refused.status == 422
    assert "when_full is 'explode'; it must be reject or drop-oldest" in refused.text
    unchanged = site.post(path, filled(site.get(path)))
    assert "Nothing was changed: all values are as before." in unchanged.text


def test_channel_and_its_command(site: Site) -> None:
    prepared(site, "letters")
    path = "/topics/letters/c/settings"
    question = site.post(path, filled(site.get(path), max_attempts="5", dead_letter_topic="letters.dead"))
    assert "max_attempts to 5, dead_letter_topic to letters.dead" in question.text
    program, *words = shlex.split(question.command)
    done = Cli("", "")(*words)
    assert (program, done.code) == ("qcli", 0), done.err
    wanted = {"max_attempts": 5, "dead_letter_topic": "letters.dead", "order_by": "", "rate_limit_per_s": 0}
    wanted |= {"expire_idle_ms": 0}
    assert [in_force(broker, "letters", "c") for broker in site.fleet.ours] == [wanted, wanted]
    dropped = site.send(site.post(path, filled(site.get(path), dead_letter_topic="")))
    assert [in_force(broker, "letters", "c")["dead_letter_topic"] for broker in site.fleet.ours] == ["", ""]
    assert "none" in dropped.text


def test_command_of_a_topic(site: Site) -> None:
    path = prepared(site, "typed")
    page = site.get(path)
    program, *words = shlex.split(page.command)
    assert program == "qcli"
    assert Cli("", "")(*words).out.count(b"retention_time=0") == 2
    question = site.post(path, filled(page, retention_bytes="1GiB", when_full="drop-oldest"))
    assert Cli("", "")(*shlex.split(question.command)[1:]).code == 0
    assert [in_force(broker, "typed")["retention_bytes"] for broker in site.fleet.ours] == [2**30, 2**30]


def test_nsqd_alone_has_none(site: Site) -> None:
    site.fleet.nsqd.create("plain", "c")
    site.await_known("plain", "c", site.fleet.nsqd)
    assert "nsqd has no settings of topics and channels" in site.get("/topics/plain/settings").text
    assert "nsqd has no settings of topics and channels" in site.get("/topics/plain/c/settings").text


@pytest.mark.parametrize("channel", ["", "c"])
def test_only_changed_fields_count(channel: str) -> None:
    form = {"ttl": "1h", "was_ttl": "1h", "max_attempts": "", "was_max_attempts": "3", "strange": "x"}
    assert changes_of(channel, form) == ([], {})


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no setting 'ttl'"):
        values([("ttl", "1h")], "c")
    with pytest.raises(ValueError, match="too long"):
        values([("ttl", "1" * 200)], "")
