"""`qcli cluster` and the requests of `trio_nsq.api` with running members."""

from functools import partial
from pathlib import Path
from typing import Any, is_typeddict

import pytest
import trio

from access.support import ALL_ROLES, AuthFile, Given, bearer, everything
from broker.support import PATIENCE_S, connected
from cli.support import Cli, Result
from cluster.running import Members, RunningMember, running_members
from coordination.conftest import cluster, etcd_member  # noqa: F401 - fixtures
from coordination.etcd_server import Member
from trio_nsq.api import answers
from trio_nsq.api.fields import exactly, fields_of

WAIT = f"{PATIENCE_S:g}s"


async def qcli(member: RunningMember, *args: str) -> Result:
    """Run a command as a process, with the address of a member."""
    cli = Cli("127.0.0.1:1", str(member.bound.http_address))
    return await trio.to_thread.run_sync(partial(cli, *args))


async def two_members(members: Members, **options: Any) -> tuple[RunningMember, RunningMember]:
    """Start a leader and a follower, and wait with the command until both are in sync."""
    one = await members.start("one", **options)
    two = await members.start("two", **options)
    waited = await qcli(two, "cluster", "wait", "--members", "2", "--timeout", WAIT)
    assert waited.code == 0, waited.err
    return (one, two) if (await one.about())["role"] == "leader" else (two, one)


def check_fields(answer: Any, kind: Any) -> None:
    """Check that an answer has each field that clients read, with its type."""
    exactly(kind)(answer)
    for field in fields_of(kind):
        assert field.name in answer, (kind.__name__, field.name)
        if field.inner is not None and is_typeddict(field.inner):
            inner = answer[field.name]
            for each in inner if isinstance(inner, list) else [inner]:
                check_fields(each, field.inner)


@pytest.fixture
def url(etcd_member: Member) -> str:  # noqa: F811 - the fixture
    """The URL of a coordinator."""
    return f"etcd://127.0.0.1:{etcd_member.port}"


async def test_switch_and_remove(tmp_path: Path, url: str, cluster: str) -> None:  # noqa: F811
    async with running_members(tmp_path, url, cluster) as members:
        archive = str(tmp_path / "archive")
        leader, follower = await two_members(members, archive=archive, archive_interval_ms=10)
        ids = {(await each.about())["id"]: each for each in (leader, follower)}
        status = await qcli(follower, "cluster", "status", "--format", "json")
        assert status.code == 0, status.err
        (record,) = status.records
        assert (record["cluster"], record["problems"]) == (cluster, [])
        assert f"archive      {archive}: arch" in (await qcli(follower, "cluster", "status")).out.decode()
        assert {each["id"] for each in record["members"]} == ids.keys()
        for each in (leader, follower):
            check_fields(await each.about(), answers.MemberView)
        check_fields(await follower.status(), answers.Cluster)
        stats = (await follower.client.get("/stats?format=json")).json()
        check_fields(stats["cluster"], answers.ClusterCounts)
        assert stats["cluster"] == {
            "name": cluster,
            "epoch": record["epoch"],
            "role": "leader",
            "in_sync": 2,
            "members": 2,
        }
        text = (await leader.client.get("/stats")).text
        assert f"Cluster: {cluster}, leader of epoch {record['epoch']}, 2 of 2 members in sync\n" in text

        to = str(follower.bound.http_address)
        switched = await qcli(follower, "cluster", "switch", to, "--yes", "--timeout", WAIT)
        assert switched.code == 0, switched.err
        assert f"({to}) leads the cluster {cluster}, epoch " in switched.err
        assert (await follower.about())["role"] == "leader"
        assert (await qcli(leader, "cluster", "wait", "--timeout", WAIT)).code == 0

        nodes = await qcli(leader, "nodes", "--format", "json")
        assert [(each["address"], each["role"]) for each in nodes.records] == [
            (to, "leader"),
            (str(leader.bound.http_address), "follower"),
        ]
        gone = (await leader.about())["id"]
        refused = await qcli(follower, "cluster", "remove", gone, "--yes")
        assert (refused.code, "is connected: stop it first" in refused.err) == (1, True)
        await leader.stop()
        with trio.fail_after(PATIENCE_S):
            while (await qcli(follower, "cluster", "remove", gone, "--yes")).code:
                pass
        assert (await qcli(follower, "cluster", "status")).code == 0
        (alone,) = (await follower.status())["members"]
        assert alone["id"] != gone


async def test_checks_fail_while_a_member_is_gone(tmp_path: Path, url: str, cluster: str) -> None:  # noqa: F811
    async with running_members(tmp_path, url, cluster) as members:
        leader, follower = await two_members(members)
        gone = (await follower.about())["id"]
        await follower.stop()
        with trio.fail_after(PATIENCE_S):
            while (await qcli(leader, "cluster", "status")).code != 1:
                pass
        checked = await qcli(leader, "nodes", "--check", "--min-free", "0", "--format", "json")
        assert checked.code == 1
        (problem,) = (each for each in checked.records if each["check"] == "cluster")
        assert (problem["about"], gone in problem["problem"]) == (cluster, True)
        assert (await qcli(leader, "cluster", "wait", "--timeout", "1ms")).code == 1
        assert (await qcli(leader, "cluster", "wait", "--members", "1", "--timeout", WAIT)).code == 0


async def test_promotion_after_the_leader_is_lost(tmp_path: Path) -> None:
    async with running_members(tmp_path, "static:") as members:
        one = await members.start("one")
        nobody = await qcli(one, "cluster", "status")
        assert (nobody.code, "leader" in nobody.out.decode()) == (3, True)
        assert nobody.err.endswith("If the leader is lost, see 'qcli cluster promote'.\n")
        promoted = await qcli(one, "cluster", "promote", "--yes", "--timeout", WAIT)
        assert promoted.code == 0, promoted.err
        two = await members.start("two", coordinator=f"static:{one.bound.http_address}")
        assert (await qcli(one, "cluster", "wait", "--members", "2", "--timeout", WAIT)).code == 0
        refused = await qcli(two, "cluster", "promote", "--yes")
        assert (refused.code, "follows a leader, which runs: stop that one first" in refused.err) == (1, True)
        assert (await one.publish("t", b"1")).text == "OK"
        await one.stop()
        await two.until(lambda about: not about["is_following"])
        lost = await qcli(two, "cluster", "status")
        assert lost.code == 3
        assert "is lost" in lost.err
        promoted = await qcli(two, "cluster", "promote", "--yes", "--timeout", WAIT)
        assert promoted.code == 0, promoted.err
        assert (await two.about())["role"] == "leader"
        assert await two.bodies("t") == ["1"]


async def test_only_who_may_read_everything_learns_of_the_cluster(tmp_path: Path) -> None:
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("all", everything(*ALL_ROLES))
    file.add_token("other", Given(ALL_ROLES, ["other"]))
    async with running_members(tmp_path, "static:") as members:
        one = await members.start("one", auth_file=file.write())
        headers = {name: {"Authorization": bearer(name)} for name in ("all", "other")}
        promoted = await one.client.post("/cluster/promote", headers=headers["all"])
        assert promoted.status_code == 200, promoted.text
        with trio.fail_after(PATIENCE_S):
            while (await one.client.get("/ping?role=leader")).status_code != 200:
                await trio.sleep(0.02)
        told = [
            (await one.client.get(f"/stats?format={form}", headers=headers[name])).text.count(text)
            for form, text in (("json", '"cluster":'), ("text", "Cluster: "))
            for name in headers
        ]
        assert told == [1, 0, 1, 0]
        assert (await one.client.get("/cluster", headers=headers["other"])).status_code == 403


async def test_consumers_are_disconnected_through_any_member(tmp_path: Path, url: str, cluster: str) -> None:  # noqa: F811
    """Those that are connected to the leader and to a follower, one by its address and all."""
    async with running_members(tmp_path, url, cluster) as members:
        leader, follower = await two_members(members)
        for path in "/topic/create?topic=t", "/channel/create?topic=t&channel=c":
            assert (await follower.client.post(path)).status_code == 200
        for asked in leader, follower:
            async with (
                connected(str(leader.bound.tcp_address)) as one,
                connected(str(follower.bound.tcp_address)) as two,
                connected(str(follower.bound.tcp_address)) as kept,
            ):
                for each in one, two, kept:
                    await each.subscribe("t", "c", ready_count=1)
                for each in one, two:
                    address = "%s:%d" % each.stream.socket.getsockname()[:2]
                    gone = await qcli(asked, "channel", "disconnect", "t/c", "--client", address)
                    assert gone.code == 0, gone.err
                    assert await each.frame() is None
                (found,) = (await asked.client.get("/stats?format=json&topic=t")).json()["topics"]
                assert found["channels"][0]["client_count"] == 1
                everyone = await qcli(asked, "channel", "disconnect", "t/c", "--all", "--format", "json")
                assert (everyone.code, len(everyone.records)) == (0, 1)
                assert await kept.frame() is None
