"""Verification of a data folder, with or without a running broker: each topic's log, and its saved state against it."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from ...log import ALL_STABLE, Files, MemoryLog
from ...log.disk.history import FILE_NAME as ARCHIVED_FILE
from ...log.disk.history import read_archived
from ...log.inspection.carried_forward import scan_carried_forward
from ...log.inspection.findings import NOT_SERVED, Finding, Kind
from ...log.inspection.verify import LogReport, Progress, verify_log
from ...log.write_ahead.file import write_ahead_files
from ...protocol import is_valid_name
from ..state.cache import BatchCache
from ..state.checkpoint import first_needed, known_end, stable_end, unfinished_in
from ..state.topic import StateError, Topic
from .data_folder import (
    BROKER_COPY_FILE,
    BROKER_FILE,
    DAMAGE,
    INCOMPLETE,
    MAX_BROKER_BYTES,
    MAX_STATE_BYTES,
    MISSING_WRITE_AHEAD,
    PREVIOUS_STATE_FILE,
    RESTORING_FILE,
    STATE_FILE,
    SUFFIX,
    TOPICS_FOLDER,
    decode_ids,
    decode_state,
)

_TAKES_PREVIOUS = f"a broker uses the previous state, {PREVIOUS_STATE_FILE}"


def topic_name(folder: Path) -> str:
    return folder.resolve().name.removesuffix(SUFFIX)


def topic_folders(data_path: Path) -> list[Path]:
    """Return the topics' folders in a data folder, sorted. Raises OSError."""
    folders = (path for path in (data_path / TOPICS_FOLDER).iterdir() if path.name.endswith(SUFFIX))
    return sorted(folder for folder in folders if is_valid_name(topic_name(folder)))


def verify_broker_file(data_path: Path) -> list[Finding]:
    """Verify `broker.json` and its copy, the write-ahead log that they name, and that no restore is unfinished.

    Raises OSError.
    """
    files = Files()
    has_write_ahead = False
    damaged: dict[Path, ValueError] = {}
    whole = 0
    for name in (BROKER_FILE, BROKER_COPY_FILE):
        path = data_path / name
        try:
            has_write_ahead |= decode_ids(_content(files, path, MAX_BROKER_BYTES)).has_write_ahead
            whole += 1
        except FileNotFoundError:
            pass  # no broker has run here, or an earlier version without this file
        except ValueError as exc:
            damaged[path] = exc
    instead = "uses the other copy" if whole else "does not start"
    findings = [
        _damage(path, f"damaged, or from another version of this program ({exc}); a broker {instead}")
        for path, exc in damaged.items()
    ]
    if (data_path / RESTORING_FILE).exists():
        what = "the folder was not restored completely, and messages are missing; a broker does not start"
        findings.append(_damage(data_path / RESTORING_FILE, what, None, None))
    if has_write_ahead and not write_ahead_files(data_path, files.names(data_path)):
        findings.append(Finding(Kind.NOTE, data_path / "write-ahead.*", 0, 0, MISSING_WRITE_AHEAD))
    return findings


def verify_topic(folder: Path, *, files: Files | None = None, progress: Progress | None = None) -> LogReport:
    """Read a topic's whole log, and compare its saved state with it. Arguments as `verify_log`.

    Raises:
        LogReadError, OSError: The operating system failed to read.
    """
    path = folder / STATE_FILE
    # A broker may be running. The log only grows at its end, so it must contain all messages that a state read before
    # the log refers to. A state read after the log needs no message that was deleted from the log's beginning, unless
    # the message was carried forward.
    files = files or Files()
    before, stable = None, ALL_STABLE
    with suppress(StateError):  # reported when it is read again below
        before = _read_state(files, path)
        stable = stable_end(before)
    report = verify_log(folder, files=files, progress=progress, stable_end=stable)
    begin = _first_archived(folder, files, report)
    is_carried = _check_carried_forward(folder, files, report)
    has_previous = _check_previous(folder, files, report, begin)
    try:
        after = _read_state(files, path)
    except StateError as exc:
        instead = _TAKES_PREVIOUS if has_previous else NOT_SERVED
        report.findings.append(_damage(path, f"damaged ({exc}); {instead}"))
        return report
    if after is None:
        if has_previous:
            report.findings.append(Finding(Kind.NOTE, path, 0, 0, f"missing; {_TAKES_PREVIOUS}"))
        elif report.segments:
            text = "missing: the topic has no channels, and its first channel gets all messages in the log"
            report.findings.append(Finding(Kind.NOTE, path, 0, 0, text))
        return report
    before = before or after
    if incomplete := after.get(INCOMPLETE, 0):
        text = f"its last {incomplete} bytes are incomplete, as after a crash while a channel was created"
        report.findings.append(Finding(Kind.NOTE, path, 0, 0, text))
    try:
        for state in (before, after):
            _restore(folder, state, report, begin)
        report.findings += _compare(path, before, after, report, is_carried, begin)
    except (StateError, TypeError) as exc:  # numbers in quotes can be restored, but not compared
        report.findings.append(_damage(path, f"damaged ({exc}); {NOT_SERVED}"))
    return report


def _first_archived(folder: Path, files: Files, report: LogReport) -> int:
    """Return the first sequence that the archive of the broker has, or the log if there is none."""
    try:
        archived = read_archived(files, folder, report.first_sequence)
    except ValueError:
        what = "damaged: a broker does not read messages that only its archive has"
        report.findings.append(_damage(folder / ARCHIVED_FILE, what))
        archived = ()
    return archived[0].base_sequence if archived else report.first_sequence


def _check_previous(folder: Path, files: Files, report: LogReport, begin: int) -> bool:
    """Verify the previous state, and return whether a broker could use it."""
    path = folder / PREVIOUS_STATE_FILE
    try:
        state = _read_state(files, path)
        if state is not None:
            _restore(folder, state, report, begin)
    except StateError as exc:
        report.findings.append(
            _damage(path, f"damaged ({exc}); it is needed only if {STATE_FILE} is damaged too")
        )
        return False
    return state is not None


def _read_state(files: Files, path: Path) -> dict[str, Any] | None:
    """Read a topic's saved state; None if there is none. Raises StateError if a broker cannot use it, and OSError."""
    try:
        content = _content(files, path, MAX_STATE_BYTES)
        return decode_state(content, topic_name(path.parent) if _is_named_after_topic(path.parent) else "")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as exc:
        raise StateError(str(exc)) from exc


def _content(files: Files, path: Path, most: int) -> bytes:
    """Return the content of a file. Raises ValueError if a broker could not read it either, and OSError."""
    try:
        return files.content(path, most)
    except OSError as exc:
        if exc.errno not in DAMAGE:
            raise
        raise ValueError(exc.strerror) from exc


def _is_named_after_topic(folder: Path) -> bool:
    """Whether a folder has its topic's name. Otherwise it is a copy with an arbitrary name."""
    return folder.resolve().name.endswith(SUFFIX)


class _Outline(MemoryLog):
    """An empty log with a first sequence, and a report's next one: enough for a topic to load a state."""

    def __init__(self, report: LogReport, begin: int) -> None:
        super().__init__(first_sequence=begin)
        self.next_sequence = report.next_sequence


def _restore(folder: Path, state: dict[str, Any], report: LogReport, begin: int) -> None:
    """Load a state into a topic, as a broker does at its start. Raises StateError."""
    name = topic_name(folder) if _is_named_after_topic(folder) else str(state.get("name"))
    Topic(name, _Outline(report, begin), BatchCache(0), 0).restore(state)


def _damage(path: Path, what: str, sequence: int | None = None, messages: int | None = 0) -> Finding:
    return Finding(Kind.DAMAGE, path, 0, 0, what, sequence, messages)


def _check_carried_forward(folder: Path, files: Files, report: LogReport) -> Callable[[int], bool]:
    """Verify the carried-forward messages. Returns a function: whether a message is, or was, one of them."""
    carried: list[range] = []
    for found in scan_carried_forward(folder, files):
        if not isinstance(found, Finding):
            carried.append(range(found.header.base_sequence, found.header.next_sequence))
            continue
        report.findings.append(found)
        if found.sequence is not None:
            carried.append(range(found.sequence, found.next_sequence))  # carried forward, though damaged

    def is_carried(sequence: int) -> bool:
        at = bisect_right(carried, sequence, key=lambda span: span.start) - 1
        return at >= 0 and sequence in carried[at]

    return is_carried


def _compare(
    path: Path,
    before: dict[str, Any],
    after: dict[str, Any],
    report: LogReport,
    is_carried: Callable[[int], bool],
    begin: int,
) -> Iterator[Finding]:
    """Yield inconsistencies between restorable states and the log, which begins in the archive at `begin`."""
    end, needed = known_end(before), first_needed(before, is_carried)
    if end > report.next_sequence:
        start = max(report.next_sequence, needed)
        what = (
            f"the topic ends at sequence {end}, but its log at {report.next_sequence}: the log was truncated, or the "
            "power failed under --sync=interval"
        )
        if start < end:
            yield _damage(path, what, start, end - start)
        else:
            yield Finding(Kind.NOTE, path, 0, 0, f"{what}; the messages were finished")
    lost = _needed_before(after, begin, is_carried)
    if lost:
        needed = lost[0].start
        what = f"messages from sequence {needed} on are needed, but the log begins at {begin}"
        yield _damage(path, what, needed, sum(map(len, lost)))
    point = int(after["distribution_point"])
    if point > int(after["end"]):
        yield _damage(path, f"the high watermark, {point}, is after the end, {after['end']}")
    for channel in after["channels"]:
        for what in _implausible(channel, point):
            yield _damage(path, f"channel {channel['name']}: {what}")


def _needed_before(state: dict[str, Any], begin: int, is_carried: Callable[[int], bool]) -> list[range]:
    """Return the messages before the beginning of a log that a topic of this state needs."""
    all_from = min(first_needed(state, lambda _: True), begin)
    single = {each for channel in state["channels"] for each in unfinished_in(channel)} | {
        int(state["ephemeral_needed"])
    }
    lost = [range(each, each + 1) for each in sorted(single) if each < all_from and not is_carried(each)]
    return [*lost, range(all_from, begin)] if all_from < begin else lost


def _implausible(channel: dict[str, Any], point: int) -> Iterator[str]:
    """Yield contradictions in a channel's state, by which messages would be delivered twice or never."""
    cursor = int(channel["cursor"])
    if cursor > point:
        yield f"the cursor, {cursor}, is after the high watermark, {point}"
    last = cursor
    for start, end in channel["holes"]:
        if not last <= start < end <= point:
            yield f"the hole from {start} to {end} is out of order or out of range"
            return
        last = end
    previous = None
    for sequence in sorted(unfinished_in(channel)):
        hole = bisect_right(channel["holes"], sequence, key=itemgetter(0)) - 1
        passed = sequence < cursor or (hole >= 0 and sequence < channel["holes"][hole][1])
        if sequence == previous or not passed:
            yield f"message {sequence} would be delivered twice"
            return
        previous = sequence
