"""Archives without their manifest: the records of the checkpoints tell the same, and the broker writes it again."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import trio

from archive.folders import restore, until_archived, writer_of
from broker.support import PATIENCE_S
from cli.support import Cli
from replication.leader import RandomChanges, Tree, tree_of
from storage.stores import Store
from trio_nsq.archive.manifest import (
    CHECKPOINTS,
    MANIFEST,
    ArchiveDamaged,
    begun_manifest,
    complete_checkpoints,
    encode_record,
    read_manifest,
)
from trio_nsq.archive.pruning import prune
from trio_nsq.archive.restore import OperationsDamaged, RestorePlan, Restorer
from trio_nsq.archive.tail import ArchiveTail
from trio_nsq.archive.writer import ArchiveWriter
from trio_nsq.storage import LocalStorage, storage_at

OFFLINE = Cli("", "")
GARBAGE = [b"garbage", b"", b"{}", b"[]", b"null", b'{"version":1}', b'{"version":"1"}', b"\xff\xfe" * 50]


async def _writing(
    data: Path, archive: Path, while_writing: Callable[[ArchiveWriter], Any], checkpoints: int = 1
) -> None:
    """Archive random changes until there are some checkpoints; then call a function, which may wait.

    If it is one, no other is due.
    """
    data.mkdir(exist_ok=True)
    checkpoint_bytes = 1 << 30 if checkpoints == 1 else 1000
    writer = writer_of(LocalStorage(archive), data, checkpoint_bytes=checkpoint_bytes)
    changes = RandomChanges(writer.files, data, 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        with trio.fail_after(PATIENCE_S):
            while writer.status().checkpoints < checkpoints:
                changes.step()
                await trio.sleep(0.001)
        for _ in range(20):
            changes.step()
        changes.close()
        await until_archived(writer)
        await while_writing(writer)
        writer.finish(PATIENCE_S)


async def _nothing(writer: ArchiveWriter) -> None:
    pass


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manifest")
    trio.run(_writing, folder / "data", folder / "archive", _nothing, 3)
    return folder / "archive"


@pytest.fixture(scope="module")
def expected(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    to = tmp_path_factory.mktemp("expected") / "restored"
    restore(archive, to)
    return tree_of(to)


@pytest.mark.parametrize("content", [None, *GARBAGE])
def test_everything_is_restored_without_the_manifest(
    archive: Path, expected: Tree, tmp_path: Path, content: bytes | None
) -> None:
    broken = Path(copytree(archive, tmp_path / "broken"))
    before = begun_manifest(LocalStorage(broken)).manifest
    if content is None:
        (broken / MANIFEST).unlink()
    else:
        (broken / MANIFEST).write_bytes(content)
    found = begun_manifest(LocalStorage(broken))
    assert found.is_whole
    assert found.manifest == replace(before, next_id=before.checkpoints[-1].id + 1)
    assert f"{MANIFEST} is {'missing' if content is None else 'damaged'}" in found.damage
    assert RestorePlan(LocalStorage(broken)).damage == [found.damage]
    if content in (None, b"garbage"):
        restore(broken, tmp_path / "restored")
        assert tree_of(tmp_path / "restored") == expected


def test_records_are_damaged_too(archive: Path, tmp_path: Path) -> None:
    """The newest checkpoint is not known any more, so that a restore says what it lacks."""
    broken, storage = tmp_path / "broken", LocalStorage(tmp_path / "broken")
    copytree(archive, broken)
    checkpoints = complete_checkpoints(storage)
    (broken / MANIFEST).unlink()
    (broken / checkpoints[-1].record_name).write_bytes(b"{}")
    with pytest.raises(
        OperationsDamaged, match="some are damaged, too, or of another broker: later changes may be missing"
    ):
        RestorePlan(storage)
    plan = RestorePlan(storage, before_damage=True)
    assert (plan.point.checkpoint, len(plan.damage)) == (checkpoints[-2], 1)
    with pytest.raises(ArchiveDamaged, match="some are damaged, too"):
        prune(storage, 0)
    (broken / checkpoints[-1].record_name).write_bytes(encode_record(checkpoints[-1], "another broker"))
    found = begun_manifest(storage)
    assert (found.manifest.checkpoints, found.is_whole) == (checkpoints[-1:], False), "archives were mixed"
    for checkpoint in checkpoints:
        (broken / checkpoint.record_name).write_bytes(b"{}")
    with pytest.raises(ArchiveDamaged, match="is missing, and no checkpoint has a record"):
        RestorePlan(storage)


@pytest.mark.parametrize("content", [None, b"garbage", "another"])
def test_a_record_is_verified(archive: Path, tmp_path: Path, content: Any) -> None:
    broken = Path(copytree(archive, tmp_path / "broken"))
    newest = complete_checkpoints(LocalStorage(broken))[-1]
    record = broken / newest.record_name
    if content is None:
        record.unlink()
    elif content == "another":
        fields = json.loads(record.read_bytes())
        fields["checkpoint"]["number"] += 1
        record.write_text(json.dumps(fields))
    else:
        record.write_bytes(content)
    verified = OFFLINE("archive", "verify", str(broken))
    assert (verified.code, newest.record_name.encode() in verified.out) == (5, True)


def test_the_newest_messages_are_read_without_the_manifest(archive: Path, tmp_path: Path) -> None:
    broken = Path(copytree(archive, tmp_path / "broken"))
    topics = ArchiveTail(LocalStorage(archive)).topics()
    (broken / MANIFEST).write_bytes(b"")
    tail = ArchiveTail(LocalStorage(broken))
    assert (tail.topics(), tail.damage) == (topics, "")


def test_the_manifest_of_a_newer_version_stays(archive: Path, tmp_path: Path) -> None:
    newer = Path(copytree(archive, tmp_path / "newer"))
    (newer / MANIFEST).write_bytes(b'{"version":2}')
    with pytest.raises(ArchiveDamaged, match="a newer trio-nsq has written it"):
        read_manifest(LocalStorage(newer))


@pytest.mark.parametrize("content", [None, *GARBAGE[:3]])
@pytest.mark.parametrize("which", ["manifest", "record", "both"])
async def test_the_broker_writes_them_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None, which: str
) -> None:
    data, archive = tmp_path / "data", tmp_path / "archive"

    async def damage(writer: ArchiveWriter) -> None:
        storage = LocalStorage(archive)
        before = begun_manifest(storage).manifest
        record = before.checkpoints[-1].record_name
        names = {"manifest": [MANIFEST], "record": [record], "both": [record, MANIFEST]}[which]
        contents = {name: (archive / name).read_bytes() for name in names}
        for name in names:
            if content is None:
                (archive / name).unlink()
            else:
                storage.put(name, content)
        with trio.fail_after(PATIENCE_S):
            while {
                name: (archive / name).read_bytes() for name in names if (archive / name).exists()
            } != contents:
                await trio.sleep(0.01)
        for name in names:
            assert f"{archive / name} is {'missing' if content is None else 'damaged'}" in caplog.text
        assert writer.status().checkpoints == len(before.checkpoints), "the data folder was not copied again"

    await _writing(data, archive, damage)
    assert OFFLINE("archive", "verify", str(archive), "--all").code == 0


@pytest.mark.parametrize("name", ["0000000001", "segments"])
async def test_another_checkpoint_is_written_if_the_newest_one_lacks_objects(
    tmp_path: Path, name: str
) -> None:
    data, archive = tmp_path / "data", tmp_path / "archive"

    async def damage(writer: ArchiveWriter) -> None:
        before = complete_checkpoints(LocalStorage(archive))[-1]
        (archive / CHECKPOINTS / f"{before.id:010d}" / name).unlink()
        with trio.fail_after(PATIENCE_S):
            while complete_checkpoints(LocalStorage(archive))[-1] == before:
                await trio.sleep(0.01)

    await _writing(data, archive, damage)
    assert OFFLINE("archive", "verify", str(archive)).code == 0


async def test_a_start_writes_the_manifest_again(tmp_path: Path) -> None:
    data, archive = tmp_path / "data", tmp_path / "archive"
    await _writing(data, archive, _nothing)
    before = complete_checkpoints(LocalStorage(archive))
    (archive / MANIFEST).write_bytes(b"garbage")
    await _writing(data, archive, _nothing)
    found = read_manifest(LocalStorage(archive))
    assert (found.manifest.checkpoints[: len(before)], found.damage) == (before, "")


async def test_a_bucket_without_the_manifest(s3: Store, tmp_path: Path) -> None:
    """A listing of a bucket has the objects of the checkpoints, too."""
    data = tmp_path / "data"
    data.mkdir()
    with s3.here():
        place = s3.new_place()
        storage = storage_at(place)
        writer = writer_of(storage, data, checkpoint_bytes=1 << 30)
        changes = RandomChanges(writer.files, data, 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            with trio.fail_after(PATIENCE_S):
                while not writer.status().checkpoints:
                    await trio.sleep(0.01)
            for _ in range(20):
                changes.step()
            changes.close()
            await until_archived(writer)
            writer.finish(PATIENCE_S)
        before = begun_manifest(storage).manifest
        storage.remove([MANIFEST])
        found = begun_manifest(storage)
        assert (found.manifest.checkpoints, found.is_whole) == (before.checkpoints, True)
        (tmp_path / "restored").mkdir()
        Restorer(storage, tmp_path / "restored").restore(RestorePlan(storage).point)
        shared = [
            {path: content for path, content in tree_of(each).items() if b"-deleted-" not in path}
            for each in (data, tmp_path / "restored")
        ]
        assert shared[0] == shared[1]
