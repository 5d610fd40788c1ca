"""Tests for archives of segments: they are read like the folder that was copied, and each object is written once."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cli.support import Cli, command_line
from log.support import HastyFiles, append_each, contents, numbered, segment_files
from spark.support import until
from trio_nsq.log import DiskLog, RecordBatch
from trio_nsq.log.gaps import Gap, Span
from trio_nsq.log.inspection.findings import Kind
from trio_nsq.spark.segments.places import SegmentsError, SegmentsPlace, parse_places, topics_in
from trio_nsq.spark.segments.writer import ArchivedTopic, TopicArchiver
from trio_nsq.storage import LocalStorage, StorageError


def make_log(folder: Path, batches: Sequence[RecordBatch], segment_bytes: int = 500) -> list[RecordBatch]:
    """Append batches to a log; return its content."""
    log = DiskLog(folder, segment_bytes=segment_bytes, files=HastyFiles())
    append_each(log, batches)
    found = contents(log)
    log.close()
    return found


def topic_folder(data: Path, topic: str = "t") -> Path:
    folder = data / "topics" / f"{topic}.topic"
    folder.mkdir(parents=True)
    return folder


def archive(folder: Path, to: Path, *, tail: bool = False) -> ArchivedTopic:
    """Copy the topic `t` into an archive."""
    return TopicArchiver("t", folder, lambda name: LocalStorage(to / "t" / name), tail=tail).archive()


def batches_of(place: SegmentsPlace) -> list[RecordBatch]:
    """Return all records, and check that there is no gap."""
    log = place.open()
    bounds = log.bounds()
    found = list(log.read(Span(bounds.first, bounds.end)))
    assert not any(isinstance(each, Gap) for each in found)
    return [each for each in found if isinstance(each, RecordBatch)]


def names_in(archive_folder: Path) -> list[str]:
    return sorted(
        path.relative_to(archive_folder).as_posix() for path in archive_folder.rglob("*") if path.is_file()
    )


def test_closed_segments_are_copied_once(tmp_path: Path) -> None:
    folder = topic_folder(tmp_path / "data")
    batches = make_log(folder, numbered(0, 60))
    *closed, last = segment_files(folder)
    report = archive(folder, tmp_path / "a")
    assert (report.copied, report.present, report.findings) == (len(closed), 0, [])
    assert report.copied_bytes == sum(path.stat().st_size for path in closed)
    end = int(last.stem)
    assert report.next_sequence == end
    (place,) = parse_places([str(tmp_path / "a")], "t")
    assert batches_of(place) == [each for each in batches if each.next_sequence <= end]
    first = closed[0]
    name = f"t/{report.incarnation}/{int(first.stem):020d}-{int(closed[1].stem) - 1:020d}.seg"
    assert (tmp_path / "a" / name).read_bytes() == first.read_bytes()
    before = names_in(tmp_path / "a")
    again = archive(folder, tmp_path / "a")
    assert (again.copied, again.present, again.next_sequence) == (0, len(closed), end)
    assert names_in(tmp_path / "a") == before


def test_an_archive_keeps_what_retention_deletes(tmp_path: Path) -> None:
    folder = topic_folder(tmp_path / "data")
    make_log(folder, numbered(0, 30))
    archive(folder, tmp_path / "a")
    for path in segment_files(folder)[:2]:
        path.unlink()
    end = DiskLog(folder, files=HastyFiles()).next_sequence
    make_log(folder, numbered(end, 30))
    archive(folder, tmp_path / "a", tail=True)
    (place,) = parse_places([str(tmp_path / "a")], "t")
    assert batches_of(place)[0].base_sequence == 0
    assert place.open().bounds().end == numbered(end, 30)[-1].next_sequence


def test_a_killed_copy_is_continued(tmp_path: Path) -> None:
    folder = topic_folder(tmp_path / "data")
    make_log(folder, numbered(0, 60))
    report = archive(folder, tmp_path / "a")
    there = tmp_path / "a" / "t" / str(report.incarnation)
    lost = sorted(there.glob("*.seg"))[1::2]
    for path in lost:
        path.unlink()
    again = archive(folder, tmp_path / "a")
    assert (again.copied, again.copied + again.present) == (len(lost), report.copied)
    (place,) = parse_places([str(tmp_path / "a")], "t")
    assert batches_of(place)[-1].next_sequence == report.next_sequence


@pytest.mark.parametrize("tail", [False, True])
def test_a_segment_whose_index_the_broker_has_not_saved_is_archived_with_it(
    tmp_path: Path, tail: bool
) -> None:
    folder = topic_folder(tmp_path / "data")
    make_log(folder, numbered(0, 300, size=1000), 400_000)
    closed, last = segment_files(folder)
    index = closed.with_suffix(".index")
    saved = index.read_bytes()
    index.unlink()
    report = archive(folder, tmp_path / "a", tail=tail)
    there = tmp_path / "a" / "t" / str(report.incarnation)
    segments = sorted(path.name for path in there.glob("*.seg"))
    assert [name.partition("-")[0] for name in segments] == [closed.stem, last.stem][: 1 + tail]
    indexes = [there / name.replace(".seg", ".index") for name in segments]
    assert indexes[0].read_bytes() == saved
    assert all(path.exists() for path in indexes)


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("common", [0, 1, 29, 30, 31])
@pytest.mark.parametrize("more", [1, 30, 60])
def test_other_messages_of_a_restored_log_are_refused(
    tmp_path: Path, common: int, more: int, tail: bool
) -> None:
    """A backup was restored, or a power cut took the last messages: new ones have the sequences of archived ones."""
    folder = topic_folder(tmp_path / "data")
    make_log(folder, numbered(0, 1))
    incarnation = (folder / "incarnation").read_bytes()
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "incarnation").write_bytes(incarnation)
    batches = numbered(0, 60)
    if common:
        make_log(folder, batches[:common])
    backup = shutil.copytree(folder, tmp_path / "backup")
    make_log(folder, batches[common:])
    archive(folder, tmp_path / "a", tail=tail)
    before = {name: (tmp_path / "a" / name).read_bytes() for name in names_in(tmp_path / "a")}
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)
    again = archive(folder, tmp_path / "a", tail=tail)  # nothing differs yet
    assert again.findings == []
    others = [replace(each, first_id=each.first_id + 1_000_000) for each in batches[common : common + more]]
    make_log(folder, others)
    report = archive(folder, tmp_path / "a", tail=tail)
    (finding,) = report.findings
    assert (finding.kind, report.copied) == (Kind.DAMAGE, 0)
    assert "in the archive is another one" in finding.what
    assert {name: (tmp_path / "a" / name).read_bytes() for name in names_in(tmp_path / "a")} == before
    assert archive(folder, tmp_path / "other", tail=True).findings == []


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("where", ["folder", "archive", "both", "incarnation"])
@pytest.mark.parametrize("other", [False, True])
def test_damaged_last_message_does_not_hide_another_history(tmp_path: Path, where: str, other: bool) -> None:
    folder = topic_folder(tmp_path / "data")
    batches = numbered(0, 90)
    make_log(folder, batches[:30])
    backup = shutil.copytree(folder, tmp_path / "backup")
    make_log(folder, batches[30:])
    archive(folder, tmp_path / "a")
    if other:
        shutil.rmtree(folder)
        shutil.copytree(backup, folder)
        make_log(folder, [replace(each, first_id=each.first_id + 1_000_000) for each in batches[30:]])
    make_log(folder, numbered(batches[-1].next_sequence, 90))
    last = sorted((tmp_path / "a").rglob("*.seg"))[-1]
    here = folder / f"{int(last.stem.split('-')[0]):020d}.log"
    if where == "incarnation":  # the oldest object, which a rule by age deletes first
        last.with_name("incarnation").unlink()
    for path in [here] * (where in ("folder", "both")) + [last] * (where in ("archive", "both")):
        flip(path, path.stat().st_size - 1)
    before = names_in(tmp_path / "a")
    report = archive(folder, tmp_path / "a")
    assert (set(names_in(tmp_path / "a")) <= set(before)) == other
    assert any("in the archive is another one" in each.what for each in report.findings) == other
    assert (report.copied == 0) == other


@pytest.mark.parametrize("lost", [1, 2])
def test_archive_keeps_a_segment_that_the_folder_has_lost(tmp_path: Path, lost: int) -> None:
    """A segment before a lost one does not get the name of what it has not."""
    folder = topic_folder(tmp_path / "data")
    batches = make_log(folder, numbered(0, 60))
    archive(folder, tmp_path / "a")
    before = names_in(tmp_path / "a")
    for path in segment_files(folder)[1 : 1 + lost]:
        path.unlink()
    report = archive(folder, tmp_path / "a")
    assert (names_in(tmp_path / "a"), report.copied) == (before, 0)
    assert archive(folder, tmp_path / "a", tail=True).copied == 1
    (place,) = parse_places([str(tmp_path / "a")], "t")
    assert batches_of(place) == batches
    archive(folder, tmp_path / "new")
    (place,) = parse_places([str(tmp_path / "new")], "t")
    bounds = place.open().bounds()
    gaps = [each for each in place.open().read(Span(0, bounds.end)) if isinstance(each, Gap)]
    assert len(gaps) == 1


@pytest.mark.parametrize("scheme", ["file:", "file://", "FILE://localhost"])
def test_archive_at_a_url_of_a_folder(tmp_path: Path, qcli: Cli, scheme: str) -> None:
    make_log(topic_folder(tmp_path / "data"), numbered(0, 60))
    result = qcli("log", "archive", str(tmp_path / "data"), f"{scheme}{tmp_path}/a")
    assert result.code == 0, result.err
    assert len(list((tmp_path / "a" / "t").rglob("*.seg"))) > 1


@pytest.mark.parametrize("name", ["file:/x", "dbfs:/x", "s3:/x"])
def test_archive_in_a_folder_that_looks_like_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qcli: Cli, name: str
) -> None:
    make_log(topic_folder(tmp_path / "data"), numbered(0, 60))
    monkeypatch.chdir(tmp_path)
    result = qcli("log", "archive", "data", f"./{name}")
    assert result.code == 0, result.err
    assert len(list((tmp_path / name / "t").rglob("*.seg"))) > 1


def test_archive_with_messages_of_two_histories_is_refused(tmp_path: Path) -> None:
    """Versions that did not compare ids have made such archives."""
    folder = topic_folder(tmp_path / "data")
    make_log(folder, numbered(0, 60))
    archive(folder, tmp_path / "a", tail=True)
    _, second = sorted((tmp_path / "a").rglob("*.seg"))[:2]
    begin, last = (int(part) for part in second.stem.split("-"))
    shutil.copy(second, second.with_name(f"{begin - 1:020d}-{last:020d}.seg"))
    (place,) = parse_places([str(tmp_path / "a")], "t")
    for act in (place.open().bounds, partial(archive, folder, tmp_path / "a")):
        with pytest.raises(StorageError, match=f"has messages twice from {begin - 1} on"):
            act()


def test_a_kill_leaves_nothing(tmp_path: Path) -> None:
    folder = topic_folder(tmp_path / "data")
    make_log(folder, numbered(0, 600, size=3000), 50_000)
    command = command_line("log", "archive", str(folder), str(tmp_path / "a"), "--tail")
    segments = segment_files(folder)

    def copied(count: int) -> bool:
        return len(list((tmp_path / "a").rglob("*.seg"))) >= count

    for count in (1, 10, 30):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            until(partial(copied, count))
        finally:
            process.kill()
            process.wait()
    assert not copied(len(segments))
    assert subprocess.run(command, stdout=subprocess.DEVNULL, timeout=120).returncode == 0
    contents_of = {path.name: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert not [name for name in contents_of if ".tmp-" in name]
    assert len([name for name in contents_of if name.endswith(".seg")]) == len(segments)
    for path in segments:
        (content,) = (
            data for name, data in contents_of.items() if name.startswith(path.stem) and "seg" in name
        )
        assert content == path.read_bytes()


def test_only_one_process_copies_to_a_folder(tmp_path: Path) -> None:
    folder = topic_folder(tmp_path / "data")
    make_log(folder, numbered(0, 60))
    report = archive(folder, tmp_path / "a")
    storage = LocalStorage(tmp_path / "a" / "t" / str(report.incarnation))
    with (
        storage.hold("lock", StorageError),
        pytest.raises(StorageError, match=f"process {os.getpid()} .* copies"),
    ):
        archive(folder, tmp_path / "a")


def test_a_missing_segment_is_a_gap(tmp_path: Path) -> None:
    folder = topic_folder(tmp_path / "data")
    make_log(folder, numbered(0, 60))
    report = archive(folder, tmp_path / "a")
    _, second, third, *_ = sorted((tmp_path / "a" / "t" / str(report.incarnation)).glob("*.seg"))
    second.unlink()
    (place,) = parse_places([str(tmp_path / "a")], "t")
    found = [each for each in place.open().read(Span(0, report.next_sequence)) if isinstance(each, Gap)]
    begin, end = (int(path.name.partition("-")[0]) for path in (second, third))
    assert found == [Gap(begin, end, "damaged")]


def test_a_last_segment_that_was_copied_early_is_replaced_by_the_closed_one(tmp_path: Path) -> None:
    folder = topic_folder(tmp_path / "data")
    make_log(folder, numbered(0, 3), 10**6)
    early = archive(folder, tmp_path / "a", tail=True)
    (place,) = parse_places([str(tmp_path / "a")], "t")
    assert place.open().bounds().end == early.next_sequence == numbered(0, 3)[-1].next_sequence
    make_log(folder, numbered(early.next_sequence, 20), 10**6)
    log = DiskLog(folder, files=HastyFiles())
    log.rotate_unless_empty()
    expected = contents(log)
    log.close()
    assert archive(folder, tmp_path / "a").copied == 1
    assert batches_of(place) == expected


def test_damage_is_copied_and_reported(tmp_path: Path) -> None:
    folder = topic_folder(tmp_path / "data")
    make_log(folder, numbered(0, 60))
    first, second, *_ = segment_files(folder)
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    foreign = topic_folder(tmp_path / "data", "other")
    make_log(foreign, numbered(0, 60))
    shutil.copy(foreign / second.name, second)
    report = archive(folder, tmp_path / "a")
    assert [finding.kind for finding in report.findings] == [Kind.DAMAGE, Kind.DAMAGE]
    assert "not copied: it belongs to another topic" in report.findings[1].what
    (place,) = parse_places([str(tmp_path / "a")], "t")
    gaps = [each for each in place.open().read(Span(0, report.next_sequence)) if isinstance(each, Gap)]
    assert [gap.reason for gap in gaps] == ["damaged"]
    assert gaps[0].next_sequence == int(segment_files(folder)[2].stem)


def test_incarnations_are_separate_logs(tmp_path: Path) -> None:
    folders = [topic_folder(tmp_path / name) for name in ("one", "two")]
    for folder in folders:
        make_log(folder, numbered(0, 60))
    found = {str(archive(folder, tmp_path / "a").incarnation) for folder in folders}
    assert topics_in(str(tmp_path / "a")) == ["t"]
    places = parse_places([str(tmp_path / "a")], "t")
    assert {place.label for place in places} == {f"a-{name[:8]}" for name in found}
    assert all(batches_of(place) for place in places)
    (place,) = parse_places([f"b:4151={tmp_path / 'a' / 't' / min(found)}"], "t")
    assert place.label == "b:4151"


def test_labels_of_places(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_log(topic_folder(tmp_path / name / "data"), numbered(0, 3))
    one, two = (str(tmp_path / name / "data") for name in ("one", "two"))
    labels = partial(map, lambda place: place.label)
    assert topics_in(one) == ["t"]
    assert list(labels(parse_places([one], "t"))) == ["data"]
    assert list(labels(parse_places([f"127.0.0.1:4151={one}", f"b={two}"], "t"))) == ["127.0.0.1:4151", "b"]
    assert list(labels(parse_places([f"{one}/topics/t.topic"], "t"))) == ["t"]
    with pytest.raises(SegmentsError, match="give them as NAME=FOLDER"):
        parse_places([one, two], "t")
    with pytest.raises(SegmentsError, match=f"there is no topic u in {one}"):
        parse_places([one], "u")
