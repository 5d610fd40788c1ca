"""A machine with an empty disk takes over from the archive alone, when the only member in sync is lost.

`FAULT_COMPLETE=1` also stops a leader in the middle of a write to a bucket, until another member leads.
"""

import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event

import httpx
import pytest
import trio

from archive.folders import restored_tree, without_ids
from broker.support import PATIENCE_S
from cli.support import Cli
from cluster.members import Member as Process
from cluster.members import NoAnswer
from coordination.conftest import cluster, etcd_member  # noqa: F401 - fixtures
from coordination.etcd_server import Member as Etcd
from faults.scenario import http
from replication.leader import tree_of
from storage.stores import Fault, Store, proxy
from trio_nsq.coordination.bucket import TTL_S

COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"
OFFLINE = Cli("", "")
long_form = pytest.mark.skipif(not COMPLETE, reason="leases of a bucket end after 15 s: make soak")


class Standbys:
    """Processes of members with one archive; each has its own folder, which is its machine's disk."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self._folder = folder
        self._flags = ["--restore-after=0s", "--checkpoint-interval=200ms", *flags]
        self._running: list[Process] = []

    def start(self, name: str, env: dict[str, str] | None = None) -> Process:
        process = Process(name, self._folder / name, lambda: self._flags, env or {})
        process.start()
        self._running.append(process)
        return process

    def close(self) -> None:
        for process in self._running:
            process.end()


@asynccontextmanager
async def standbys(folder: Path, *flags: str) -> AsyncIterator[Standbys]:
    found = Standbys(folder, list(flags))
    try:
        yield found
    finally:
        found.close()


def with_etcd(folder: Path, etcd: Etcd) -> list[str]:
    archive = folder / "archive"
    coordinator = f"--coordinator=etcd://127.0.0.1:{etcd.port}"
    return [coordinator, f"--archive={archive}", f"--restore-from={archive}"]


def lose(process: Process, etcd: Etcd) -> None:
    """End a process, and its lease; its disk is still there."""
    process.kill()
    process.end()
    etcd.revoke_leases()


async def leads(process: Process) -> None:
    """Wait until a process leads, and accepts messages."""
    with trio.fail_after(2 * PATIENCE_S):
        while True:
            try:
                if (await process.about())["role"] == "leader" and b"NOK" not in await process.ask(
                    "GET", "/ping"
                ):
                    return
            except NoAnswer:
                pass
            process.check()
            await trio.sleep(0.05)


async def publish(process: Process, body: str, timeout_s: float = PATIENCE_S) -> bool:
    """Return whether a message was acknowledged. Raises NoAnswer."""
    with trio.move_on_after(timeout_s):
        try:
            _, content = await http(process.http_address, "POST", "/pub", body.encode(), topic="t")
        except (OSError, trio.BrokenResourceError, ValueError, IndexError) as exc:
            raise NoAnswer(repr(exc)) from exc
        return content == b"OK"
    raise NoAnswer("no answer in time")


async def bodies(process: Process) -> list[str]:
    async with httpx.AsyncClient(base_url=f"http://{process.http_address}", timeout=PATIENCE_S) as client:
        lines = (await client.get("/topic/read?topic=t&from=0&count=10000")).text.splitlines()
    return [each["body"] for each in map(json.loads, lines) if "body" in each]


async def may_be_replaced(process: Process) -> None:
    """Wait until the leader has recorded that a member may be restored."""
    with trio.fail_after(PATIENCE_S):
        while not ((await process.about())["state"] or {}).get("archive"):
            await trio.sleep(0.05)


async def archived(process: Process) -> None:
    """Wait until the leader has archived everything."""
    with trio.fail_after(PATIENCE_S):
        while True:
            found = json.loads(await process.ask("GET", "/cluster"))["archive"]
            if found["state"] == "archiving" and not found["lag_operations"]:
                return
            await trio.sleep(0.05)


def has_data(process: Process) -> bool:
    """Whether something was sent to the HTTP port of a process, which it has not read."""
    port = f":{int(process.http_address.rpartition(':')[2]):04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(fields[1].endswith(port) and not fields[4].endswith(":00000000") for fields in lines)


async def in_sync(leader: Process, members: int) -> None:
    with trio.fail_after(PATIENCE_S):
        while len(((await leader.about())["state"] or {}).get("in_sync", ())) < members:
            await trio.sleep(0.05)


async def leader_of(*processes: Process) -> Process | None:
    for each in processes:
        try:
            if (await each.about())["role"] == "leader":
                return each
        except NoAnswer:
            each.check()
    return None


async def reason_of(process: Process) -> str:
    """Return why a member does not lead; empty if it does not answer yet."""
    try:
        return str((await process.about())["reason"])
    except NoAnswer:
        process.check()
        return ""


async def refused_promotion(process: Process) -> bytes:
    async with httpx.AsyncClient(base_url=f"http://{process.http_address}", timeout=PATIENCE_S) as client:
        answer = await client.post("/cluster/promote")
    assert answer.status_code == 409
    return answer.content


async def test_an_empty_disk_takes_over_and_nothing_acknowledged_is_lost(
    tmp_path: Path,
    etcd_member: Etcd,  # noqa: F811
) -> None:
    etcd_member.remove("/trio-nsq/prod/")
    async with standbys(tmp_path, *with_etcd(tmp_path, etcd_member), "--archive-before-ok") as members:
        first = members.start("first")
        await leads(first)
        await may_be_replaced(first)
        acknowledged: list[str] = []

        async def go_on() -> None:
            while True:
                try:
                    if await publish(first, body := str(len(acknowledged))):
                        acknowledged.append(body)
                except NoAnswer:
                    return

        async with trio.open_nursery() as nursery:
            nursery.start_soon(go_on)
            with trio.fail_after(PATIENCE_S):
                while len(acknowledged) < 30:
                    await trio.sleep(0.01)
            lose(first, etcd_member)
        second = members.start("second")
        await leads(second)
        found = await bodies(second)
        assert found[: len(acknowledged)] == acknowledged
        assert len(found) <= len(acknowledged) + 1
        assert await publish(second, "after")
        # The lost leader comes back, with its disk: it follows.
        first.start()
        await in_sync(second, 2)
        assert await bodies(first) == [*found, "after"]


async def test_all_disks_are_lost_and_an_empty_member_is_promoted(
    tmp_path: Path,
    etcd_member: Etcd,  # noqa: F811
) -> None:
    """Two were in sync, so none is restored by itself. The one that is promoted does not lead without messages."""
    etcd_member.remove("/trio-nsq/prod/")
    async with standbys(tmp_path, *with_etcd(tmp_path, etcd_member), "--archive-before-ok") as members:
        first, second = members.start("first"), members.start("second")
        with trio.fail_after(2 * PATIENCE_S):
            while (leader := await leader_of(first, second)) is None:
                await trio.sleep(0.05)
        await leads(leader)
        await in_sync(leader, 2)
        await may_be_replaced(leader)
        for body in (sent := [str(number) for number in range(10)]):
            assert await publish(leader, body)
        lost = {(await each.about())["id"] for each in (first, second)}
        leader.kill()
        for each in (first, second):  # before the lease of the leader ends: none is in sync alone
            each.kill()
            each.end()
        etcd_member.revoke_leases()
        third = members.start("third")
        with trio.fail_after(PATIENCE_S):
            while not lost <= set(re.findall("[0-9a-f]{16}", reason := await reason_of(third))):
                await trio.sleep(0.05)
        assert "qcli cluster promote" in reason
        (tmp_path / "archive").rename(tmp_path / "away")
        assert b"is no archive of a broker" in await refused_promotion(third)
        (tmp_path / "away").rename(tmp_path / "archive")
        assert await third.ask("POST", "/cluster/promote") == b""
        await leads(third)
        assert await bodies(third) == sent
        assert await publish(third, "after")


@pytest.mark.slow
@long_form
async def test_without_before_ok_only_what_was_not_archived_is_lost(
    tmp_path: Path,
    etcd_member: Etcd,  # noqa: F811
) -> None:
    etcd_member.remove("/trio-nsq/prod/")
    async with standbys(tmp_path, *with_etcd(tmp_path, etcd_member), "--archive-interval=2s") as members:
        process = members.start("life-0")
        await leads(process)
        sent: list[str] = []
        for life in range(1, 6):
            sent += [f"{life}-{number}" for number in range(10)]
            for body in sent[-10:]:
                assert await publish(process, body)
            await archived(process)
            await may_be_replaced(process)
            more = [f"{life}-more-{number}" for number in range(10)]
            for body in more:
                assert await publish(process, body)
            lose(process, etcd_member)
            process = members.start(f"life-{life}")
            await leads(process)
            found = await bodies(process)
            assert found[: len(sent)] == sent, "what was archived is there"
            assert found[len(sent) :] == more[: len(found) - len(sent)]
            sent = found


@pytest.mark.slow
@long_form
@pytest.mark.parametrize(("has_follower", "before_ok"), [(True, True), (False, True), (False, False)])
async def test_a_leader_that_is_stopped_in_a_write_changes_nothing_when_it_wakes(
    tmp_path: Path, s3: Store, has_follower: bool, before_ok: bool
) -> None:
    """The next leader is a follower in sync; or a member with an empty disk."""
    place = s3.new_place()
    archive, released, is_waiting, healed = f"{place}/archive", Event(), Event(), Event()
    flags = [f"--coordinator={place}/coordinator", f"--archive={archive}", f"--restore-from={archive}"]
    with proxy(s3) as between:

        def judge(method: str, path: str) -> Fault | None:
            if method == "PUT" and "stream/" in path and is_stopping.is_set() and not is_waiting.is_set():
                is_waiting.set()
                released.wait(4 * PATIENCE_S)
            elif is_waiting.is_set():
                healed.wait(4 * PATIENCE_S)
            return None

        is_stopping = Event()
        between.judge = judge
        async with (
            standbys(tmp_path, *flags, "--archive-before-ok") as members,
            trio.open_nursery() as nursery,
        ):
            first = members.start("first", s3.behind(between.endpoint).env)
            await leads(first)
            if has_follower:
                second = members.start("second", s3.env)
                await in_sync(first, 2)
            await may_be_replaced(first)
            sent = [str(number) for number in range(10)]
            for body in sent:
                assert await publish(first, body)
            answers: dict[str, bool] = {}

            async def try_to_publish(body: str) -> None:
                answers[body] = await publish(first, body, 6 * PATIENCE_S)  # it is stopped for long

            is_stopping.set()
            nursery.start_soon(try_to_publish, "in the write")
            with trio.fail_after(PATIENCE_S):
                while not is_waiting.is_set():
                    await trio.sleep(0.01)
            first.signal(signal.SIGSTOP)
            if not has_follower:
                second = members.start("second", s3.env)
            await leads(second)
            assert (await bodies(second))[:10] == sent
            assert await publish(second, "after")
            await archived(second)
            nursery.start_soon(try_to_publish, "while it is stopped")
            with trio.fail_after(PATIENCE_S):
                while not has_data(first):
                    await trio.sleep(0.05)
            released.set()
            first.signal(signal.SIGCONT)
            with trio.fail_after(PATIENCE_S):
                while "while it is stopped" not in answers:  # it cannot ask whether it leads
                    await trio.sleep(0.05)
            healed.set()
            await in_sync(second, 2)
            with trio.fail_after(PATIENCE_S):
                while len(answers) < 2:
                    await trio.sleep(0.05)
            found = await bodies(second)
            assert found == await bodies(first)
            assert set(found) - answers.keys() == {*sent, "after"}
            if before_ok:
                assert {body for body, is_ok in answers.items() if is_ok} <= set(found)
            else:
                assert not answers["while it is stopped"] or "while it is stopped" in found
            assert await publish(first, "last")
            with trio.fail_after(PATIENCE_S):
                while True:
                    await archived(second)
                    with s3.here():
                        tree = await trio.to_thread.run_sync(restored_tree, archive, tmp_path)
                    if tree == without_ids(tree_of(second.data_path)):
                        break
            checked = Cli("", "", env=s3.env)("archive", "verify", archive, "--all")
            assert checked.code == 0, checked


@pytest.mark.slow
@long_form
async def test_a_leader_that_may_be_replaced_acknowledges_nothing_without_its_lease(
    tmp_path: Path, s3: Store
) -> None:
    """It is alone in sync, is stopped for longer than its lease, and then cannot ask whether it leads."""
    place = s3.new_place()
    archive, is_cut, healed = f"{place}/archive", Event(), Event()
    flags = [f"--coordinator={place}/coordinator", f"--archive={archive}", f"--restore-from={archive}"]
    with proxy(s3) as between:

        def judge(method: str, path: str) -> Fault | None:
            if is_cut.is_set():
                healed.wait(4 * PATIENCE_S)
            return None

        between.judge = judge
        async with standbys(tmp_path, *flags) as members, trio.open_nursery() as nursery:
            first = members.start("first", s3.behind(between.endpoint).env)
            await leads(first)
            await may_be_replaced(first)
            assert await publish(first, "before")
            is_cut.set()
            first.signal(signal.SIGSTOP)
            answers: list[bool] = []

            async def try_to_publish() -> None:
                answers.append(await publish(first, "while it is stopped", 6 * PATIENCE_S))

            nursery.start_soon(try_to_publish)
            await trio.sleep(TTL_S + 1)
            first.signal(signal.SIGCONT)
            with trio.fail_after(2 * PATIENCE_S):
                while not answers:
                    await trio.sleep(0.05)
            assert answers == [False]
            healed.set()
            await leads(first)
            assert await publish(first, "after")
