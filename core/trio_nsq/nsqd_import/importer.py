"""Import topics one by one, each completely or not at all.

The import builds a topic in a folder that brokers ignore, syncs it, and then renames it. An interrupted import can be
run again: a fingerprint of nsqd's files identifies topics that are already imported.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from ..broker.storage.data_folder import (
    BROKER_FILE,
    STATE_FILE,
    SUFFIX,
    TOPICS_FOLDER,
    DataFolder,
    encode_checked,
)
from ..log import DiskLog, Files
from ..log.inspection.findings import Finding
from ..log.inspection.verify import Progress
from ..protocol.untrusted_json import decode_json
from .diskqueue import Queue
from .merger import MergedMessage, Merger
from .nsqd_folder import NsqdFolder, lock
from .nsqd_metadata import ImportRefused, TopicMetadata
from .topic_builder import BodyReader, ChannelBuilder, LogWriter, topic_state

ORIGIN_FILE = "imported.json"
"""{"format": 1, "nsqd_data_path": P, "fingerprint": F}: the source of a topic, and `NsqdFolder.fingerprint`."""
_FORMAT = 1


class IfExists(StrEnum):
    """What to do if a topic of this name exists."""

    REFUSE = "refuse"
    SKIP = "skip"
    REPLACE = "replace"


class Outcome(StrEnum):
    """The result for a topic.

    PLANNED: a dry run would import it. EARLIER: it was imported before, and nsqd's files have not changed since.
    SKIPPED: a topic of this name exists and was not changed.
    """

    IMPORTED = "imported"
    PLANNED = "planned"
    EARLIER = "imported earlier"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class ChannelReport:
    """A channel: how many messages it has, and how many of them were delivered before."""

    name: str
    paused: bool
    messages: int
    attempted: int


@dataclass(slots=True)
class TopicReport:
    """A topic. The counts are known only if it was, or would be, imported.

    Attributes:
        messages: Messages in its log, each counted once.
        body_bytes: The size of their bodies.
        waiting: How many of them are in the topic but in no channel.
        findings: The damage in its queues.
    """

    name: str
    outcome: Outcome
    paused: bool
    messages: int = 0
    body_bytes: int = 0
    waiting: int = 0
    channels: list[ChannelReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def queue_bytes(source: NsqdFolder) -> int:
    """Estimate the total that `import_topics` reports as progress. Raises OSError."""
    return 2 * sum(files.size_bytes for topic in source.topics for files in source.queues(topic))


def import_topics(
    source: NsqdFolder,
    data_path: Path,
    *,
    if_exists: IfExists = IfExists.REFUSE,
    dry_run: bool = False,
    progress: Progress | None = None,
    files: Files | None = None,
) -> Iterator[TopicReport]:
    """Import all topics, one with each step of the iterator.

    Args:
        data_path: The data folder to import into; created if missing, but not its parent.
        dry_run: Only count, and change nothing.
        progress: Called with the number of bytes, out of `queue_bytes`, that were processed since the last call.
        files: The file system of the data folder; tests may replace it.

    Raises:
        ImportRefused, StartupError: The data folder cannot be used, or has such topics. Nothing is imported.
        LogWriteError, OSError: The operating system returned an error. Topics that were yielded before are imported.
    """
    if source.path.resolve() in (data_path.resolve(), *data_path.resolve().parents):
        raise ImportRefused(f"--data-path: {data_path} is inside nsqd's data folder: choose another folder")
    with ExitStack() as stack:
        folder = None
        if not dry_run:
            folder = stack.enter_context(closing(DataFolder(data_path, files)))
        elif data_path.is_dir():
            os.close(lock(data_path, "a broker: stop it first"))
        outcomes = _outcomes(source, data_path, if_exists)
        if folder is not None and not (data_path / BROKER_FILE).exists():
            # Before the first topic: a broker warns about topics without this file, as about a lost file.
            folder.reserve_ids(folder.first_id())
        for topic in source.topics:
            if outcomes[topic.name] is Outcome.IMPORTED:
                yield _TopicImport(source, topic, folder, progress).run()
                continue
            if progress is not None:
                progress(2 * sum(queue.size_bytes for queue in source.queues(topic)))
            yield TopicReport(topic.name, outcomes[topic.name], topic.paused)


def _outcomes(source: NsqdFolder, data_path: Path, if_exists: IfExists) -> dict[str, Outcome]:
    """Decide what to do with each topic. Raises ImportRefused."""
    outcomes: dict[str, Outcome] = {}
    for topic in source.topics:
        folder = data_path / TOPICS_FOLDER / (topic.name + SUFFIX)
        outcome = Outcome.IMPORTED
        if folder.exists() and if_exists is not IfExists.REPLACE:
            outcome = Outcome.EARLIER if _origin(folder) == source.fingerprint(topic) else Outcome.SKIPPED
        outcomes[topic.name] = outcome
    existing = [name for name, outcome in outcomes.items() if outcome is Outcome.SKIPPED]
    if existing and if_exists is IfExists.REFUSE:
        one = len(existing) == 1
        raise ImportRefused(
            f"--data-path: {data_path} has {'a topic' if one else 'topics'} {', '.join(existing)} already: nothing was "
            "imported. --if-exists skip imports the others only, --if-exists replace deletes "
            f"{'it' if one else 'them'} first"
        )
    return outcomes


def _origin(folder: Path) -> str | None:
    """Read the fingerprint of an imported topic; None if it was not imported."""
    try:
        content = decode_json((folder / ORIGIN_FILE).read_bytes())
        return str(content["fingerprint"]) if content["format"] == _FORMAT else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


class _TopicImport:
    """Imports one topic.

    Args:
        folder: The data folder to import into; None: only count.
    """

    def __init__(
        self, source: NsqdFolder, topic: TopicMetadata, folder: DataFolder | None, progress: Progress | None
    ) -> None:
        self._source = source
        self._topic = topic
        self._folder = folder
        self._progress = progress
        self._queues = source.queues(topic)
        outcome = Outcome.PLANNED if folder is None else Outcome.IMPORTED
        self._report = TopicReport(topic.name, outcome, topic.paused)

    def run(self) -> TopicReport:
        spill = None if self._folder is None else self._folder.path
        with closing(Merger(spill)) as distributed, closing(Merger(spill)) as waiting:
            for number, files in enumerate(self._queues):
                queue = Queue(files, self._progress)
                (distributed if number else waiting).add(number, queue.read())
                self._report.findings += queue.findings
            if self._folder is None:
                self._lay_out(distributed, waiting, lambda message: None)
            else:
                self._build(self._folder, distributed, waiting)
        return self._report

    def _lay_out(
        self, distributed: Merger, waiting: Merger, store: Callable[[MergedMessage], None]
    ) -> list[ChannelBuilder]:
        """Call `store` with all messages, those in channels first; count them; return the state of each channel."""
        report, channels = self._report, self._topic.channels
        plans = [ChannelBuilder() for _ in channels]
        for message in distributed.merged():
            store(message)
            for copy in message.copies:
                plans[copy.queue - 1].add(report.messages, copy.attempts)
            report.messages += 1
            report.body_bytes += message.size
        for message in waiting.merged():
            store(message)
            report.messages += 1
            report.waiting += 1
            report.body_bytes += message.size
        report.channels = [
            ChannelReport(channel.name, channel.paused, plan.messages, plan.attempted)
            for channel, plan in zip(channels, plans, strict=True)
        ]
        return plans

    def _build(self, folder: DataFolder, distributed: Merger, waiting: Merger) -> None:
        """Build the topic in a separate folder, then rename the folder."""
        topic, progress = self._topic, self._progress
        building = folder.import_folder(topic.name)
        folder.files.remove_folder(building)  # left by an interrupted import
        try:
            folder.files.make_folder(building)
            with (
                closing(BodyReader(self._queues)) as bodies,
                closing(DiskLog(building, files=folder.files)) as log,
            ):
                writer = LogWriter(log)

                def store(message: MergedMessage) -> None:
                    writer.add(message.id, message.timestamp_ns, bodies.read(message))
                    if progress is not None:
                        progress(message.size * len(message.copies))

                plans = self._lay_out(distributed, waiting, store)
                writer.close()
                state = topic_state(topic, log, plans, self._report.messages - self._report.waiting)
            origin = {
                "format": _FORMAT,
                "nsqd_data_path": str(self._source.path.resolve()),
                "fingerprint": self._source.fingerprint(topic),
            }
            folder.files.replace(building / ORIGIN_FILE, json.dumps(origin).encode() + b"\n")
            content = encode_checked(json.dumps(state, separators=(",", ":")).encode())
            folder.files.replace(building / STATE_FILE, content)
            retired = folder.retire_topic(topic.name)
            folder.files.rename(building, folder.topic_folder(topic.name))
            folder.files.sync_folder(building.parent)
        except BaseException:
            folder.files.remove_folder(building)
            raise
        if retired is not None:
            folder.files.remove_folder(retired)
