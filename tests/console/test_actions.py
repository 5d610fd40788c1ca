"""Actions on the pages: what they ask, what they do on each broker, and what they report when something fails."""

import json
import shlex
from pathlib import Path

import pytest

from cli.support import Cli
from console.acting import Page, Site, acting_site
from fleet.support import hung, subscribed, take_down, wait_until
from interop.peers import Broker
from soak import in_soak


def stats(broker: Broker, topic: str) -> dict[str, object] | None:
    """Return a topic of `/stats`; None: the broker does not have it."""
    topics = json.loads(broker.http("GET", "/stats", format="json", topic=topic))["topics"]
    return topics[0] if topics else None


def channels(broker: Broker, topic: str) -> dict[str, dict[str, object]]:
    found = stats(broker, topic)
    assert found is not None
    listed = found["channels"]
    assert isinstance(listed, list)
    return {each["channel_name"]: each for each in listed}


def prepared(site: Site, topic: str, *names: str, messages: int = 3) -> None:
    """Create a topic with channels on all brokers, and publish to each."""
    site.fleet.create(topic, *names)
    for broker in site.fleet.brokers:
        for number in range(messages):
            broker.post("/pub", b"%d" % number, topic=topic)
    for name in names[:1]:
        site.await_known(topic, name, *site.fleet.brokers)


def run_command(page: Page) -> None:
    """Run the command line that a page shows, as a shell would."""
    for part in page.command.split(" && "):
        program, *words = shlex.split(part)
        assert program == "qcli"
        done = Cli("", "")(*words)
        assert done.code == 0, done.err


def test_delete_topic_names_the_counts_of_each_broker_and_wants_the_name(site: Site) -> None:
    prepared(site, "t.delete", "c", "d")
    with subscribed(site.fleet.nsqd, "t.delete", "c"):
        page = site.get("/topics/t.delete/delete")
        for broker in site.fleet.ours:
            assert f"{broker.http_address} 6 2 0" in page.text
        assert f"{site.fleet.nsqd.http_address} 6 2 1" in page.text
        assert "All brokers 18 6 1" in page.text
        for typed in ("", "t.delet", "t.delete/c"):
            again = site.send(page, typed=typed)
            assert again.status == 422
            assert "Nothing was changed: type t.delete to confirm." in again.text
        assert all(stats(broker, "t.delete") for broker in site.fleet.brokers)
    done = site.send(page, typed="t.delete")
    assert done.path.startswith("/?notice=")
    assert "Topic t.delete deleted" in done.text
    for address in (*site.fleet.http_addresses, *site.fleet.lookupd_addresses):
        assert f"{address} : deleted" in done.text
    assert [stats(broker, "t.delete") for broker in site.fleet.brokers] == [None, None, None]


@pytest.mark.parametrize(
    ("verb", "channel"),
    [
        *(("pause", ""), ("unpause", "c"), ("empty", "c"), ("delete", "")),
        *in_soak(("pause", "c"), ("unpause", ""), ("empty", ""), ("delete", "c")),
    ],
)
def test_page_and_command_do_the_same(site: Site, verb: str, channel: str) -> None:
    states = []
    for way in ("page", "command"):
        topic = f"same.{verb}{channel}.{way}"
        prepared(site, topic, "c", "other")
        place = f"/topics/{topic}" + (f"/{channel}" if channel else "")
        if verb == "unpause":
            site.send(site.get(f"{place}/pause"))
        page = site.get(f"{place}/{verb}")
        if way == "page":
            done = site.send(page, typed=f"{topic}/{channel}" if channel else topic)
            assert done.status == 200, done.text
        else:
            run_command(page)
        found = []
        for broker in site.fleet.brokers:
            state = stats(broker, topic)
            rows = channels(broker, topic) if state else {}
            found.append(
                (
                    state and state["paused"],
                    {name: (row["paused"], row["depth"]) for name, row in rows.items()},
                )
            )
        states.append(found)
    assert states[0] == states[1]


def test_create_a_topic_with_a_channel_and_what_its_command_does(site: Site) -> None:
    done = site.send(site.get("/create"), topic="made", channel="c")
    assert "Channel made/c created" in done.text
    for broker in site.fleet.brokers:
        assert list(channels(broker, "made")) == ["c"]
    refused = site.send(site.get("/create"), topic="no good", channel="")
    assert refused.status == 422
    assert "'no good' is no name" in refused.text


def test_much_more_than_was_shown_is_shown_again(site: Site) -> None:
    prepared(site, "grows", "c")
    page = site.get("/topics/grows/c/empty")
    assert "All brokers 9 0" in page.text
    body = b"\n".join(b"%d" % number for number in range(200))
    site.fleet.ours[0].post("/mpub", body, topic="grows")
    again = site.send(page, typed="grows/c")
    assert again.status == 409
    assert "Nothing was changed: there are 209 messages now, and 9 were shown. Look again." in again.text
    assert "All brokers 209 0" in again.text
    assert channels(site.fleet.ours[0], "grows")["c"]["depth"] == 203
    done = site.send(again, typed="grows/c")
    assert "Channel grows/c emptied" in done.text
    assert [channels(broker, "grows")["c"]["depth"] for broker in site.fleet.brokers] == [0, 0, 0]


def test_a_new_channel_is_a_surprise_when_a_topic_is_deleted(site: Site) -> None:
    prepared(site, "newcomer", "c")
    page = site.get("/topics/newcomer/delete")
    site.fleet.ours[0].http("POST", "/channel/create", topic="newcomer", channel="d")
    again = site.send(page, typed="newcomer")
    assert again.status == 409
    assert "Nothing was changed: there are 4 channels now, and 3 were shown. Look again." in again.text
    assert stats(site.fleet.ours[0], "newcomer") is not None


def test_pause_shows_on_the_page_after_it(site: Site) -> None:
    prepared(site, "halt", "c")
    done = site.send(site.get("/topics/halt/c/pause"))
    assert done.path.startswith("/topics/halt/c?notice=")
    assert "Channel halt/c paused" in done.text
    assert all(channels(broker, "halt")["c"]["paused"] for broker in site.fleet.brokers)


def test_notice_is_for_its_key_only(site: Site) -> None:
    prepared(site, "noted", "c")
    done = site.send(site.get("/topics/noted/pause"))
    assert "Topic noted paused" in site.get(done.path).text
    assert "Topic noted paused" not in site.get("/topics/noted?notice=guess").text
    assert "Topic noted paused" not in site.get("/topics/noted").text


@pytest.mark.parametrize("name", ["%3Cscript%3E", "a%20b", "x" * 65, "%E2%80%AEx", "a%00b"])
@pytest.mark.parametrize(
    "path", ["/topics/{}/delete", "/topics/t/{}/seek", "/topics/{}/settings", "/dead-letters/{}"]
)
def test_hostile_names_are_not_found(site: Site, name: str, path: str) -> None:
    page = site.get(path.format(name))
    assert page.status == 404
    assert "is not the name of a" in page.text
    assert "<script>" not in page.html


def test_channel_with_the_name_of_a_page(site: Site) -> None:
    prepared(site, "odd", "delete", "settings")
    done = site.send(site.get("/topics/odd/delete/pause"))
    assert "Channel odd/delete paused" in done.text
    assert channels(site.fleet.ours[0], "odd")["delete"]["paused"] is True
    assert channels(site.fleet.ours[0], "odd")["settings"]["paused"] is False


def test_names_are_quoted_for_the_shell(site: Site) -> None:
    prepared(site, "eph#ephemeral", "c#ephemeral")
    page = site.get("/topics/eph%23ephemeral/c%23ephemeral/delete")
    assert "'eph#ephemeral/c#ephemeral'" in page.command
    assert "eph#ephemeral/c#ephemeral" in shlex.split(page.command)
    run_command(page)
    assert [stats(broker, "eph#ephemeral") for broker in site.fleet.ours] == [
        None,
        None,
    ]  # gone with its last channel


def test_drain_and_back(site: Site) -> None:
    broker = site.fleet.ours[1]
    page = site.get(f"/nodes/{broker.http_address}/drain")
    assert page.command == f"qcli drain --nsqd-http-address {broker.http_address}"
    done = site.send(page)
    assert f"{broker.http_address} : refuses publishes" in done.text
    assert broker.http("GET", "/config/draining") == b"true"
    page = site.get(f"/nodes/{broker.http_address}/undrain")
    run_command(page)
    assert broker.http("GET", "/config/draining") == b"false"
    site.send(site.get(f"/nodes/{broker.http_address}/drain"))
    assert "accepts publishes again" in site.send(page).text
    assert broker.http("GET", "/config/draining") == b"false"


def test_nsqd_cannot_drain(site: Site) -> None:
    assert "is an nsqd, which cannot drain" in site.get(f"/nodes/{site.fleet.nsqd.http_address}/drain").text
    assert site.get("/nodes/127.0.0.1:1/drain").status == 404


def test_tombstone_deletes_the_topic_on_one_broker(site: Site) -> None:
    prepared(site, "stone", "c")
    broker = site.fleet.ours[0]
    page = site.get(f"/nodes/{broker.http_address}/tombstone?topic=stone")
    assert f"{broker.http_address} 3 1 0" in page.text
    assert site.send(page, typed="").status == 422
    done = site.send(page, typed="stone")
    assert f"{broker.http_address} : deleted" in done.text
    for address in site.fleet.lookupd_addresses:
        assert f"{address} : hidden" in done.text
    assert [stats(each, "stone") is None for each in site.fleet.brokers] == [True, False, False]
    page = site.get(f"/nodes/{site.fleet.nsqd.http_address}/tombstone?topic=stone")
    run_command(page)
    assert stats(site.fleet.nsqd, "stone") is None


def test_hung_and_dead_brokers_are_named_and_delay_no_other(tmp_path: Path) -> None:
    with acting_site(tmp_path, "--http-client-request-timeout=1s") as site:
        prepared(site, "partial", "c")
        ours, nsqd = site.fleet.ours, site.fleet.nsqd
        with hung(ours[0]):
            page = site.get("/topics/partial/c/empty")
            assert f"{ours[0].http_address} unknown: no answer within 1 s" in page.text
            done = site.send(page, typed="partial/c")
            assert "Partly done: channel partial/c emptied" in done.text
            assert f"failed: {ours[0].http_address} : no answer within 1 s" in done.text
            assert f"{nsqd.http_address} : emptied" in done.text
            assert channels(ours[1], "partial")["c"]["depth"] == 0
        take_down(nsqd)
        done = site.send(site.get("/topics/partial/pause"))
        assert "Partly done: topic partial paused" in done.text
        assert f"failed: {nsqd.http_address} :" in done.text
        wait_until(lambda: bool(stats(ours[0], "partial")), "the broker goes on")
        take_down(ours[0])
        take_down(ours[1])
        done = site.send(site.get("/topics/partial/pause"))
        assert "Failed: topic partial paused" in done.text


def test_read_only_viewers_get_no_page_of_an_action(tmp_path: Path) -> None:
    with acting_site(tmp_path, "--anonymous=read") as reader:
        reader.fleet.create("seen", "c")
        wait_until(lambda: reader.get("/topics/seen").status == 200, "the console knows the topic")
        for path in (
            "/create",
            "/topics/seen/delete",
            "/topics/seen/c/pause",
            "/topics/seen/c/seek",
            f"/nodes/{reader.fleet.ours[0].http_address}/drain",
        ):
            assert reader.get(path).status == 403, path
            assert reader.post(path, {"typed": "seen", "csrf": ""}).status == 403, path
        for path in ("/topics/seen/settings", "/topics/seen/c/deferred", "/dead-letters"):
            page = reader.get(path)
            assert page.status == 200, path
            assert 'method="post"' not in page.html
            if path != "/dead-letters":
                assert reader.post(path, {"action": "cancel-all", "ttl": "1s", "csrf": ""}).status == 403, (
                    path
                )
        assert stats(reader.fleet.ours[0], "seen") is not None
