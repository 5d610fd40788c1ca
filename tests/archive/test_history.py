"""Reads reach into the archive: the disk has only the newest messages, and every reader sees one log."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import trio

from archive.history import SMALL, consume, disk_files, numbers_read, publish, until_only_archived
from broker.api import Api, running_api
from broker.support import PATIENCE_S, connected
from trio_nsq.archive.examination import verify
from trio_nsq.archive.manifest import LEASE, read_manifest
from trio_nsq.archive.segments import read_segments
from trio_nsq.broker.restoring import restore_folder
from trio_nsq.broker.storage.verify import verify_topic
from trio_nsq.event_loop.pacing import Pacing
from trio_nsq.log.disk.history import FILE_NAME
from trio_nsq.storage import LocalStorage, StorageError

COUNT = 100


async def until(is_so: Any) -> None:
    with trio.fail_after(PATIENCE_S):
        while not await is_so():
            await trio.sleep(0.02)


async def finish_all(api: Api, count: int = COUNT) -> None:
    """Publish numbered messages to a channel that finishes them."""
    await api.post("/channel/create", topic="t", channel="c")
    await publish(api, 0, count)
    await api.tcp.subscribe("t", "c", 100)
    assert await consume(api, count) == list(range(count))


async def test_files_are_deleted_when_they_are_archived_and_read_from_there(tmp_path: Path) -> None:
    data, archive = tmp_path / "data", tmp_path / "archive"
    options = SMALL | {"archive": str(archive)}
    async with running_api(data, **options) as api:
        await finish_all(api)
        await until_only_archived(data, 80)
        assert await numbers_read(api, **{"from": "0"}) == list(range(COUNT))
        assert await numbers_read(api, **{"from": "30", "until": "50"}) == list(range(30, 50))
        (topic,) = (await api.stats())["topics"]
        assert topic["first_sequence"] == 0
        assert 0 < topic["disk_first_sequence"] <= disk_files(data)[0]
        assert topic["archived_bytes"] > 70 * 56
        bounds = (await api.get("/topic/bounds", topic="t", at="earliest")).json()
        assert (bounds["first_sequence"], bounds["next_sequence"], bounds["at_sequence"]) == (0, COUNT, 0)
        assert min(bounds["bytes"], bounds["bytes_from_at"]) > COUNT * 56
    async with running_api(data, **options) as api:  # it knows it before the archive is reached
        assert await numbers_read(api, **{"from": "0"}) == list(range(COUNT))
        await publish(api, COUNT, COUNT + 20)
        assert await numbers_read(api, **{"from": "95"}) == list(range(95, COUNT + 20))


async def set_retention(api: Api, time_ms: int) -> None:
    answer = await api.client.put(
        "/topic/settings?topic=t&dry_run=false", json={"retention_time_ms": time_ms}
    )
    assert answer.status_code == 200, answer.text


async def test_files_stay_until_what_was_removed_from_the_archive_is_there_again(tmp_path: Path) -> None:
    data, archive = tmp_path / "data", tmp_path / "archive"
    async with running_api(data, **SMALL, archive=str(archive)) as api:
        await api.post("/topic/create", topic="t")
        await set_retention(api, -1)
        await finish_all(api)

        async def all_are_archived() -> bool:
            return archived_segments(archive) == list(range(0, disk_files(data)[-1], 12))

        await until(all_are_archived)
        for place in archive.glob("t/*/*12-*.seg"), archive.glob("t/*/*60-*.seg"):
            next(place).unlink()  # a rule of a bucket, or a person
        await set_retention(api, 0)
        await until_only_archived(data, 80)
        assert await numbers_read(api, **{"from": "0"}) == list(range(COUNT))
    assert archived_segments(archive) == list(range(0, disk_files(data)[-1], 12))


async def test_an_archive_is_moved_away_while_it_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As if it was no longer mounted: a complete archive begins in its place, and nothing is deleted before."""
    data, archive = tmp_path / "data", tmp_path / "archive"
    async with running_api(data, **SMALL, archive=str(archive)) as api:
        await api.post("/topic/create", topic="t")
        await set_retention(api, -1)
        await finish_all(api)
        archive.rename(tmp_path / "moved")
        await publish(api, COUNT, COUNT + 20)
        await set_retention(api, 0)
        await consume(api, 20)
        await until_only_archived(data, 100)
        assert await numbers_read(api, **{"from": "0"}) == list(range(COUNT + 20))
        assert f"the folder {archive} was moved, emptied, or is not mounted any more" in caplog.text
    restore_folder(str(archive), tmp_path / "restored")
    async with running_api(tmp_path / "restored", **SMALL, archive=str(archive)) as api:
        assert await numbers_read(api, **{"from": "0"}) == list(range(COUNT + 20))


async def test_a_folder_in_an_older_state_needs_another_archive(tmp_path: Path) -> None:
    """Nothing is deleted that the archive has not got, although it has objects of this name."""
    data, archive = tmp_path / "data", tmp_path / "archive"
    async with running_api(data, **SMALL, archive=str(archive)) as api:
        await finish_all(api, 10)
    shutil.copytree(data, tmp_path / "older")
    async with running_api(data, **SMALL, archive=str(archive)) as api:
        await api.tcp.subscribe("t", "c", 100)
        await publish(api, 10, COUNT)
        await consume(api, COUNT - 10)
        await until_only_archived(data, 80)
    data = tmp_path / "older"
    bodies = [*range(10), *range(500, 600)]
    async with running_api(data, **SMALL, archive=str(archive)) as api:
        await api.tcp.subscribe("t", "c", 100)
        await publish(api, 500, 600)
        await consume(api, 100)

        async def is_told() -> bool:
            found = (await api.stats())["archive"]
            return bool(found["conflicts"] and found["retention_waits"])

        await until(is_told)
        assert disk_files(data)[0] == 0
        assert await numbers_read(api, **{"from": "0"}) == bodies
    async with running_api(data, **SMALL, archive=str(tmp_path / "another")) as api:
        await until_only_archived(data, 80)
        assert await numbers_read(api, **{"from": "0"}) == bodies


async def test_a_time_is_found_in_the_archive(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with running_api(data, **SMALL, archive=str(tmp_path / "archive")) as api:
        await finish_all(api)
        await until_only_archived(data, 80)
        lines = (await api.get("/topic/read", topic="t", **{"from": "0"})).text.splitlines()
        for number in (0, 1, 11, 12, 37, 60):
            ns = json.loads(lines[number])["timestamp_ns"]
            at = f"@{ns // 10**9}.{ns % 10**9:09d}"
            found = (await api.get("/topic/bounds", topic="t", at=at)).json()
            assert found["at_sequence"] == number
            assert found["first_timestamp_ns"] == json.loads(lines[0])["timestamp_ns"]


async def test_a_channel_is_moved_into_the_archive_and_delivers_from_there(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with running_api(data, **SMALL, archive=str(tmp_path / "archive")) as api:
        await finish_all(api)
        await until_only_archived(data, 80)
        moved = (await api.client.post("/channel/seek?topic=t&channel=c&to=5")).json()
        assert moved["to_sequence"] == 5
        assert await consume(api, COUNT - 5) == list(range(5, COUNT))
        first = disk_files(data)[0]
        moved = (await api.client.post("/channel/seek?topic=t&channel=c&to=earliest")).json()
        assert moved["to_sequence"] == 0
        assert await consume(api, 30) == list(range(30))
    async with running_api(data, **SMALL, archive=str(tmp_path / "archive")) as api:
        await api.tcp.subscribe("t", "c", 1)
        begin = await consume(api, 1)
        assert begin[0] <= 30
        assert await consume(api, COUNT - begin[0] - 1) == list(range(begin[0] + 1, COUNT))
        assert disk_files(data)[0] >= first


async def test_a_topic_that_is_created_again_does_not_reach_into_the_former_one(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with running_api(data, **SMALL, archive=str(tmp_path / "archive")) as api:
        await finish_all(api)
        await until_only_archived(data, 80)
        assert (await api.post("/topic/delete", topic="t"))[0] == 200
        async with connected(
            str(api.tcp.stream.socket.getpeername()[0]) + f":{api.tcp.stream.socket.getpeername()[1]}"
        ) as tcp:
            again = Api(api.client, tcp)
            await publish(again, 500, 510)
            assert await numbers_read(again, **{"from": "0"}) == list(range(500, 510))


async def test_an_archive_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"

    def away(self: LocalStorage, name: str) -> Any:
        raise StorageError(f"{name} cannot be read: it is away")

    async with running_api(data, **SMALL, archive=str(tmp_path / "archive")) as api:
        await finish_all(api)
        await until_only_archived(data, 80)
        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "open_input", away)
            answer = await api.get("/topic/read", topic="t", **{"from": "0"})
            assert (answer.status_code, "it is away" in answer.text) == (503, True)
            assert await numbers_read(api, **{"from": "97"}) == list(range(97, COUNT))
            await api.client.post("/channel/seek?topic=t&channel=c&to=0")
            await publish(api, COUNT, COUNT + 1)
        assert await consume(api, COUNT + 1) == list(range(COUNT + 1))


async def test_nothing_else_waits_for_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, answers = tmp_path / "data", threading.Event()
    open_input = LocalStorage.open_input

    def slow(self: LocalStorage, name: str) -> Any:
        answers.wait(PATIENCE_S)
        return open_input(self, name)

    async with running_api(data, **SMALL, archive=str(tmp_path / "archive")) as api:
        await finish_all(api)
        await until_only_archived(data, 80)
        monkeypatch.setattr(LocalStorage, "open_input", slow)
        read: list[list[int | str]] = []

        async def read_all() -> None:
            read.append(await numbers_read(api, **{"from": "0"}))

        try:
            async with trio.open_nursery() as nursery:
                await api.client.post("/channel/seek?topic=t&channel=c&to=0")
                for _ in range(20):  # more than there are threads of any kind
                    nursery.start_soon(read_all)
                for number in range(COUNT, COUNT + 30):
                    await publish(api, number, number + 1, "other")
                    assert await numbers_read(api, "other", **{"from": str(number - COUNT)}) == [number]
                assert not read
                answers.set()
        finally:
            answers.set()
        assert read == [list(range(COUNT))] * 20
        assert await consume(api, COUNT) == list(range(COUNT))


async def test_segments_that_the_archive_has_lost_are_gaps(tmp_path: Path) -> None:
    data, archive = tmp_path / "data", tmp_path / "archive"
    async with running_api(data, **SMALL, archive=str(archive)) as api:
        await finish_all(api)
        await until_only_archived(data, 80)
    first, _, third, *_ = sorted(archive.glob("t/*/*.seg"))
    after_first = int(first.name[21:41]) + 1
    lost = range(int(third.name[:20]), int(third.name[21:41]) + 1)
    first.unlink()
    third.unlink()
    async with running_api(data, **SMALL, archive=str(archive)):
        pass  # its checkpoint has the list of them
    verified = [each.what for each in verify(LocalStorage(archive), lambda size: None, all_checkpoints=False)]
    assert verified == [f"{each} is missing; the broker reads messages from it" for each in (first, third)]
    async with running_api(data, **SMALL, archive=str(archive)) as api:
        wanted = [number for number in range(after_first, COUNT) if number not in lost]
        found = await numbers_read(api, **{"from": "0"})
        assert [each for each in found if isinstance(each, int)] == wanted
        assert [each for each in found if isinstance(each, str)] == ["damaged", "damaged"]
        await api.client.post("/channel/seek?topic=t&channel=c&to=0")
        await api.tcp.subscribe("t", "c", 100)
        assert await consume(api, len(wanted)) == wanted


async def test_a_segment_with_the_content_of_another_one_is_a_gap(tmp_path: Path) -> None:
    data, archive = tmp_path / "data", tmp_path / "archive"
    async with running_api(data, **SMALL, archive=str(archive)) as api:
        await finish_all(api)
        await until_only_archived(data, 80)
    _, second, third, *_ = sorted(archive.glob("t/*/*.seg"))
    second.write_bytes(third.read_bytes())
    async with running_api(data, **SMALL, archive=str(archive)) as api:
        wanted = [*range(12), *range(24, COUNT)]
        found = await numbers_read(api, **{"from": "0"})
        assert found == [*range(12), "damaged", *range(24, COUNT)]
        await api.client.post("/channel/seek?topic=t&channel=c&to=0")
        await api.tcp.subscribe("t", "c", 100)
        assert await consume(api, len(wanted)) == wanted


async def test_retention_waits_for_the_archive(tmp_path: Path) -> None:
    """Another broker writes to the archive: files stay on the disk, although the channel has passed them."""
    data, archive = tmp_path / "data", tmp_path / "archive"
    with LocalStorage(archive).hold(LEASE, lambda holder: StorageError(holder)):
        async with running_api(data, **SMALL, archive=str(archive), pacing=Pacing(archive_stop_s=0.1)) as api:
            await finish_all(api)

            async def waits() -> bool:
                return bool((await api.stats())["archive"]["retention_waits"])

            await until(waits)
            assert disk_files(data)[0] == 0
    async with running_api(data, **SMALL, archive=str(archive)) as api:
        await until_only_archived(data, 80)
        assert await numbers_read(api, **{"from": "0"}) == list(range(COUNT))

        async def is_over() -> bool:
            return not (await api.stats())["archive"]["retention_waits"]

        await until(is_over)


async def test_verify_knows_what_only_the_archive_has(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with running_api(data, **SMALL, archive=str(tmp_path / "archive")) as api:
        await finish_all(api)
        await until_only_archived(data, 80)
        await api.client.post("/channel/seek?topic=t&channel=c&to=3")
        await consume(api, 1)
    folder = data / "topics" / "t.topic"
    assert not verify_topic(folder).findings
    (folder / FILE_NAME).write_bytes(b"?")
    texts = [finding.what for finding in verify_topic(folder).findings]
    assert "damaged: a broker does not read messages that only its archive has" in texts
    async with running_api(data, **SMALL, archive=str(tmp_path / "archive")) as api:
        assert await numbers_read(api, **{"from": "0"}) == ["discarded", *range(disk_files(data)[0], COUNT)]


async def test_verify_reads_what_only_the_archive_has(tmp_path: Path) -> None:
    """Also what was archived and deleted since the last checkpoint, which no checkpoint refers to."""
    data, archive = tmp_path / "data", tmp_path / "archive"
    for begin in (0, COUNT):  # the second start writes a checkpoint that knows what only the archive has
        async with running_api(data, **SMALL, archive=str(archive)) as api:
            await api.post("/channel/create", topic="t", channel="c")
            await publish(api, begin, begin + COUNT)
            await api.tcp.subscribe("t", "c", 100)
            await consume(api, COUNT)
            await until_only_archived(data, begin + 80)
    storage, read = LocalStorage(archive), list[int]()
    assert not list(verify(storage, read.append, all_checkpoints=True))
    segments = sorted(archive.glob("t/*/*.seg"))
    assert sum(read) > sum(path.stat().st_size - 100 for path in segments)
    for victim in segments[2], segments[len(segments) // 2 + 2]:
        before = victim.read_bytes()
        victim.write_bytes(before[:600] + bytes([before[600] ^ 1]) + before[601:])
        found = [each.what for each in verify(storage, read.append, all_checkpoints=True)]
        assert [victim.name in what for what in found] == [True]
        assert found[0].endswith("a record batch does not match its checksum")
        victim.write_bytes(segments[3].read_bytes())
        found = [each.what for each in verify(storage, read.append, all_checkpoints=True)]
        assert any(f"{victim} is damaged at byte 0: not a segment: it was renamed" in what for what in found)
        victim.write_bytes(before)


async def test_a_crash_between_the_list_and_the_deletion(tmp_path: Path) -> None:
    """The file of a list that the broker was killed after is on the disk, too: it is read from there, once."""
    data, archive = tmp_path / "data", tmp_path / "archive"
    async with running_api(data, **SMALL, archive=str(archive)) as api:
        await finish_all(api)
        await until_only_archived(data, 80)
    name = sorted(archive.glob("t/*/*.seg"))[-1]
    shutil.copy(name, data / "topics" / "t.topic" / f"{name.name[:20]}.log")
    first = int(name.name[:20])
    async with running_api(data, **SMALL, archive=str(archive)) as api:
        await until_only_archived(data, first + 1)
        assert await numbers_read(api, **{"from": "0"}) == list(range(COUNT))
        (topic,) = (await api.stats())["topics"]
        on_disk = disk_files(data)[0]
        archived = [path for path in archive.glob("t/*/*.seg") if int(path.name[:20]) < on_disk]
        assert topic["archived_bytes"] == sum(path.stat().st_size for path in archived)


def archived_segments(archive: Path) -> list[int]:
    """Return the first sequences of the segments in an archive."""
    return sorted(int(path.name[:20]) for path in archive.glob("t/*/*.seg"))


async def test_the_archive_keeps_messages_for_a_time(tmp_path: Path) -> None:
    data, archive = tmp_path / "data", tmp_path / "archive"
    async with running_api(data, **SMALL, archive=str(archive)) as api:
        await finish_all(api)
        await until_only_archived(data, 96)  # else the next checkpoint needs another segment
        await api.post("/channel/pause", topic="t", channel="c")
        await api.client.post("/channel/seek?topic=t&channel=c&to=30")
    assert archived_segments(archive)[0] == 0

    async def are_removed() -> bool:
        (topic,) = (await api.stats())["topics"]
        storage = LocalStorage(archive)
        kept = {
            archive / segment.name
            for checkpoint in read_manifest(storage).manifest.checkpoints
            for segment in read_segments(storage, checkpoint).values()
        }
        return (
            "archived_bytes" not in topic
            and len(disk_files(data)) == 1
            and kept.issuperset(archive.glob("t/*/*.seg"))
        )

    async with running_api(data, **SMALL, archive=str(archive), archive_retention_ms=10) as api:

        async def are_forgotten() -> bool:
            (topic,) = (await api.stats())["topics"]
            return bool(topic["first_sequence"]) and archived_segments(archive)[0] == topic["first_sequence"]

        await until(are_forgotten)
        # The channel needs the others.
        gap, *found = await numbers_read(api, **{"from": "0"})
        assert (gap, found) == ("discarded", list(range(COUNT))[-len(found) :])
        assert len(found) >= COUNT - 30
        await api.post("/channel/unpause", topic="t", channel="c")
        await api.tcp.subscribe("t", "c", 100)
        assert await consume(api, COUNT - 30) == list(range(30, COUNT))
        await publish(api, COUNT, COUNT + 30)
        assert await consume(api, 30) == list(range(COUNT, COUNT + 30))
        await until(are_removed)
        gap, *found = await numbers_read(api, **{"from": "0"})
        assert (gap, found) == ("discarded", list(range(COUNT + 30))[-len(found) :])
        assert len(found) < COUNT


async def test_a_deleted_topic_is_removed_from_the_archive_in_time(tmp_path: Path) -> None:
    data, archive = tmp_path / "data", tmp_path / "archive"
    async with running_api(data, **SMALL, archive=str(archive)) as api:
        await finish_all(api)
        await until_only_archived(data, 80)
        assert (await api.post("/topic/delete", topic="t"))[0] == 200
    assert archived_segments(archive)
    async with running_api(data, **SMALL, archive=str(archive), archive_retention_ms=10) as api:

        async def are_removed() -> bool:
            return not archived_segments(archive)

        await until(are_removed)


async def test_a_restored_broker_reads_on_from_the_archive(tmp_path: Path) -> None:
    data, archive = tmp_path / "data", tmp_path / "archive"
    async with running_api(data, **SMALL, archive=str(archive)) as api:
        await finish_all(api)
        await until_only_archived(data, 80)
    restored = tmp_path / "restored"
    options = SMALL | {"archive": str(archive), "restore_from": str(archive)}
    async with running_api(restored, **options) as api:
        assert disk_files(restored)[0] >= 80
        assert await numbers_read(api, **{"from": "0"}) == list(range(COUNT))
        await publish(api, COUNT, COUNT + 50)
        await api.client.post("/channel/seek?topic=t&channel=c&to=0")
        await api.tcp.subscribe("t", "c", 100)
        assert await consume(api, COUNT + 50) == list(range(COUNT + 50))
        await until_only_archived(restored, COUNT + 20)
        assert await numbers_read(api, **{"from": "0"}) == list(range(COUNT + 50))
