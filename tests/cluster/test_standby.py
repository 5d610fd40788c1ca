"""When a member is restored from the archive, and what its folder is then."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from broker.support import connected, running_broker
from trio_nsq.access.secret import NO_SECRET
from trio_nsq.archive.manifest import read_manifest
from trio_nsq.cluster.context import MemberContext
from trio_nsq.cluster.membership import membership_of
from trio_nsq.cluster.options import ClusterOptions
from trio_nsq.cluster.standby import Standby
from trio_nsq.coordination.interface import Observation
from trio_nsq.coordination.state import Candidate, ClusterState, RecordedArchive, founded
from trio_nsq.coordination.static import StaticCoordinator
from trio_nsq.log import Files
from trio_nsq.replication.replica import Replica
from trio_nsq.storage import LocalStorage, canonical_place

LEADER = Candidate("L", ())
EPOCH = 7


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The archive of a broker with a topic."""
    folder = tmp_path_factory.mktemp("standby")
    trio.run(_archive, folder)
    return str(folder / "archive")


async def _archive(folder: Path) -> None:
    options: Any = {"archive": str(folder / "archive"), "archive_before_ok": True}
    async with running_broker(folder / "data", **options) as bound, connected(bound.tcp_address) as nsq:
        await nsq.publish("t", b"one")


class _Coordinator(StaticCoordinator):
    """Says what it is told to."""

    seen = Observation(None, is_held=False)

    def read(self) -> Observation:
        return self.seen


class _Member:
    """A member, its standby, and its folder."""

    def __init__(self, folder: Path, archive: str, restore_after_ms: int = 0) -> None:
        folder.mkdir(exist_ok=True)
        options = ClusterOptions("prod", "etcd://", restore_from=archive, restore_after_ms=restore_after_ms)
        membership, is_saved = membership_of(Files(), folder, "prod")
        self.path = folder
        self.coordinator = _Coordinator(folder, "prod")
        self.context = MemberContext(
            *(options, self.coordinator, Files(), folder, membership),
            is_saved=is_saved,
            addresses=(),
            record_bytes=1,
            secret=NO_SECRET,
            tls=None,
        )
        self.standby = Standby(self.context)
        self.opened = 0

    def lost(self, archive: str) -> ClusterState:
        """Return the value of a leader that was alone."""
        owner = read_manifest(LocalStorage(Path(archive))).manifest.owner
        state = founded("prod", LEADER, "s", EPOCH).joined(self.context.folder, ())
        return state.archived(RecordedArchive(canonical_place(archive), owner))

    async def is_ready(self, state: ClusterState | None, *, is_held: bool = False) -> bool:
        self.coordinator.seen = Observation(state, is_held)
        self.standby.see(self.coordinator.seen)
        return await self.standby.is_ready(self._replica)

    def _replica(self) -> Replica:
        self.opened += 1
        return Replica.open(Files(), self.path)


@pytest.fixture
def member(tmp_path: Path, archive: str) -> _Member:
    return _Member(tmp_path / "member", archive)


async def test_a_member_is_restored_once_and_keeps_what_it_had(member: _Member, archive: str) -> None:
    topics = member.path / "topics"
    (topics / "mine.topic").mkdir(parents=True)
    (topics / "mine.topic" / "00000000000000000000.log").write_bytes(b"mine")
    state = member.lost(archive)
    assert await member.is_ready(state)
    assert member.standby.restored_after == EPOCH
    assert [each.name for each in topics.iterdir()] == ["t.topic"]
    assert [each.name for each in member.path.glob("diverged-*/topics/*")] == ["mine.topic"]
    assert await member.is_ready(state)
    assert member.opened == 1
    assert await member.is_ready(state, is_held=True)
    assert member.standby.restored_after is None, "there was a leader since then: the archive may have more"


@pytest.mark.parametrize(
    "change",
    [
        lambda state, member: state.synced(member.folder),
        lambda state, member: state.joined("other", ()).synced("other"),
        lambda state, member: state.archived(None),
        lambda state, member: state.archived(RecordedArchive("s3://elsewhere", "1234")),
        lambda state, member: founded("prod", member.candidate, "s", EPOCH).archived(state.archive),
    ],
    ids=[
        "it is in sync",
        "another one is in sync",
        "the archive is late",
        "another archive",
        "it led itself",
    ],
)
async def test_a_member_is_not_restored(
    member: _Member, archive: str, change: Callable[[ClusterState, MemberContext], ClusterState]
) -> None:
    assert await member.is_ready(change(member.lost(archive), member.context))
    assert (member.opened, member.standby.restored_after) == (0, None)


async def test_it_waits(tmp_path: Path, archive: str) -> None:
    member = _Member(tmp_path / "member", archive, restore_after_ms=3_600_000)
    for state in (member.lost(archive), None):
        assert not await member.is_ready(state)
        assert "waiting" in member.standby.reason
    assert member.opened == 0


async def test_a_new_cluster_begins_with_its_archive(member: _Member, tmp_path: Path, archive: str) -> None:
    assert await member.is_ready(None)
    assert member.standby.restored_after == 0
    other = _Member(tmp_path / "other", str(tmp_path / "nothing"))
    assert await other.is_ready(None)
    assert (other.opened, other.standby.restored_after) == (0, None)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "broker.json").touch()
    full = _Member(tmp_path / "full", archive)
    assert await full.is_ready(None)
    assert (full.opened, full.standby.restored_after) == (0, None), "its own messages begin the cluster"


async def test_a_leader_that_comes_back_ends_the_restore(member: _Member, archive: str) -> None:
    state = member.lost(archive)
    member.standby.see(Observation(state, is_held=False))
    member.coordinator.seen = Observation(state, is_held=True)
    assert not await member.standby.is_ready(partial(Replica.open, Files(), member.path))
    assert "there was a leader" in member.standby.reason
    replica = Replica.open(Files(), member.path)
    assert replica.is_incomplete
    replica.close()
    assert await member.is_ready(state), "the leader is lost again"
    assert member.standby.restored_after == EPOCH


async def test_the_archive_of_another_cluster_is_not_restored(member: _Member, archive: str) -> None:
    """By mistake, another cluster has the same archive, and has written there since the leader was lost."""
    assert not await member.is_ready(member.lost(archive).archived(RecordedArchive(archive, "of-mine")))
    assert f"{archive} is the archive of another broker or cluster" in member.standby.reason
    assert member.standby.restored_after is None


async def test_an_archive_that_cannot_be_read(member: _Member, archive: str, tmp_path: Path) -> None:
    nothing = str(tmp_path / "nothing")
    other = _Member(tmp_path / "other", nothing)
    assert not await other.is_ready(other.lost(nothing))
    assert "is no archive of a broker" in other.standby.reason
    assert other.opened == 0, "the folder stays as it is"


@pytest.mark.parametrize("others", ["another one is in sync", "none is known"])
async def test_a_member_that_an_administrator_asks_is_restored_first(member: _Member, others: str) -> None:
    """Whoever was in sync, and without a wait."""
    state = None
    if others != "none is known":
        state = member.lost("").joined("other", ()).synced("other")
    member.standby.is_asked = True
    assert await member.is_ready(state)
    assert member.standby.restored_after == (0 if state is None else EPOCH)
    assert [each.name for each in (member.path / "topics").iterdir()] == ["t.topic"]


async def test_an_asked_member_does_not_lead_empty_unless_the_archive_has_not_begun(tmp_path: Path) -> None:
    nothing = str(tmp_path / "nothing")
    member = _Member(tmp_path / "member", nothing, restore_after_ms=3_600_000)
    member.standby.is_asked = True
    assert await member.is_ready(member.lost(""))
    assert (member.opened, member.standby.restored_after) == (0, None)
    assert not await member.is_ready(member.lost(nothing)), "it had begun, and is not there now"
    assert "is no archive of a broker" in member.standby.reason
    assert member.standby.reason.endswith("promote it again")


async def test_the_last_failure_stays_until_a_restore_works(tmp_path: Path, archive: str) -> None:
    place = tmp_path / "archive"
    place.symlink_to(tmp_path / "nothing")
    member = _Member(tmp_path / "member", str(place))
    state = member.lost(str(place))
    for _ in range(2):
        assert not await member.is_ready(state)
        assert "is no archive of a broker" in member.standby.reason
        assert "; next try in " in member.standby.reason
    place.unlink()
    place.symlink_to(archive)
    member.standby.is_asked = True  # at once
    assert await member.is_ready(state)
    assert member.standby.restored_after == EPOCH


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda state: state.joined("other", ()).synced("other"), "qcli cluster promote"),
        (lambda state: state.archived(None), "the lost leader L did not record"),
        (lambda state: state, ""),
    ],
    ids=["another one is in sync", "not recorded", "it may be restored"],
)
async def test_it_says_why_it_is_not_restored(
    member: _Member, archive: str, change: Callable[[ClusterState], ClusterState], reason: str
) -> None:
    member.standby.see(Observation(change(member.lost(archive)), is_held=False))
    found = member.standby.why_not
    assert (reason in found, archive in found) == (True, bool(reason))
    member.standby.see(Observation(change(member.lost(archive)), is_held=True))
    assert not member.standby.why_not
