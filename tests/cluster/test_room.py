"""A leader whose disk is full lets a member lead that has room."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from broker.support import PATIENCE_S
from cluster.disks import Disk, disks
from cluster.running import RunningMember, running_members
from coordination.conftest import cluster, etcd_member  # noqa: F401 - fixtures
from coordination.etcd_server import Member
from trio_nsq.broker.replication import FollowerStatus
from trio_nsq.broker.server import Server
from trio_nsq.broker.storage.disk_reserve import StorageFailure
from trio_nsq.cluster.room import ROOM_BYTES, FailingDisk, with_room

SMALL_BYTES = ROOM_BYTES
"""A file system of this size has less room than a leader needs."""


@pytest.fixture
def url(etcd_member: Member) -> str:  # noqa: F811 - the fixture
    """The URL of a coordinator."""
    return f"etcd://127.0.0.1:{etcd_member.port}"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[list[Disk]]:
    """Two small file systems, the mount points of which have the names of members."""
    with ExitStack() as stack:
        yield stack.enter_context(disks(tmp_path, 2, SMALL_BYTES))


async def refused(member: RunningMember) -> None:
    """Publish until that is refused."""
    with trio.fail_after(PATIENCE_S):
        while (await member.publish("t", b"x" * 500_000)).status_code == 200:
            pass


async def test_a_member_with_room_leads_instead_of_one_whose_disk_is_full(
    tmp_path: Path,
    url: str,
    cluster: str,  # noqa: F811
    small: list[Disk],
) -> None:
    async with running_members(tmp_path, url, cluster) as members:
        one = await members.start("disk0/data")
        about_one = await one.leads()
        two, three = await members.start("two"), await members.start("three")
        await two.in_sync(3)
        assert (await two.publish("t", b"before")).text == "OK"
        small[0].fill()
        await refused(one)
        first = await two.until(lambda about: about["leader"] not in (None, about_one["id"]))
        small[0].fill()  # what its broker has freed
        (other,) = {(await each.about())["id"] for each in (two, three)} - {first["leader"]}
        with trio.fail_after(PATIENCE_S):
            while (await two.client.post(f"/cluster/switch?to={other}")).status_code != 200:
                await trio.sleep(0.02)  # it follows soon
        last = await two.until(lambda about: about["leader"] is not None and about["epoch"] > first["epoch"])
        # The full member passes clients on, although it cannot note the epoch.
        assert (await one.publish("t", b"after")).text == "OK"
        assert json.loads((one.folder / "cluster.json").read_bytes())["epoch"] < last["epoch"]
        found = await two.bodies("t")
        assert (found[0], found[-1]) == ("before", "after")
        small[0].make_room()
        await one.in_sync(3)
        assert await one.bodies("t") == found


async def test_a_leader_goes_on_if_all_disks_are_full(
    tmp_path: Path,
    url: str,
    cluster: str,  # noqa: F811
    small: list[Disk],
) -> None:
    async with running_members(tmp_path, url, cluster) as members:
        one = await members.start("disk0/data")
        epoch = (await one.leads())["epoch"]
        two = await members.start("disk1/data")
        await two.in_sync(2)
        assert (await one.publish("t", b"1")).text == "OK"
        for disk in small:
            disk.fill()
        await refused(one)
        with trio.fail_after(PATIENCE_S):
            while "this one goes on to lead" not in (status := await two.status())["refuses_because"]:
                await trio.sleep(0.02)
        assert (status["epoch"], status["leader"]) == (epoch, (await one.about())["id"])
        for disk in small:
            disk.make_room()
        with trio.fail_after(PATIENCE_S):
            while (await one.status())["refuses_because"]:
                await trio.sleep(0.02)
        assert (await two.publish("t", b"2")).text == "OK"
        assert (await one.about())["epoch"] == epoch


@pytest.mark.parametrize("is_full", [False, True])
async def test_free_space_is_no_use_on_a_disk_that_fails(
    tmp_path: Path,
    url: str,
    cluster: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_full: bool,
) -> None:
    """Both members are on the same disk. If it is full for a large message only, another leader would be no better."""
    failing: set[Path] = set()

    def failure(server: Server) -> StorageFailure | None:
        fails = server.options.data_path in failing
        return StorageFailure("the message was not stored", is_full) if fails else None

    monkeypatch.setattr(Server, "storage_failure", failure)
    async with running_members(tmp_path, url, cluster) as members:
        one = await members.start("one")
        await one.leads()
        two = await members.start("two")
        await two.in_sync(2)
        failing.add(one.folder)
        if is_full:
            with trio.fail_after(PATIENCE_S):
                while "this one goes on to lead: the message was not stored" not in caplog.text:
                    await trio.sleep(0.02)
            assert (await one.about())["role"] == "leader"
        else:
            await two.leads()


def test_which_member_has_room() -> None:
    def status(member: str, free_bytes: int | None) -> FollowerStatus:
        return FollowerStatus(member, (), "", "in sync", free_bytes=free_bytes)

    rooms = [status("a", ROOM_BYTES), status("b", 2 * ROOM_BYTES), status("c", 3 * ROOM_BYTES)]
    assert with_room(rooms, frozenset("abc"), 1, 0) == "c"
    assert with_room(rooms, frozenset("ab"), 2, 0) == "b"
    assert with_room(rooms, frozenset("ab"), 3, 0) is None, "publishes would be refused there"
    assert with_room(rooms, frozenset("abc"), 1, 2 * ROOM_BYTES) == "c"
    assert with_room(rooms, frozenset("ab"), 1, 2 * ROOM_BYTES) is None, "it would be as full soon"
    assert with_room([status("a", ROOM_BYTES - 1), status("b", None)], frozenset("ab"), 1, 0) is None


def test_a_disk_must_be_full_for_some_time() -> None:
    disk = FailingDisk(0)
    assert [disk.look(1.0, fails=True) for _ in range(5)] == [False] * 4 + [True]
    disk = FailingDisk(0)
    assert not any(disk.look(1.0, fails=number % 2 == 0) for number in range(50))
    assert not any(FailingDisk(times).look(5.0, fails=True) for times in (1, 1000)), "no flapping"
    assert FailingDisk(1000).look(600.0, fails=True)
