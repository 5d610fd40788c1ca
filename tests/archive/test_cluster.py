"""A cluster with an archive: the leader writes it, and the next leader goes on with it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import trio

from archive.folders import restored_tree, without_ids
from broker.support import PATIENCE_S
from cluster.running import RunningMember, running_members
from coordination.conftest import cluster, etcd_member  # noqa: F401 - fixtures
from coordination.etcd_server import Member
from replication.leader import tree_of
from trio_nsq.archive.manifest import LEASE
from trio_nsq.storage import LocalStorage, StorageError


@pytest.fixture
def url(etcd_member: Member) -> str:  # noqa: F811 - the fixture
    """The URL of a coordinator."""
    return f"etcd://127.0.0.1:{etcd_member.port}"


async def archived(leader: RunningMember) -> dict[str, Any]:
    """Wait until the leader has archived everything, and return what it says."""
    with trio.fail_after(PATIENCE_S):
        while True:
            found: dict[str, Any] = (await leader.status())["archive"]
            if found["state"] == "archiving" and not found["lag_operations"]:
                return found
            await trio.sleep(0.02)


@pytest.mark.parametrize("before_ok", [False, True])
async def test_the_archive_goes_on_after_a_failover(
    tmp_path: Path,
    url: str,
    cluster: str,  # noqa: F811
    before_ok: bool,
) -> None:
    archive = tmp_path / "archive"
    options: Any = {"archive": str(archive), "archive_interval_ms": 10, "archive_before_ok": before_ok}
    sent: list[str] = []
    async with running_members(tmp_path, url, cluster) as members:
        one = await members.start("one", **options)
        await one.leads()
        two = await members.start("two", **options)
        await two.in_sync(2)
        running = [one, two]
        for turn in range(3):
            leader, follower = running[turn % 2], running[1 - turn % 2]
            for number in range(10):
                sent.append(f"{turn}-{number}")
                assert (await follower.publish("t", sent[-1].encode())).text == "OK"
            found = await archived(leader)
            assert found["checkpoints"] == 1, "each leader begins with one"
            assert "archive" not in json.loads((await follower.client.get("/cluster/member")).text)
            await leader.stop()
            await follower.leads()
            running[turn % 2] = await members.start(("one", "two")[turn % 2], **options)
            await follower.in_sync(2)
        assert await running[0].bodies("t") == sent
        leader = running[1]
        await archived(leader)
        with trio.fail_after(PATIENCE_S):
            # The leader goes on to save positions of channels.
            while restored_tree(archive, tmp_path) != without_ids(tree_of(leader.folder)):
                await trio.sleep(0.05)


async def test_oks_wait_for_members_and_the_archive(
    tmp_path: Path,
    url: str,
    cluster: str,  # noqa: F811
) -> None:
    """Another process writes to the archive: the leader waits for it."""
    archive = tmp_path / "archive"
    async with running_members(tmp_path, url, cluster) as members:
        with LocalStorage(archive).hold(LEASE, lambda holder: StorageError(holder)):
            one = await members.start("one", archive=str(archive), archive_before_ok=True)
            await one.leads()
            with trio.move_on_after(0.3):
                await one.publish("t", b"1")
                pytest.fail("there was an answer before the message was archived")
            about = (await one.status())["archive"]
            assert (about["state"], about["checkpoints"]) == ("waiting", 0)
            assert about["lag_operations"] > 0
        assert (await one.publish("t", b"2")).text == "OK"
        assert (await one.bodies("t"))[-1] == "2"


async def test_a_leader_that_gave_way_does_not_call_the_archive_slow(
    tmp_path: Path,
    url: str,
    cluster: str,  # noqa: F811
    etcd_member: Member,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    archive = tmp_path / "archive"
    async with running_members(tmp_path, url, cluster) as members:
        with LocalStorage(archive).hold(LEASE, lambda holder: StorageError(holder)):
            one = await members.start("one", archive=str(archive))
            await one.leads()
            assert (await one.publish("t", b"1")).text == "OK"
            etcd_member.revoke_leases()
            with trio.fail_after(PATIENCE_S):
                while not (said := re.findall("the archive lacks the last .*", caplog.text)):
                    await trio.sleep(0.02)
            assert said[0].endswith(": this member no longer leads")
