"""Archives with missing and damaged objects: verify names them, and a restore has everything else."""

import json
import re
from errno import ENOSPC
from functools import partial
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import httpx
import pytest
import trio

from broker.support import PATIENCE_S, connected, mpub, running_broker
from cli.support import Cli
from trio_nsq.archive.content import read_pieces
from trio_nsq.archive.examination import verify
from trio_nsq.archive.manifest import (
    CHECKPOINTS,
    MANIFEST,
    ArchiveDamaged,
    complete_checkpoints,
    stream_folder,
)
from trio_nsq.archive.restore import OperationsDamaged, RestorePlan, shown_time
from trio_nsq.archive.writer import ArchiveWriter
from trio_nsq.broker.restoring import restore_folder
from trio_nsq.replication.catch_up import Operations
from trio_nsq.storage import LocalStorage

OFFLINE = Cli("", "")
BODIES = [f"message {number}" for number in range(400)]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive with some segments, and operations behind its last checkpoint."""
    folder = tmp_path_factory.mktemp("damage")
    archive = folder / "archive"
    for bodies in (BODIES[:200], BODIES[200:]):  # a start archives the segments that are there
        trio.run(_publish, folder / "data", archive, bodies)
    assert len(list(archive.glob("t/*/*.seg"))) > 3
    return archive


async def _publish(data: Path, archive: Path, bodies: list[str]) -> None:
    options: Any = {"archive": str(archive), "archive_interval_ms": 10, "max_bytes_per_file": 1000}
    async with running_broker(data, **options) as bound, connected(bound.tcp_address) as nsq:
        async with httpx.AsyncClient(base_url=f"http://{bound.http_address}", timeout=PATIENCE_S) as client:
            with trio.fail_after(PATIENCE_S):
                while (await client.get("/stats?format=json")).json()["archive"]["state"] != "archiving":
                    await trio.sleep(0.01)
        for at in range(0, len(bodies), 10):
            await nsq.send(mpub("t", *(body.encode() for body in bodies[at : at + 10])))
            await nsq.ok()


async def bodies_in(data: Path) -> list[str]:
    async with running_broker(data) as bound:
        async with httpx.AsyncClient(base_url=f"http://{bound.http_address}", timeout=PATIENCE_S) as client:
            answer = await client.get("/topic/read?topic=t&from=0&count=1000")
            lines = [json.loads(line) for line in answer.text.splitlines()]
            return [each["body"] for each in lines if "body" in each]


def a_segment(archive: Path) -> Path:
    return sorted(archive.glob("t/*/*.seg"))[1]


async def test_a_whole_archive(archive: Path, tmp_path: Path) -> None:
    _, damage = restore_folder(str(archive), tmp_path / "restored")
    assert damage == []
    assert await bodies_in(tmp_path / "restored") == BODIES
    shown = OFFLINE("archive", "status", str(archive), "--format", "json")
    last = json.loads(shown.out.splitlines()[-1])
    assert (shown.code, last["segments"] > 3, last["objects"] > 0) == (0, True, True)
    assert b"nothing is missing or damaged" in OFFLINE("archive", "verify", str(archive), "--all").out


async def test_a_missing_segment_costs_its_messages(archive: Path, tmp_path: Path) -> None:
    broken = Path(copytree(archive, tmp_path / "broken"))
    a_segment(broken).unlink()
    verified = OFFLINE("archive", "verify", str(broken))
    assert verified.code == 5
    assert f"{a_segment(archive).name} is missing".encode() in verified.out
    restored = OFFLINE("archive", "restore", str(broken), "--data-path", str(tmp_path / "restored"))
    assert restored.code == 5
    assert "is missing: messages are missing." in restored.err
    found = await bodies_in(tmp_path / "restored")
    assert 0 < len(BODIES) - len(found) < 50
    assert set(found) < set(BODIES)


async def test_a_damaged_segment_costs_its_damaged_records(archive: Path, tmp_path: Path) -> None:
    broken = Path(copytree(archive, tmp_path / "broken"))
    content = bytearray(a_segment(broken).read_bytes())
    content[len(content) // 2] ^= 0xFF
    a_segment(broken).write_bytes(content)
    _, (what,) = restore_folder(str(broken), tmp_path / "restored")
    name = a_segment(archive).name
    assert what.endswith(f"{name} has other content than when it was archived: messages are missing")
    found = await bodies_in(tmp_path / "restored")
    assert 0 < len(BODIES) - len(found) < 50
    assert set(found) < set(BODIES)


@pytest.mark.parametrize("another", ["segment of the log", "log"])
async def test_the_content_of_another_segment_costs_the_messages_of_its_place(
    archive: Path, tmp_path: Path, another: str
) -> None:
    """A broker would not open a topic that has it."""
    broken = Path(copytree(archive, tmp_path / "broken"))
    other = sorted(broken.glob("t/*/*.seg"))[0]
    if another == "log":
        for _ in range(2):  # a start archives the segments that are there
            await _publish(tmp_path / "data", tmp_path / "archive", BODIES[:200])
        other = sorted((tmp_path / "archive").glob("t/*/*.seg"))[1]
    victim = sorted(broken.glob("t/*/*.seg"))[1]
    victim.write_bytes(other.read_bytes())
    _, damage = restore_folder(str(broken), tmp_path / "restored")
    assert [each.endswith(f"{victim.name} has another segment: messages are missing") for each in damage] == [
        True
    ]
    found = await bodies_in(tmp_path / "restored")
    assert 0 < len(BODIES) - len(found) < 50


@pytest.mark.parametrize("where", ["@checkpoints/*/0*", "@checkpoints/*/segments", "@stream/*/*"])
def test_other_objects_are_needed(archive: Path, tmp_path: Path, where: str) -> None:
    broken = Path(copytree(archive, tmp_path / "broken"))
    victims = sorted(broken.glob(where))
    victim = victims[-1] if where.startswith("@checkpoints") else victims[-2]
    content = victim.read_bytes()
    for damaged in (None, content[:-1] + bytes([content[-1] ^ 1]), content[:10], b""):
        if damaged is None:
            victim.unlink()
        else:
            victim.write_bytes(damaged)
        with pytest.raises(ArchiveDamaged):
            restore_folder(str(broken), tmp_path / "restored")
        assert OFFLINE("archive", "verify", str(broken)).code == 5
    victim.write_bytes(content)
    restore_folder(str(broken), tmp_path / "restored")


def test_the_commands_name_a_damaged_manifest_and_prune_writes_it_again(
    archive: Path, tmp_path: Path
) -> None:
    broken = Path(copytree(archive, tmp_path / "broken"))
    (broken / MANIFEST).write_bytes(b"garbage")
    verified = OFFLINE("archive", "verify", str(broken))
    assert (verified.code, f"{MANIFEST} is damaged: the records of checkpoints".encode() in verified.out) == (
        5,
        True,
    )
    shown = OFFLINE("archive", "status", str(broken), "--format", "json")
    assert (shown.code, f"{MANIFEST} is damaged" in shown.err) == (5, True)
    assert len(shown.out.splitlines()) == len(complete_checkpoints(LocalStorage(archive)))
    restored = OFFLINE("archive", "restore", str(broken), "--data-path", str(tmp_path / "restored"))
    assert (restored.code, "nothing is lost by that" in restored.err) == (5, True)
    assert OFFLINE("archive", "prune", str(broken), "--keep", "0s").code == 0
    assert [OFFLINE("archive", command, str(broken)).code for command in ("verify", "status")] == [0, 0]
    records = [path.name for path in (broken / CHECKPOINTS).iterdir() if path.is_file()]
    assert len(records) == 1, "those of removed checkpoints are removed"


def test_a_damaged_segment_keeps_no_other_topic_from_being_restored(archive: Path, tmp_path: Path) -> None:
    broken = Path(copytree(archive, tmp_path / "broken"))
    for segment in broken.glob("t/*/*.seg"):
        segment.unlink()
    restored = OFFLINE(
        *("archive", "restore", str(broken), "--data-path", str(tmp_path / "restored"), "--topic", "other")
    )
    assert (restored.code, restored.err) == (0, "")


# ---------------------------------------------------------------------- several checkpoints of one run


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive with several checkpoints of one run, and operations behind the last one."""
    with pytest.MonkeyPatch.context() as patch:
        small = partial(ArchiveWriter, checkpoint_bytes=2000, segments_s=0.01)
        patch.setattr("trio_nsq.broker.archiving.ArchiveWriter", small)
        while True:  # the last checkpoint may come after the last messages
            folder = tmp_path_factory.mktemp("long-run")
            trio.run(_publish_for_long, folder / "data", folder / "archive")
            if _ends_with_messages(folder / "archive"):
                return folder / "archive"


def _ends_with_messages(archive: Path) -> bool:
    """Whether the second half of the operations behind the last checkpoint has the last message."""
    storage = LocalStorage(archive)
    point = RestorePlan(storage).point
    stream = point.stream
    pieces = (
        piece
        for name, _ in stream[len(stream) // 2 :]
        for piece in read_pieces(storage, name, point.checkpoint.run, lambda size: None)
    )
    last = BODIES[-1].encode()
    return len(stream) >= 4 and any(
        isinstance(each, Operations) and last in bytes(each.data) for each in pieces
    )


async def _publish_for_long(data: Path, archive: Path) -> None:
    options: Any = {"archive": str(archive), "archive_interval_ms": 10}
    async with running_broker(data, **options) as bound, connected(bound.tcp_address) as nsq:
        client = httpx.AsyncClient(base_url=f"http://{bound.http_address}", timeout=PATIENCE_S)
        for at in range(0, len(BODIES), 10):
            await nsq.send(mpub("t", *(body.encode() for body in BODIES[at : at + 10])))
            await nsq.ok()
            with trio.fail_after(PATIENCE_S):
                while (about := (await client.get("/stats?format=json")).json()["archive"])[
                    "lag_operations"
                ] or about["checkpoints"] < min(3, at // 100):
                    await trio.sleep(0.01)
        await client.aclose()


def _newest_checkpoint(archive: Path) -> Path:
    return archive / f"@checkpoints/{RestorePlan(LocalStorage(archive)).point.checkpoint.id:010d}"


@pytest.mark.parametrize("name", ["0000000001", "segments"])
async def test_a_damaged_checkpoint_costs_nothing_if_the_run_has_an_earlier_one(
    long_run: Path, tmp_path: Path, name: str
) -> None:
    broken = Path(copytree(long_run, tmp_path / "broken"))
    newest = _newest_checkpoint(broken)
    (newest / name).write_bytes(b"damaged")
    restored = OFFLINE("archive", "restore", str(broken), "--data-path", str(tmp_path / "restored"))
    assert restored.code == 5
    assert re.search(
        f"{newest.name}/{name} is .*: checkpoint [0-9]+ was used instead, and nothing", restored.err
    )
    assert await bodies_in(tmp_path / "restored") == BODIES


async def test_the_state_before_damaged_operations(long_run: Path, tmp_path: Path) -> None:
    broken = Path(copytree(long_run, tmp_path / "broken"))
    stream = RestorePlan(LocalStorage(long_run)).point.stream
    name, to = stream[len(stream) // 2].name, str(tmp_path / "restored")
    before = shown_time(stream[len(stream) // 2 - 1].about.time_ms)
    content = (broken / name).read_bytes()
    for change in ((broken / name).unlink, lambda: (broken / name).write_bytes(content[:-1])):
        change()
        refused = OFFLINE("archive", "restore", str(broken), "--data-path", to)
        assert refused.code == 5
        assert f"The state before is that of {before}: 'qcli archive restore --before-damage'" in refused.err
        restored = OFFLINE("archive", "restore", str(broken), "--data-path", to, "--before-damage")
        assert (restored.code, before.encode() in restored.out) == (5, True), restored
        assert "later changes are not restored" in restored.err
        found = await bodies_in(tmp_path / "restored")
        assert 0 < len(found) < len(BODIES)
        assert found == BODIES[: len(found)]
        rmtree(to)


async def test_a_state_of_an_earlier_run_instead_of_a_damaged_one(archive: Path, tmp_path: Path) -> None:
    broken = Path(copytree(archive, tmp_path / "broken"))
    (_newest_checkpoint(broken) / "0000000001").unlink()
    to = str(tmp_path / "restored")
    assert OFFLINE("archive", "restore", str(broken), "--data-path", to).code == 5
    restored = OFFLINE("archive", "restore", str(broken), "--data-path", to, "--before-damage")
    assert (restored.code, "later changes are not restored" in restored.err) == (5, True)
    assert await bodies_in(tmp_path / "restored") == BODIES[:200]


def test_an_archive_was_copied_over_another_one(long_run: Path, archive: Path, tmp_path: Path) -> None:
    """Objects of the same name that another broker has written are not taken as operations of this one."""
    mixed = copytree(long_run, tmp_path / "mixed")
    run = complete_checkpoints(LocalStorage(archive))[-1].run
    mine = complete_checkpoints(LocalStorage(mixed))[-1].run
    for path in (mixed / MANIFEST, *mixed.glob("@checkpoints/*.json")):
        path.write_text(path.read_text().replace(mine, run))
    found = [each.what for each in verify(LocalStorage(mixed), lambda size: None, all_checkpoints=False)]
    assert found
    assert all("another run of a broker has written it" in each for each in found)
    with pytest.raises(ArchiveDamaged, match="another run"):
        restore_folder(str(mixed), tmp_path / "restored")


class _HalfListed(LocalStorage):
    """An archive whose listing of one folder lacks the newest objects."""

    def __init__(self, archive: Path, folder: str, lacks: int) -> None:
        super().__init__(archive)
        self._half, self._lacks = folder, lacks

    def names(self, folder: str) -> list[str]:
        found = sorted(super().names(folder))
        return found[: -self._lacks] if folder == self._half else found


def test_half_of_a_listing(long_run: Path) -> None:
    """It is noticed if later objects are known; the newest ones are not, and the state is an earlier one, whole."""
    checkpoints = complete_checkpoints(LocalStorage(long_run))
    assert len(checkpoints) >= 3
    middle, newest = checkpoints[-2:]
    half = _HalfListed(long_run, stream_folder(middle.id), 2)
    with pytest.raises(OperationsDamaged, match="is missing, and later ones are there"):
        RestorePlan(half, newest.time_ms - 1)
    assert any("is missing" in each.what for each in verify(half, lambda size: None, all_checkpoints=True))
    whole = RestorePlan(LocalStorage(long_run)).point
    point = RestorePlan(_HalfListed(long_run, stream_folder(newest.id), 2)).point
    assert (point.checkpoint, point.stream) == (newest, whole.stream[:-2])


def test_a_full_disk_is_named(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise OSError(ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("trio_nsq.broker.restoring.write_folder", fails)
        with pytest.raises(OSError, match=str(tmp_path / "restored")):
            restore_folder(str(archive), tmp_path / "restored")
    assert restore_folder(str(archive), tmp_path / "restored")[1] == [], "it begins anew when there is room"


def test_prune(archive: Path, tmp_path: Path) -> None:
    copy = str(copytree(archive, tmp_path / "copy"))
    planned = OFFLINE("archive", "prune", copy, "--keep", "0s", "--dry-run").out
    pruned = OFFLINE("archive", "prune", copy, "--keep", "0s").out
    assert b"1 checkpoint and" in planned
    assert planned.replace(b"would be removed", b"removed") == pruned
    assert len(OFFLINE("archive", "status", copy, "--format", "json").out.splitlines()) == 1
    assert OFFLINE("archive", "verify", copy).code == 0


def test_there_is_no_archive(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    for command in (
        ["status"],
        ["verify"],
        ["prune", "--keep", "1d"],
        ["restore", "--data-path", str(tmp_path / "d")],
    ):
        done = OFFLINE("archive", command[0], nowhere, *command[1:])
        assert done.code == 1
        assert done.err.startswith(f"Error: There is no archive of a broker in {nowhere}, or none with "), (
            done
        )
    assert not (tmp_path / "d").exists()
