"""Checking a data folder without a broker, or beside one: each topic's log, and its saved state against it."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..log import Files, MemoryLog, OpenFiles, stragglers
from ..log.scan import Finding, Kind
from ..log.verify import LogReport, Progress, verify_log
from ..protocol import is_valid_name
from .cache import BatchCache
from .data_folder import BROKER_FILE, STATE_FILE, SUFFIX, decode_checked, decode_ids
from .deferred import DeferredMessages
from .topic import StateError, Topic


def topic_name(folder: Path) -> str:
    """The name of the topic in this folder."""
    return folder.resolve().name.removesuffix(SUFFIX)


def topic_folders(data_path: Path) -> list[Path]:
    """The topics' folders in a data folder, sorted. Raises OSError."""
    folders = (path for path in (data_path / "topics").iterdir() if path.name.endswith(SUFFIX))
    return sorted(folder for folder in folders if is_valid_name(topic_name(folder)))


def verify_broker_file(data_path: Path) -> list[Finding]:
    """What is wrong with `broker.json`. Raises OSError."""
    path = data_path / BROKER_FILE
    try:
        decode_ids(path.read_bytes())
    except FileNotFoundError:
        return []  # no broker has run here yet
    except ValueError as exc:
        what = f"damaged, or from another version of this program ({exc}); a broker does not start over it"
        return [_damage(path, what)]
    return []


def verify_topic(folder: Path, *, files: Files | None = None, progress: Progress | None = None) -> LogReport:
    """Read all of a topic's log, and compare its saved state with it. Arguments as `verify_log`.

    Raises:
        LogReadError, OSError: The operating system refused.
    """
    path = folder / STATE_FILE
    # A broker may be running. The log only grows at its end, so it may not lack what the state knew before; and
    # what is deleted at its beginning, no state needs that was saved later, unless it was carried forward before.
    before = _read(path)
    report = verify_log(folder, files=files, progress=progress)
    is_carried = _check_stragglers(folder, files or Files(), report)
    after = _read(path)
    if after is None:
        if report.segments:
            what = "missing: no channel is known, and every message waits for a first one"
            report.findings.append(Finding(Kind.NOTE, path, 0, 0, what))
        return report
    try:
        for content in (before, after):
            if content is not None:
                _restore(folder, _parse(content), report)
        report.findings += _compare(path, _parse(before or after), _parse(after), report, is_carried)
    except (StateError, TypeError) as exc:  # numbers in quotes can be restored, but not compared
        report.findings.append(_damage(path, f"damaged ({exc}); a broker does not start over it"))
    return report


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _parse(content: bytes) -> dict[str, Any]:
    """Raises StateError."""
    try:
        return decode_checked(content)
    except ValueError as exc:
        raise StateError(str(exc)) from exc


class _Outline(MemoryLog):
    """All that a topic has to know of its log to take up a state."""

    def __init__(self, report: LogReport) -> None:
        super().__init__(first_sequence=report.first_sequence)
        self._end = report.next_sequence

    @property
    def next_sequence(self) -> int:
        return self._end


def _restore(folder: Path, state: dict[str, Any], report: LogReport) -> None:
    """Let a topic take up a state, as a broker does at its start. Raises StateError."""
    named = folder.resolve().name.endswith(SUFFIX)  # or it is a copy, called as somebody liked
    name = topic_name(folder) if named else str(state.get("name"))
    Topic(name, _Outline(report), BatchCache(0), 0).restore(state)


def _damage(path: Path, what: str, sequence: int | None = None, messages: int | None = 0) -> Finding:
    return Finding(Kind.DAMAGE, path, 0, 0, what, sequence, messages)


def _check_stragglers(folder: Path, files: Files, report: LogReport) -> Callable[[int], bool]:
    """Read the messages that were carried forward; returns what tells whether a message is among them."""
    path = folder / stragglers.FILE_NAME
    there = path.exists()
    found = stragglers.Stragglers.open(OpenFiles(files, 1), folder)
    if found is None:
        if there and path.exists():
            report.findings.append(
                _damage(path, "damaged: the messages carried forward to it are lost", None, None)
            )
        return lambda sequence: False
    for sequence in found.sequences:
        if found.read(sequence) is None:
            report.findings.append(_damage(path, f"the record of message {sequence} is damaged", sequence, 1))
    return lambda sequence: found.read(sequence) is not None


def _compare(
    path: Path,
    before: dict[str, Any],
    after: dict[str, Any],
    report: LogReport,
    is_carried: Callable[[int], bool],
) -> Iterator[Finding]:
    """What is not plausible in states that could be restored."""
    end, needed = int(before["end"]), Topic.first_needed(before, is_carried)
    if end > report.next_sequence:
        start = max(report.next_sequence, needed)
        what = (
            f"the topic went on to sequence {end}, its log ends at {report.next_sequence}: somebody cut it, or the "
            "power was cut under --sync=interval"
        )
        if start < end:
            yield _damage(path, what, start, end - start)
        else:
            yield Finding(Kind.NOTE, path, 0, 0, f"{what}; the messages were finished")
    needed = Topic.first_needed(after, is_carried)
    if needed < report.first_sequence:
        what = f"messages from sequence {needed} on are needed, the log begins at {report.first_sequence}"
        yield _damage(path, what, needed, report.first_sequence - needed)
    point = int(after["distribution_point"])
    if point > int(after["end"]):
        yield _damage(path, f"the distribution point, {point}, lies past the end, {after['end']}")
    for channel in after["channels"]:
        for what in _implausible(channel, point):
            yield _damage(path, f"channel {channel['name']}: {what}")


def _implausible(channel: dict[str, Any], point: int) -> Iterator[str]:
    """What contradicts itself in a channel's state: messages would be delivered twice, or never."""
    cursor = int(channel["cursor"])
    if cursor > point:
        yield f"the cursor, {cursor}, lies past the distribution point, {point}"
    last = cursor
    for start, end in channel["holes"]:
        if not last <= start < end <= point:
            yield f"the hole from {start} to {end} is out of place"
            return
        last = end
    waiting = [sequence for sequence, *_ in channel["unfinished"]]
    waiting += DeferredMessages.restore(channel["deferred"]).sequences()
    previous = None
    for sequence in sorted(waiting):
        hole = bisect_right(channel["holes"], sequence, key=itemgetter(0)) - 1
        passed = sequence < cursor or (hole >= 0 and sequence < channel["holes"][hole][1])
        if sequence == previous or not passed:
            yield f"message {sequence} would be delivered twice"
            return
        previous = sequence
