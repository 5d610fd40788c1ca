"""The page of clusters: what it says of leaders and members, and what may be changed there."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
import trio

from broker.support import PATIENCE_S
from cluster.running import running_members
from console.access_support import auth_file, running_console
from console.fleet.fake_brokers import FakeBroker, fake_brokers
from console.health_support import broker as broker_state
from console.health_support import health
from console.web.support import Document, document, visited
from trio_nsq.api.answers import MemberView
from trio_nsq.console.fleet.clusters import views_of
from trio_nsq.console.upstream.client import Results, UpstreamError
from trio_nsq.console.web.formats import UNKNOWN


def member(name: str, state: str, **more: Any) -> dict[str, Any]:
    """Return a member of `GET /cluster`."""
    addresses = [f"tcp://10.0.0.{name}:4150", f"http://10.0.0.{name}:4151"]
    lag = {"lag_operations": 0, "lag_bytes": 0, "lag_s": 0.0, "since": 1}
    return {
        "id": name,
        "addresses": addresses,
        "state": state,
        "in_sync": state != "disconnected",
        **lag,
        **more,
    }


def cluster(*members: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the answer of `GET /cluster`."""
    return {
        "cluster": "prod",
        "epoch": 7,
        "leader": "1",
        "since": 1,
        "coordinator": "etcd://10.0.0.9:2379",
        "coordinator_error": "",
        "min_in_sync": 1,
        "refuses_because": "",
        "members": [member("1", "leading"), *members],
        **more,
    }


def leader(*members: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return what a broker that leads answers besides."""
    about = cluster(*members, **more)
    in_sync = sum(each["in_sync"] for each in about["members"])
    counts = {
        "name": "prod",
        "epoch": 7,
        "role": "leader",
        "in_sync": in_sync,
        "members": len(about["members"]),
    }
    return {"cluster": counts, "/cluster": about}


@asynccontextmanager
async def site(*brokers: FakeBroker, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Run a console of these brokers."""
    async with fake_brokers(*brokers), visited(*brokers, **options) as client:
        yield client


async def send(client: httpx.AsyncClient, path: str, **fields: str) -> httpx.Response:
    """Send the form of a page that asks, as a browser does."""
    page = Document((await client.get(path)).text)
    body = urlencode(page.hidden | fields)
    headers = {
        "Origin": str(client.base_url).rstrip("/"),
        "Content-Type": "application/x-www-form-urlencoded",
    }
    return await client.post(path, content=body, headers=headers, follow_redirects=True)


async def test_a_fleet_without_clusters_has_no_link_to_the_page_and_is_asked_nothing_more() -> None:
    one = FakeBroker()
    async with site(one) as client:
        assert "Cluster" not in (await document(client, "/")).links
        assert "Members of clusters appear here" in (await document(client, "/clusters")).text
        assert (await client.get("/clusters/prod/1/lead")).status_code == 404
    assert not [path for path in one.asked if path.startswith("/cluster")]


async def test_members_of_a_cluster() -> None:
    lag = {"lag_operations": 1200, "lag_bytes": 3 << 20, "lag_s": 2.5}
    one = FakeBroker(more=leader(member("2", "in sync"), member("3", "catching up", in_sync=False, **lag)))
    async with site(one) as client:
        assert (await document(client, "/")).links["Cluster"] == "/clusters"
        page = await document(client, "/clusters")
        (table,) = page.tables
        rows = {name: table.row(name) for name in ("1", "2", "3")}
        assert [row["State"] for row in rows.values()] == ["leading", "in sync", "catching up"]
        assert [row["In sync"] for row in rows.values()] == ["yes", "yes", "no"]
        assert [row["Lag (time)"] for row in rows.values()] == [UNKNOWN, "0 ms", "2.5 s"]
        assert (rows["3"]["Lag"], rows["3"]["Lag (bytes)"]) == ("1,200", "3.0 MiB")
        assert rows["2"]["Address"] == "tcp://10.0.0.2:4150http://10.0.0.2:4151"
        for text in ("etcd://10.0.0.9:2379", "The member 3 (10.0.0.3:4151) is catching up, and lacks 1,200"):
            assert text in page.text
        assert page.links["Let this member lead"] == "/clusters/prod/2/lead"
        assert "Remove" not in page.links
        row = (await document(client, "/nodes")).tables[0].row(one.address)
        assert "cluster prod" in row["Status"]
        lines = (await client.get(page.links["JSON"])).text.splitlines()
        assert [(each["cluster"], each["id"], each["state"]) for each in map(json.loads, lines)] == [
            ("prod", "1", "leading"),
            ("prod", "2", "in sync"),
            ("prod", "3", "catching up"),
        ]
        assert (await client.get("/clusters?format=csv")).text.startswith("cluster,epoch,id,")


async def test_what_is_wrong_with_a_cluster() -> None:
    about = leader(
        member("2", "disconnected"),
        coordinator_error="Connection refused",
        refuses_because="1 of 2 is in sync",
    )
    async with site(FakeBroker(more=about)) as client:
        page = await document(client, "/clusters")
        for text in (
            "Publishes are refused: 1 of 2 is in sync.",
            "The coordinator does not answer: Connection refused.",
            "The member 2 (10.0.0.2:4151) is disconnected.",
        ):
            assert text in page.text
        assert page.links["Remove"] == "/clusters/prod/2/remove"
        assert "Let this member lead" not in page.links


async def test_a_leader_that_tells_only_what_is_required() -> None:
    required = ("cluster", "epoch", "leader", "members")
    about = {key: value for key, value in cluster().items() if key in required}
    about["members"] = [
        {"id": name, "addresses": [], "state": state, "in_sync": True}
        for name, state in (("1", "leading"), ("2", "\u202ein sync"))
    ]
    async with site(FakeBroker(more=leader() | {"/cluster": about})) as client:
        (table,) = (await document(client, "/clusters")).tables
        assert (table.row("2")["State"], table.row("2")["Address"]) == (r"\u202ein sync", "unknown")


async def test_a_broker_is_asked_once_for_all_viewers_and_addresses() -> None:
    one = FakeBroker(more=leader(member("2", "in sync")))
    async with fake_brokers(one):
        alias = FakeBroker(address=one.address.replace("127.0.0.1", "localhost"))
        async with visited(one, alias, poll_interval_ms=3_600_000) as client:
            for _ in range(3):
                assert "10.0.0.2" in (await document(client, "/clusters")).text
    assert one.asked.count("/cluster") == 1


async def test_without_a_leader_each_member_tells_its_view() -> None:
    one = FakeBroker(more=leader())
    async with site(one) as client:
        await document(client, "/clusters")
        about = {"cluster": "prod", "id": "2", "role": "follower", "epoch": 7, "leader": None}
        one.more |= {"/cluster": None, "/cluster/member": about | {"reason": "the coordinator is away"}}
        for path in ("/info", None):
            page = await until(client, "the coordinator is away")
            assert "There is no leader" in page.text
            assert page.tables[0].rows[0][:2] == [one.address, "2"]
            if path is not None:
                one.more[path] = None  # now the broker does not answer polls
        assert (await client.get("/clusters/prod/2/lead")).status_code == 503


async def until(client: httpx.AsyncClient, text: str) -> Document:
    """Wait until the page of clusters has a text."""
    while text not in (page := await document(client, "/clusters")).text:
        pass
    return page


async def test_another_member_leads_after_it_was_confirmed_with_its_id() -> None:
    one = FakeBroker(more=leader(member("2", "in sync")))
    async with site(one) as client:
        path = "/clusters/prod/2/lead"
        asked = await document(client, path)
        assert f"qcli cluster switch 2 --yes --nsqd-http-address {one.address}" in asked.text
        refused = await send(client, path, typed="1")
        assert (refused.status_code, "type 2 to confirm" in refused.text) == (422, True)
        assert not [target for target in one.targets if "switch" in target]
        after = cluster(member("2", "leading"), epoch=8, leader="2")
        one.more |= {"/cluster/switch": {"to": "2"}}

        def at_last() -> None:
            """The former leader still answers once; its later answer is one of the next leader."""
            asked = one.asked[::-1]
            if "/cluster/switch" in asked and asked[: asked.index("/cluster/switch")].count("/cluster") > 1:
                one.more["/cluster"] = after

        one.on_path = {"/cluster": at_last}
        done = await send(client, path, typed="2")
        assert (done.status_code, done.url.path) == (200, "/clusters")
        assert "2 leads, with epoch 8" in done.text
        assert one.targets.count("/cluster/switch?to=2") == 1
        there = await document(client, path)
        assert "leads the cluster prod already" in there.text


async def test_a_refused_switch_is_told() -> None:
    one = FakeBroker(more=leader(member("2", "in sync")) | {"/cluster/switch": None})
    async with site(one) as client:
        done = await send(client, "/clusters/prod/2/lead", typed="2")
        assert "Failed: 2 (10.0.0.2:4151) was asked to lead prod" in done.text


async def test_a_member_that_is_gone_is_removed() -> None:
    one = FakeBroker(more=leader(member("2", "disconnected"), member("3", "in sync")))
    async with site(one) as client:
        assert "Stop it first" in (await document(client, "/clusters/prod/3/remove")).text
        done = await send(client, "/clusters/prod/2/remove", typed="2")
        assert (done.status_code, "2 (10.0.0.2:4151) removed from prod" in done.text) == (200, True)
        assert one.targets.count("/cluster/remove?member=2") == 1
        assert (await client.get("/clusters/prod/4/remove")).status_code == 404


def test_the_view_of_the_newest_leader_counts() -> None:
    old: Any = cluster()
    new: Any = cluster(epoch=8, leader="2")
    for order in (("a", "b"), ("b", "a")):
        answers = {"a": old, "b": new}
        led = Results({address: answers[address] for address in order})
        (view,) = views_of({"a": "prod", "b": "prod"}, led, Results())
        assert (view.broker, view.led) == ("b", new)


def test_each_cluster_has_its_own_members() -> None:
    about: MemberView = {"cluster": "b", "id": "1", "role": "follower", "epoch": 1, "leader": None}
    silent = {"y": UpstreamError("y", "away"), "z": UpstreamError("z", "gone")}
    answer: Any = cluster()
    known = {"x": "b", "y": "b", "z": "a", "w": "prod"}
    views = views_of(known, Results({"w": answer}), Results({"x": about}, silent))
    assert [view.name for view in views] == ["a", "b", "prod"]
    assert (views[0].members, views[0].errors) == ({}, {"z": "gone"})
    assert (views[1].members, views[1].errors) == ({"x": about}, {"y": "away"})


def test_a_leader_that_members_follow_is_there_although_it_does_not_answer() -> None:
    about: MemberView = {"cluster": "a", "id": "2", "role": "follower", "epoch": 1, "leader": "1"}
    (view,) = views_of({"x": "a"}, Results(), Results({"x": {**about, "is_following": True}}))
    assert view.problems == ["The leader 1 does not answer, although members follow it."]
    (view,) = views_of({"x": "a"}, Results(), Results({"x": about}))
    assert view.problems[0].startswith("There is no leader.")


@pytest.mark.parametrize(("in_sync", "problems"), [(2, 0), (1, 1)])
def test_a_broker_whose_cluster_lacks_a_member_in_sync_has_a_problem(in_sync: int, problems: int) -> None:
    counts = {"name": "prod", "epoch": 1, "role": "leader", "in_sync": in_sync, "members": 2}
    found = health(broker_state(stats={"cluster": counts})).problems
    assert len(found) == problems
    assert not problems or found == ("Of its cluster prod, 1 of 2 members are in sync.",)


async def test_roles_of_viewers(tmp_path: Path) -> None:
    file = auth_file(tmp_path)
    headers = {"Authorization": "Bearer admin-secret"}
    async with running_members(tmp_path, "static:") as members:
        one = await members.start("one", auth_file=file.path)
        one.client.headers.update(headers)
        assert (await one.client.post("/cluster/promote")).status_code == 200
        await one.leads()
        gone = await members.start(
            "two", coordinator=f"static:{one.bound.http_address}", member=link(tmp_path)
        )
        await one.in_sync(2)
        ids = {each["state"]: each["id"] for each in (await one.status())["members"]}
        gone.scope.cancel()
        path = f"/clusters/prod/{ids['in sync']}/remove"
        async with running_console(tmp_path, one.bound, poll_interval_ms=50) as found:
            async with found.browser() as some, found.browser() as reader, found.browser() as admin:
                for browser, name in ((some, "web"), (reader, "reader"), (admin, "admin")):
                    await browser.log_in(name)
                assert (
                    (await some.get("/clusters")).status_code,
                    "Cluster" in (await some.get("/")).text,
                ) == (
                    403,
                    False,
                )
                assert ">Remove<" not in (await reader.get("/clusters")).text
                with trio.fail_after(PATIENCE_S):
                    while ">Remove<" not in (await admin.get("/clusters")).text:
                        pass
                for browser in (some, reader):
                    assert (await browser.get(path)).status_code == 403
                    assert (await browser.post(path, {"typed": ids["in sync"]})).status_code == 403
                done = await admin.post(path, {"typed": ids["in sync"]})
                assert done.status_code == 303
                assert "removed from prod" in (await admin.get(done.headers["location"])).text
            line = await found.await_audited("action")
        assert [each["id"] for each in (await one.status())["members"]] == [ids["leading"]]
    assert (line["action"], line["member"], line["name"]) == (f"POST {path}", ids["in sync"], "admin")
    assert (line["done"], line["failed"]) == (1, 0)


def link(folder: Path) -> dict[str, Any]:
    """Return the options of a member that sends the token of all roles."""
    secret = folder / "secret"
    secret.write_text("admin-secret")
    return {"cluster_auth_secret_file": secret}
