"""The names of an archive's objects, and its manifest, which lists the checkpoints.

    @archive.json                            the manifest; replaced by compare-and-swap
    @lease                                   held by the broker that writes
    @checkpoints/ID/segments                 the archived segments that the checkpoint refers to, a line of JSON each
    @checkpoints/ID/PART                     the rest of the data folder: pieces of a catch-up
    @checkpoints/ID.json                     the record of the checkpoint: what the manifest says of it
    @stream/ID/FIRST-LAST-TIME               file operations FIRST to LAST, written while ID was the newest checkpoint
    TOPIC/INCARNATION/FIRST-LAST.seg         archived segments: see `segment_names`

A checkpoint is in the manifest when all its objects are written, the record last. Without the manifest, the records
tell the same. No name of a topic begins with `@`. ID and PART have 10 digits, FIRST and LAST 20, and TIME, Unix
milliseconds, 15.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from math import inf
from typing import Any, Final, NamedTuple

from ..protocol.errors import NSQError
from ..storage import ChangedMeanwhile, Storage

MANIFEST: Final = "@archive.json"
LEASE: Final = "@lease"
CHECKPOINTS: Final = "@checkpoints"
RECORD_SUFFIX: Final = ".json"
_VERSION: Final = 1
_MOST: Final = (1 << 63) - 1
_NUMBERS: Final = ("id", "number", "time_ms", "parts", "size_bytes")
_STREAM_NAME: Final = re.compile(r"([0-9]{20})-([0-9]{20})-([0-9]{15})")


class ArchiveError(NSQError):
    """An archive cannot be used; the text has the reason."""


class ArchiveDamaged(ArchiveError):
    """An object of an archive is missing or damaged."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A copy of the data folder.

    Attributes:
        id: Higher than those before.
        run: Identifies the run of the broker: its operations are numbered from 1.
        number: The copy has all operations up to this one.
        time_ms: Not before the last of them, Unix milliseconds.
        previous: The checkpoint before, of the same run; its stream has operations behind `number`, too. None: none.
        parts: How many objects `PART` it has, numbered from 1.
        size_bytes: Of its parts, without the archived segments.
    """

    id: int
    run: str
    number: int
    time_ms: int
    previous: int | None
    parts: int
    size_bytes: int

    @property
    def segments_name(self) -> str:
        """The name of the object with its archived segments."""
        return f"{checkpoint_folder(self.id)}/segments"

    @property
    def record_name(self) -> str:
        """The name of its record."""
        return f"{checkpoint_folder(self.id)}{RECORD_SUFFIX}"

    @property
    def part_names(self) -> list[str]:
        """The names of its other objects, in order."""
        return [part_name(self.id, part) for part in range(1, self.parts + 1)]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of the manifest.

    Attributes:
        next_id: Of the next checkpoint; those that were not finished have one, too.
        checkpoints: Those that are complete, oldest first.
        first_id: Of those with lower ids, nothing is left.
        owner: See `owner`; empty: a version before has written it.
    """

    next_id: int = 1
    checkpoints: tuple[Checkpoint, ...] = ()
    first_id: int = 1
    owner: str = ""

    def encode(self) -> bytes:
        content = {"version": _VERSION, **asdict(self)}
        return json.dumps(content, separators=(",", ":")).encode()


class FoundManifest(NamedTuple):
    """The manifest of an archive.

    Attributes:
        manifest: Empty if there is no archive.
        version: For `Storage.replace`; None: the object is missing.
        damage: What is wrong with it, a sentence: the records of the checkpoints tell what it said. Empty: nothing.
        is_whole: Whether no checkpoint is missing in it, so far as is known.
    """

    manifest: Manifest
    version: str | None
    damage: str = ""
    is_whole: bool = True


def read_object(storage: Storage, name: str) -> bytes:
    """Return the content of an object. Raises ArchiveDamaged: it is missing; StorageError, OSError."""
    found = storage.read(name)
    if found is None:
        raise ArchiveDamaged(f"{storage.url_of(name)} is missing")
    return found.data


def complete_checkpoints(storage: Storage) -> tuple[Checkpoint, ...]:
    """Return the checkpoints of an archive, at least one, oldest first.

    Raises: As `begun_manifest`.
    """
    return begun_manifest(storage).manifest.checkpoints


def begun_manifest(storage: Storage) -> FoundManifest:
    """Return the manifest of an archive, with at least one checkpoint.

    Raises:
        ArchiveError: It is no archive, or has none. ArchiveDamaged: As `read_manifest`.
        StorageError, OSError: It cannot be read.
    """
    found = read_manifest(storage)
    if not found.manifest.checkpoints:
        raise ArchiveError(
            f"there is no archive of a broker in {storage.shown}, or none with a complete checkpoint yet"
        )
    return found


def read_manifest(storage: Storage) -> FoundManifest:
    """Return the manifest of an archive. If it is missing or damaged, the records of the checkpoints replace it.

    Raises:
        ArchiveDamaged: It is damaged, and there is no record; or a newer trio-nsq has written it.
        StorageError, OSError: It cannot be read.
    """
    url, found = storage.url_of(MANIFEST), storage.read(MANIFEST)
    if found is not None:
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            return FoundManifest(_decode(found.data, url), found.version)
    records = list(_read_records(storage))
    intact = [each for each in records if each is not None]
    if not intact:
        if found is None and not records:
            return FoundManifest(Manifest(), None)
        raise ArchiveDamaged(
            f"{url} is {'missing' if found is None else 'damaged'}, and no checkpoint has a record"
        )
    owner = intact[-1][0]
    checkpoints = tuple(checkpoint for other, checkpoint in intact if other == owner)
    first, last = checkpoints[0], checkpoints[-1]
    is_whole = len(checkpoints) == len(records)
    loss = (
        "and nothing is lost by that"
        if is_whole
        else "but some are damaged, too, or of another broker: later changes may be missing"
    )
    what = f"{url} is {'missing' if found is None else 'damaged'}"
    damage = f"{what}: the records of checkpoints were read instead, {loss}"
    first_id = first.id if first.previous is None else first.previous
    manifest = Manifest(last.id + 1, checkpoints, first_id, owner)
    return FoundManifest(manifest, None if found is None else found.version, damage, is_whole)


def _decode(data: bytes, url: str) -> Manifest:
    """Raises ArchiveDamaged: a newer version has written it; ValueError, KeyError, TypeError, RecursionError."""
    content = _decode_version(data, url)
    checkpoints = tuple(_checkpoint(each) for each in content["checkpoints"])
    next_id, first_id = (_number(content[name]) for name in ("next_id", "first_id"))
    return Manifest(next_id, checkpoints, first_id, str(content.get("owner", "")))


def _decode_version(data: bytes, url: str) -> Any:
    content = json.loads(data)
    if _number(content["version"]) > _VERSION:
        raise ArchiveDamaged(f"{url} has version {content['version']}: a newer trio-nsq has written it")
    return content


def encode_record(checkpoint: Checkpoint, owner: str) -> bytes:
    """Return the content of the record of a checkpoint. `owner`: see `Manifest`."""
    content = {"version": _VERSION, "owner": owner, "checkpoint": asdict(checkpoint)}
    return json.dumps(content, separators=(",", ":")).encode()


def read_record(storage: Storage, name: str) -> tuple[str, Checkpoint]:
    """Return the owner and the checkpoint in a record.

    Raises:
        ArchiveDamaged: It is missing, cannot be understood, or a newer trio-nsq has written it.
        StorageError, OSError: It cannot be read.
    """
    data, url = read_object(storage, name), storage.url_of(name)
    try:
        content = _decode_version(data, url)
        checkpoint = _checkpoint(content["checkpoint"])
        if checkpoint.record_name == name:
            return str(content["owner"]), checkpoint
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ArchiveDamaged(f"{url} is damaged")


def _read_records(storage: Storage) -> Iterator[tuple[str, Checkpoint] | None]:
    """Yield the owner and the checkpoint of each record, the oldest first; None: it is damaged."""
    for name in sorted(storage.names(CHECKPOINTS)):
        if name.endswith(RECORD_SUFFIX):
            try:
                yield read_record(storage, name)
            except ArchiveDamaged:
                if storage.size(name) is not None:  # otherwise `prune` has removed it meanwhile
                    yield None


def _checkpoint(content: Any) -> Checkpoint:
    match content:
        case {"run": str(run), "previous": int() | None as previous}:
            numbers = {name: _number(content[name]) for name in _NUMBERS}
            return Checkpoint(run=run, previous=None if previous is None else _number(previous), **numbers)
    raise ValueError(content)


def _number(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value <= _MOST:
        raise ValueError(value)
    return value


def change_manifest(storage: Storage, change: Callable[[Manifest], Manifest]) -> Manifest:
    """Change the manifest, and return it; several processes may do this.

    Raises:
        ArchiveDamaged: It cannot be understood.
        StorageError, OSError: It cannot be read or written.
    """
    while True:
        found = read_manifest(storage)
        changed = change(found.manifest)
        try:
            storage.replace(MANIFEST, changed.encode(), found.version)
        except ChangedMeanwhile:
            continue
        return changed


def checkpoint_folder(checkpoint_id: int) -> str:
    """Return the folder of the objects of a checkpoint."""
    return f"{CHECKPOINTS}/{checkpoint_id:010d}"


def part_name(checkpoint_id: int, part: int) -> str:
    """Return the name of a part of a checkpoint."""
    return f"{checkpoint_folder(checkpoint_id)}/{part:010d}"


def later_in_chain(checkpoints: Sequence[Checkpoint], checkpoint: Checkpoint) -> tuple[Checkpoint, ...]:
    """Return the checkpoints after one, of the same run, as far as their operations follow without a gap.

    A run that was interrupted begins another chain, with a checkpoint that has no previous one.
    """
    later = (each for each in checkpoints if each.id > checkpoint.id and each.run == checkpoint.run)
    return tuple(takewhile(lambda each: each.previous is not None, later))


class StreamName(NamedTuple):
    """The name of an object with file operations, without its folder.

    Attributes:
        first, last: The numbers of the first and the last operation.
        time_ms: Not before any of them, Unix milliseconds.
    """

    first: int
    last: int
    time_ms: int

    @classmethod
    def parse(cls, name: str) -> "StreamName | None":
        """Parse the last part of a name; None if it is another one."""
        found = _STREAM_NAME.fullmatch(name)
        return cls(*map(int, found.groups())) if found is not None else None

    def __str__(self) -> str:
        return f"{self.first:020d}-{self.last:020d}-{self.time_ms:015d}"


def stream_folder(checkpoint_id: int) -> str:
    """Return the folder of the operations that were written while this was the newest checkpoint."""
    return f"@stream/{checkpoint_id:010d}"


class StreamObject(NamedTuple):
    """An object with file operations: its name in the archive, and what the name says."""

    name: str
    about: StreamName


class Stream(NamedTuple):
    """The objects with the operations behind a checkpoint, of its run.

    Attributes:
        objects: Those without a gap, in order. They may have operations twice: see `list_stream`.
        gap: The first operation that no object has, although there are later ones; None: there is no gap.
    """

    objects: tuple[StreamObject, ...]
    gap: int | None


def list_stream(
    storage: Storage,
    checkpoint: Checkpoint,
    until_ms: int | None = None,
    later: Sequence[Checkpoint] = (),
) -> Stream:
    """List the operations behind a checkpoint.

    If the listing of a folder lacks objects, and a later folder has some, there is a gap. If it lacks the newest
    objects of an archive, that cannot be noticed: the state is an earlier one.

    Args:
        until_ms: Leave out later ones, Unix milliseconds; None: no limit.
        later: Those of `later_in_chain` whose operations are listed, too.

    Raises:
        StorageError, OSError: The archive cannot be read.
    """
    folders = [checkpoint.previous, checkpoint.id, *(each.id for each in later)]
    return list_operations(
        storage, [each for each in folders if each is not None], checkpoint.number, until_ms
    )


def list_operations(
    storage: Storage, folders: Sequence[int], number: int, until_ms: int | None = None
) -> Stream:
    """List the operations behind one of them.

    Args:
        folders: The checkpoints of one run, in order, while which they were written.
        number: That of the operation before them.
        until_ms: As for `list_stream`.

    Raises:
        StorageError, OSError: The archive cannot be read.
    """
    most_ms = inf if until_ms is None else until_ms
    found = list[StreamObject]()
    for folder in folders:
        for name in storage.names(stream_folder(folder)):
            if (about := StreamName.parse(name.rpartition("/")[2])) is not None:
                found.append(StreamObject(name, about))
    objects = list[StreamObject]()
    # A request whose answer was lost may have stored the first of some operations under a name of its own.
    for each in sorted(
        found, key=lambda each: (each.about.first, each.about.time_ms > most_ms, -each.about.last)
    ):
        if each.about.last <= number:
            continue
        if each.about.first > number + 1:
            return Stream(tuple(objects), number + 1)
        if each.about.time_ms > most_ms:
            break
        objects.append(each)
        number = each.about.last
    return Stream(tuple(objects), None)
