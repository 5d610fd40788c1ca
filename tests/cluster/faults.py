"""What can happen to a cluster. Each fault is a context manager: it lasts as long as its block, and is over then."""

import math
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from cluster.drill import POLL_S, Drill, Outcome
from cluster.engines import Bucket, Etcd
from cluster.links import Way
from cluster.members import ENGINE, NoAnswer
from spark.support import until

_HOUR_S = 3600.0
_CLOCKS_DIFFER_S = 20.0

Strike = Callable[[Drill], AbstractAsyncContextManager[Outcome]]


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: What happens.
        strike: Does it.
        kind: The kind of engine that it needs; empty: any that elects leaders.
        needs_disks: Whether the data folders must be on file systems of their own.
        needs_etcds: Whether etcd must have several members.
        needs_clocks: Whether members must have clocks of their own.
        in_pairs: Whether it may happen together with another one.
    """

    name: str
    strike: Strike
    kind: str = ""
    needs_disks: bool = False
    needs_etcds: bool = False
    needs_clocks: bool = False
    in_pairs: bool = True

    def fits(self, *others: "Fault") -> bool:
        """Whether it may happen together with others: not with itself, nor with another fault of the engine."""
        kinds = [other.kind for other in others if other.kind]
        return self not in others and not (self.kind and kinds)

    def __str__(self) -> str:
        return self.name


FAULTS: list[Fault] = []


def _fault(
    name: str,
    *,
    kind: str = "",
    needs_disks: bool = False,
    needs_etcds: bool = False,
    needs_clocks: bool = False,
    in_pairs: bool = True,
) -> Callable[[Callable[[Drill], AsyncIterator[Outcome]]], Fault]:
    def add(function: Callable[[Drill], AsyncIterator[Outcome]]) -> Fault:
        fault = Fault(
            name, asynccontextmanager(function), kind, needs_disks, needs_etcds, needs_clocks, in_pairs
        )
        FAULTS.append(fault)
        return fault

    return add


# ---------------------------------------------------------------------- processes


@_fault("kill the leader")
async def kill_leader(drill: Drill) -> AsyncIterator[Outcome]:
    leader = await drill.leader()
    outcome = Outcome(besides=leader)
    leader.kill()
    yield outcome
    await drill.restart(leader)


@_fault("kill a follower")
async def kill_follower(drill: Drill) -> AsyncIterator[Outcome]:
    _, follower = await drill.roles()
    follower.kill()
    yield Outcome()
    await drill.restart(follower)


@_fault("kill all members")
async def kill_all(drill: Drill) -> AsyncIterator[Outcome]:
    members = drill.members[:]
    drill.chance.shuffle(members)
    for member in members:
        member.kill()
    yield Outcome(goes_on=False)
    drill.chance.shuffle(members)
    for member in members:
        await drill.restart(member)


@_fault("stop the leader's process for longer than its lease")
async def pause_leader(drill: Drill) -> AsyncIterator[Outcome]:
    leader = await drill.leader()
    outcome = Outcome(besides=leader)
    leader.signal(signal.SIGSTOP)
    yield outcome
    leader.signal(signal.SIGCONT)


@_fault("stop a follower's process")
async def pause_follower(drill: Drill) -> AsyncIterator[Outcome]:
    _, follower = await drill.roles()
    follower.signal(signal.SIGSTOP)
    yield Outcome()
    follower.signal(signal.SIGCONT)


@_fault("SIGTERM to the leader")
async def terminate_leader(drill: Drill) -> AsyncIterator[Outcome]:
    leader = await drill.leader()
    outcome = Outcome(besides=leader)
    leader.terminate()
    yield outcome
    await drill.restart(leader)


@_fault("SIGTERM to a follower")
async def terminate_follower(drill: Drill) -> AsyncIterator[Outcome]:
    _, follower = await drill.roles()
    follower.terminate()
    yield Outcome()
    await drill.restart(follower)


@_fault("switch")
async def switch(drill: Drill) -> AsyncIterator[Outcome]:
    leader, follower = await drill.roles()
    outcome = Outcome(besides=leader)
    try:
        await follower.about()
        await leader.ask("POST", "/cluster/switch", to=follower.folder_id)
    except NoAnswer as exc:
        drill.refused.append(f"switch: {exc}")  # allowed if another fault lasts
        outcome = Outcome(goes_on=False)
    yield outcome


@_fault("members restart one after the other, the leader last", in_pairs=False)
async def restart_in_turn(drill: Drill) -> AsyncIterator[Outcome]:
    leader = await drill.leader()
    for member in sorted(drill.members, key=lambda member: member is leader):
        member.terminate()
        with drill.cluster.patience(f"{member.name} does not end"):
            await member.has_ended(math.inf)
        member.start()
        await drill.cluster.wait_in_sync()
    yield Outcome()


# ---------------------------------------------------------------------- clocks


@_fault("the leader's clock is set by an hour", needs_clocks=True, in_pairs=False)
async def set_leader_clock(drill: Drill) -> AsyncIterator[Outcome]:
    leader = await drill.leader()
    assert leader.clock is not None
    leader.clock.set(drill.chance.choice((-_HOUR_S, _HOUR_S)))
    yield Outcome(outlives_lease=True)
    leader.clock.set(0)


@_fault("clocks of members are set by seconds", needs_clocks=True)
async def set_clocks(drill: Drill) -> AsyncIterator[Outcome]:
    # Deferred messages are due by the clock of a member that begins to lead: not by hours, which the test would wait.
    for member in drill.members:
        assert member.clock is not None
        member.clock.set(drill.chance.uniform(-_CLOCKS_DIFFER_S, _CLOCKS_DIFFER_S))
    yield Outcome()
    for member in drill.members:
        assert member.clock is not None
        member.clock.set(0)


# ---------------------------------------------------------------------- links


@_fault("no data between leader and follower")
async def part(drill: Drill) -> AsyncIterator[Outcome]:
    links = drill.cluster.links(*await drill.roles())
    for link in links:
        link.stall()
    yield Outcome()
    for link in links:
        link.mend()


@_fault("connections between leader and follower are reset and refused")
async def part_by_reset(drill: Drill) -> AsyncIterator[Outcome]:
    links = drill.cluster.links(*await drill.roles())
    for link in links:
        link.cut()
    yield Outcome()
    for link in links:
        link.mend()


@_fault("a follower reads and never acknowledges")
async def no_acknowledgements(drill: Drill) -> AsyncIterator[Outcome]:
    leader, follower = await drill.roles()
    link = drill.cluster.link(follower, leader)
    link.stall(Way.THERE)
    yield Outcome()
    link.mend()


@_fault("a follower gets nothing, and can send")
async def no_operations(drill: Drill) -> AsyncIterator[Outcome]:
    leader, follower = await drill.roles()
    link = drill.cluster.link(follower, leader)
    link.stall(Way.BACK)
    yield Outcome()
    link.mend()


@_fault("slow links between members")
async def slow_links(drill: Drill) -> AsyncIterator[Outcome]:
    links = drill.cluster.links(*await drill.roles())
    for link in links:
        link.delay_s = drill.chance.choice((0.02, 0.2))
    yield Outcome()
    for link in links:
        link.mend()


@_fault("connections between members are reset again and again")
async def flapping_links(drill: Drill) -> AsyncIterator[Outcome]:
    links = drill.cluster.links(*await drill.roles())

    async def flap() -> None:
        while True:
            await trio.sleep(drill.chance.uniform(0.05, 1))  # the moment is random: there is no condition
            for link in links:
                link.reset()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(flap)
        yield Outcome()
        nursery.cancel_scope.cancel()


@_fault("the leader does not reach the engine")
async def leader_without_engine(drill: Drill) -> AsyncIterator[Outcome]:
    leader = await drill.leader()
    link = drill.cluster.link(leader, ENGINE)
    link.stall()
    yield Outcome(outlives_lease=True)
    link.mend()


@_fault("the engine refuses the leader's connections")
async def leader_refused_by_engine(drill: Drill) -> AsyncIterator[Outcome]:
    leader = await drill.leader()
    link = drill.cluster.link(leader, ENGINE)
    link.cut()
    yield Outcome(outlives_lease=True)
    link.mend()


@_fault("the engine's answers do not reach the leader")
async def leader_does_not_hear_engine(drill: Drill) -> AsyncIterator[Outcome]:
    leader = await drill.leader()
    link = drill.cluster.link(leader, ENGINE)
    link.stall(Way.BACK)
    yield Outcome(outlives_lease=True)
    link.mend()


@_fault("the leader reaches neither members nor the engine, but clients")
async def isolate_leader(drill: Drill) -> AsyncIterator[Outcome]:
    leader = await drill.leader()
    links = [drill.cluster.link(leader, ENGINE)]
    for member in drill.members:
        links += drill.cluster.links(leader, member) if member is not leader else ()
    outcome = Outcome(besides=leader)
    for link in links:
        link.stall()
    yield outcome
    with drill.cluster.patience(
        f"{leader.name} still leads, although it reaches no other member and no engine"
    ):
        # Together with another fault, its links may be mended already.
        while drill.together == 1 and leader.is_running and await drill.leads(leader):
            await trio.sleep(POLL_S)  # another process: only its answers show progress
    for link in links:
        link.mend()


@_fault("a follower does not reach the engine")
async def follower_without_engine(drill: Drill) -> AsyncIterator[Outcome]:
    _, follower = await drill.roles()
    link = drill.cluster.link(follower, ENGINE)
    link.stall()
    yield Outcome()
    link.mend()


@_fault("the leader is lost with operations that no follower has", in_pairs=False)
async def divergent_tail(drill: Drill) -> AsyncIterator[Outcome]:
    leader = await drill.leader()
    links = [
        link
        for member in drill.members
        if member is not leader
        for link in drill.cluster.links(leader, member)
    ]
    for link in links:
        link.stall()
    with suppress(NoAnswer):
        position = (await leader.about())["position"]
        with drill.cluster.patience("the leader changes nothing"):
            while (await leader.about())["position"] == position:
                await trio.sleep(POLL_S)  # another process: only its answers show progress
    outcome = Outcome(besides=leader)
    leader.kill()
    for link in links:
        link.mend()
    yield outcome
    await drill.restart(leader)


# ---------------------------------------------------------------------- folders


@_fault("a follower's folder runs twice", in_pairs=False)
async def same_folder_twice(drill: Drill) -> AsyncIterator[Outcome]:
    _, follower = await drill.roles()
    await drill.kill(follower)
    copy = follower.data_path.with_name(f"{follower.data_path.name}-copy")
    await trio.to_thread.run_sync(shutil.copytree, follower.data_path, copy)
    twin = await drill.cluster.add(copy)
    drill.members.remove(twin)  # clients do not use it
    drill.cluster.guests.append(twin)
    follower.start()
    twin.start()
    yield Outcome()
    with suppress(NoAnswer):
        await twin.about()
    await drill.kill(twin)
    drill.cluster.guests.remove(twin)
    await trio.to_thread.run_sync(shutil.rmtree, copy)


@_fault("a follower's folder is lost")
async def empty_folder(drill: Drill) -> AsyncIterator[Outcome]:
    _, follower = await drill.roles()
    if await drill.kill(follower):
        drill.lost_folders.append(follower.folder_id)
        await trio.to_thread.run_sync(_clear, follower.data_path)
    await drill.restart(follower)
    yield Outcome()


@_fault("the leader is killed, and its folder is lost", in_pairs=False)
async def lose_leader(drill: Drill) -> AsyncIterator[Outcome]:
    leader = await drill.leader()
    outcome = Outcome(besides=leader)
    if await drill.kill(leader) and not await drill.is_alone(leader):
        await trio.to_thread.run_sync(_clear, leader.data_path)
        drill.lost_folders.append(leader.folder_id)
    yield outcome
    await drill.restart(leader)


@_fault("a follower returns with an old copy of its folder", in_pairs=False)
async def old_folder(drill: Drill) -> AsyncIterator[Outcome]:
    _, follower = await drill.roles()
    await drill.kill(follower)
    copy = follower.data_path.with_name(f"{follower.data_path.name}-old")
    await trio.to_thread.run_sync(shutil.copytree, follower.data_path, copy)
    await drill.restart(follower)
    await drill.serves()
    await drill.cluster.wait_in_sync(follower)
    await drill.kill(follower)
    # Only a member that is not in sync may come back older than it was.
    await drill.cluster.wait_not_in_sync(follower)
    await trio.to_thread.run_sync(_replace, follower.data_path, copy)
    await drill.restart(follower)
    yield Outcome()


def _clear(folder: Path) -> None:
    """Empty a folder, which may be where a file system is mounted."""
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _replace(folder: Path, by: Path) -> None:
    _clear(folder)
    for entry in by.iterdir():
        shutil.move(entry, folder / entry.name)
    by.rmdir()


@_fault("the leader's disk hangs", needs_disks=True)
async def leader_disk_hangs(drill: Drill) -> AsyncIterator[Outcome]:
    leader = await drill.leader()
    disk = drill.disk_of(leader)
    outcome = Outcome(besides=leader)
    await trio.to_thread.run_sync(disk.freeze)
    try:
        yield outcome
    finally:
        await trio.to_thread.run_sync(disk.thaw)


@_fault("a follower's disk hangs", needs_disks=True)
async def follower_disk_hangs(drill: Drill) -> AsyncIterator[Outcome]:
    _, follower = await drill.roles()
    disk = drill.disk_of(follower)
    await trio.to_thread.run_sync(disk.freeze)
    try:
        yield Outcome()
    finally:
        await trio.to_thread.run_sync(disk.thaw)


@_fault("a follower's disk is full", needs_disks=True)
async def follower_disk_full(drill: Drill) -> AsyncIterator[Outcome]:
    _, follower = await drill.roles()
    disk = drill.disk_of(follower)
    await trio.to_thread.run_sync(disk.fill)
    yield Outcome()
    await trio.to_thread.run_sync(disk.make_room)
    await drill.restart(follower)


# ---------------------------------------------------------------------- etcd


def _etcd(drill: Drill) -> Etcd:
    assert isinstance(drill.engine, Etcd)
    return drill.engine


@_fault("etcd is killed", kind="etcd")
async def kill_etcd(drill: Drill) -> AsyncIterator[Outcome]:
    _etcd(drill).kill()
    yield Outcome(outlives_lease=True)
    await trio.to_thread.run_sync(_etcd(drill).restart)


@_fault("etcd restarts", kind="etcd")
async def restart_etcd(drill: Drill) -> AsyncIterator[Outcome]:
    _etcd(drill).kill()
    await trio.to_thread.run_sync(_etcd(drill).restart)
    yield Outcome()


@_fault("a member of etcd is killed", kind="etcd", needs_etcds=True)
async def kill_etcd_member(drill: Drill) -> AsyncIterator[Outcome]:
    server = drill.chance.choice(_etcd(drill).servers)
    server.kill()
    yield Outcome(outlives_lease=True)
    server.start()
    await trio.to_thread.run_sync(until, server.answers)


@_fault("another member of etcd leads", kind="etcd", needs_etcds=True)
async def move_etcd_leader(drill: Drill) -> AsyncIterator[Outcome]:
    await trio.to_thread.run_sync(_etcd(drill).move_leader)
    yield Outcome(outlives_lease=True)


@_fault("etcd has lost its data, and gets it back", kind="etcd")
async def wipe_etcd(drill: Drill) -> AsyncIterator[Outcome]:
    await trio.to_thread.run_sync(_etcd(drill).lose_data)
    yield Outcome(goes_on=False)
    await trio.to_thread.run_sync(_etcd(drill).restore_data)


@_fault("etcd's keys are removed", kind="etcd")
async def remove_keys(drill: Drill) -> AsyncIterator[Outcome]:
    await trio.to_thread.run_sync(_etcd(drill).remove_keys)
    # A leader that runs writes them again. If it does not, because of another fault, members wait for an administrator.
    drill.has_lost_value = drill.together > 1
    yield Outcome()


@_fault(
    "an earlier value is put back at etcd, in which a follower that is away is in sync",
    kind="etcd",
    in_pairs=False,
)
async def put_back_value(drill: Drill) -> AsyncIterator[Outcome]:
    etcd = _etcd(drill)
    value = await trio.to_thread.run_sync(etcd.value)
    _, follower = await drill.roles()
    await drill.kill(follower)
    await drill.cluster.wait_not_in_sync(follower)
    await trio.to_thread.run_sync(etcd.put_back, value)
    with drill.cluster.patience("the leader does not write its value again"):
        while await trio.to_thread.run_sync(etcd.value) == value:
            await trio.sleep(POLL_S)  # another process: only its answers show progress
    yield Outcome()
    await drill.restart(follower)


@_fault("all leases are revoked", kind="etcd")
async def revoke_leases(drill: Drill) -> AsyncIterator[Outcome]:
    await trio.to_thread.run_sync(_etcd(drill).revoke_leases)
    yield Outcome()


@_fault("etcd hangs", kind="etcd")
async def pause_etcd(drill: Drill) -> AsyncIterator[Outcome]:
    with ExitStack() as stack:
        for server in _etcd(drill).servers:
            stack.enter_context(server.stopped())
        yield Outcome(outlives_lease=True)


@_fault("etcd is slow", kind="etcd")
async def slow_etcd(drill: Drill) -> AsyncIterator[Outcome]:
    links = [drill.cluster.link(member, ENGINE) for member in drill.members]
    for link in links:
        link.delay_s = 0.3
    yield Outcome()
    for link in links:
        link.mend()


# ---------------------------------------------------------------------- people


@_fault("the leader is killed, and an administrator promotes another member", kind="static")
async def promote_another(drill: Drill) -> AsyncIterator[Outcome]:
    leader, follower = await drill.roles()
    outcome = Outcome(besides=leader)
    leader.kill()
    await drill.cluster.promote(follower)
    yield outcome
    await drill.restart(leader)


# ---------------------------------------------------------------------- a bucket


def _bucket(drill: Drill) -> Bucket:
    assert isinstance(drill.engine, Bucket)
    return drill.engine


@_fault("the store refuses all requests", kind="bucket")
async def store_fails(drill: Drill) -> AsyncIterator[Outcome]:
    _bucket(drill).fail()
    yield Outcome(outlives_lease=True)
    _bucket(drill).mend()


@_fault("answers of the store are lost", kind="bucket")
async def lost_answers(drill: Drill) -> AsyncIterator[Outcome]:
    _bucket(drill).lose_answers(0.3, drill.chance)
    yield Outcome()
    _bucket(drill).mend()
