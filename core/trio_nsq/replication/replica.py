"""A follower's data folder: it repeats the operations of the leader, durably and in their order.

Operations are first written to the journal and synced; then they are acknowledged. They are done in the files after
that, unsynced. When the journal is large, the files are synced and an empty journal follows. After a crash,
`Replica.open` does all operations in the journal again. The files may have any of them already, whole or torn, so doing
them again must give the same result:

- A file or folder that is created gets its whole content from the journal.
- LINK would give the new name to a newer file, so the journal has a copy of the file instead.
- Before a file or folder that is older than the journal is renamed, what is below it is synced: the journal's writes
  will not find it any more. Before its old name is used again, or it goes into a created folder, a new journal begins.
- What is missing was removed or renamed already.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from errno import EEXIST, EFBIG, EINVAL, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, ENOTEMPTY
from pathlib import Path
from typing import Final, NamedTuple, Self

from ..log.errors import LogReadError
from ..log.files import Files
from ..platform.compiled import mypyc_attr
from ..protocol.errors import NSQError
from .catch_up import CaughtUp, Piece
from .changed_files import ChangedFiles
from .earlier import EarlierContent
from .fuzzy_copy import FuzzyCopy
from .inventory import RECORD_BYTES, take_inventory
from .journal import Journal, JournalDamaged, Position, journals, read_journal, remove_journals
from .names import NamesSince
from .operations import CONTENT_KINDS, InvalidOperation, Kind, Operation, decode_all, encode, is_at_or_below
from .stream import FormerOperations

_JOURNAL_BYTES: Final = 16 * 1024 * 1024
"""A journal of this size is followed by an empty one."""
_NEWEST_BYTES: Final = 2 * 1024 * 1024
"""So much of the newest operations is kept in memory, for followers of this member as the next leader."""
_COPIED_BYTES: Final = 8 * 1024 * 1024
"""Memory for copies of files in one write to the journal, about."""
_MISFITS: Final = frozenset((EEXIST, EFBIG, EINVAL, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, ENOTEMPTY))
"""Errors of operations that do not fit the folder; repeating them does not help."""


class ReplicaError(NSQError):
    """The folder cannot follow; the text says why. Close it and open it again."""


class Diverged(ReplicaError):
    """The folder is not what the leader's operations assume: it must catch up anew."""


class _Stored(NamedTuple):
    """An operation in the journal that is not done yet; `names_older` is the result of `NamesSince.add`."""

    operation: Operation
    names_older: bool


class _Errors:
    """Turns errors of the operating system in a block into those of a replica. A class: a generator takes longer."""

    def __init__(self, replica: "Replica") -> None:
        self._replica = replica

    def __enter__(self) -> None:
        self._replica.is_intact = False

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        if exc is None:
            self._replica.is_intact = True
        elif isinstance(exc, OSError):
            self._replica._fail(exc)


@mypyc_attr(allow_interpreted_subclasses=True)  # members notice catch-ups
class Replica:
    """A locked data folder that follows. Blocking; one thread has it. After an error, only `close` may be called.

    Args:
        folder: The data folder.
        journal_bytes: See `_JOURNAL_BYTES`.

    Attributes:
        record_bytes: No record of a segment is larger.
        position: Which operations the folder has durably; None if that is unknown, so that it must catch up.
        is_intact: No method has failed: this instance may be used on.
    """

    def __init__(self, files: Files, folder: Path, journal_bytes: int = _JOURNAL_BYTES) -> None:
        self.position: Position | None = None
        self.is_intact = True
        self.record_bytes = RECORD_BYTES
        self._files = files
        self._folder = folder
        self._journal_bytes = journal_bytes
        self._journal: Journal | None = None
        self._names = NamesSince()
        self._changed = ChangedFiles(files, folder)
        self._earlier = EarlierContent(files, folder)
        self._stored: list[_Stored] = []
        self._newest = deque[bytes]()  # operations up to `position`, as they came
        self._newest_bytes = self._newest_number = 0
        self._copy: FuzzyCopy | None = None  # of a catch-up
        self._errors = _Errors(self)

    @classmethod
    def open(cls, files: Files, folder: Path, journal_bytes: int = _JOURNAL_BYTES) -> Self:
        """Open a folder, and bring its files up to date with its journal.

        Raises:
            ReplicaError: A file cannot be read or written.
        """
        replica = cls(files, folder, journal_bytes)
        try:
            with replica._errors:
                replica._redo_journal()
        except BaseException:
            replica.close()
            raise
        return replica

    def _redo_journal(self) -> None:
        try:
            stored = read_journal(self._files, self._folder)
        except JournalDamaged:
            return  # the position stays unknown
        except LogReadError as exc:
            raise ReplicaError(str(exc)) from exc
        if stored is None:
            return
        number = stored.base.number
        try:
            for each in stored.rounds:
                number = each.last_number
                for operation in decode_all(each.operations):
                    if names_older := self._names.add(operation):
                        self._changed.sync_below(operation.path)
                    self._changed.redo(operation, names_older=names_older)
        except OSError as exc:
            if exc.errno not in _MISFITS:
                raise
            self._forget_position()
        else:
            self._begin(Position(stored.base.epoch, number))

    @property
    def former(self) -> FormerOperations | None:
        """What this folder, as that of a new leader, knows of the operations that it has followed."""
        if self.position is None:
            return None
        is_known = self._newest_number == self.position.number
        return FormerOperations(self.position, tuple(self._newest) if is_known else ())

    def keep(self, former: FormerOperations | None) -> None:
        """Take what another instance for this folder knew, if nothing has happened since."""
        if former is not None and former.position == self.position:
            self._remember(former.newest, former.position.number)

    def _remember(self, operations: Sequence[bytes | memoryview], last_number: int) -> None:
        self._newest_number = last_number
        for each in operations:
            self._newest.append(bytes(each))
            self._newest_bytes += len(each)
        while self._newest_bytes > _NEWEST_BYTES:
            self._newest_bytes -= len(self._newest.popleft())

    def go_on(self, epoch: int) -> None:
        """Follow the next leader, with this epoch, which has followed the same one: it knows this position.

        Raises:
            ReplicaError: A file cannot be written.
        """
        assert self.position is not None
        with self._errors:
            self._do_stored()
            self._begin(Position(epoch, self.position.number))

    def _forget_position(self, *, is_whole: bool = False) -> None:
        """Record durably that the folder is no state that a leader had, and must catch up.

        Args:
            is_whole: It is one yet, or what a leader left, durably.
        """
        self._stored.clear()
        self._newest.clear()
        self._newest_bytes = self._newest_number = 0
        self._changed.close()
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self._earlier.give_up(self._epoch if is_whole else None, is_whole=is_whole)
        self.position = None
        remove_journals(self._files, self._folder)

    @property
    def _epoch(self) -> int | None:
        return self.position.epoch if self.position is not None else None

    @property
    def is_incomplete(self) -> bool:
        """Whether a catch-up was not finished, so that the folder is no state that a leader had."""
        return self._earlier.is_incomplete

    def _is_whole(self) -> bool:
        """Whether each file has all that was written to it, unless `EarlierContent` knows better."""
        return self.position is not None or not journals(self._folder, self._files.names(self._folder))

    def inventory(self) -> Iterator[bytes]:
        """Yield an entry for each file, for a leader. Raises ReplicaError: a file cannot be read."""
        with self._errors:
            self._do_stored()
            sources = self._earlier.sources(self._epoch, is_whole=self._is_whole())
            for path, digest in take_inventory(self._files, sources, self.record_bytes):
                yield digest.encode(path)

    def catch_up(self, epoch: int) -> None:
        """Give up the position, to copy the folder of a leader with this epoch: `add` takes the pieces.

        What this folder has and the leader has not is kept in a folder `diverged-EPOCH`.

        Raises:
            ReplicaError: A file cannot be written.
        """
        with self._errors:
            self._do_stored()
            self._changed.sync()
            self._forget_position(is_whole=self._is_whole())
            self._earlier.set_aside()
            self._copy = FuzzyCopy(self._files, self._folder, self._changed, self._earlier, epoch)

    def take_copy(self, epoch: int, write: Callable[[], None]) -> None:
        """Have the folder written anew, durably, by other means than pieces of a leader. Its position is unknown then.

        What the folder had is kept in a folder `diverged-EPOCH`. If `write` fails, the folder is incomplete.

        Raises:
            ReplicaError: A file cannot be written; and what `write` raises.
        """
        self.catch_up(epoch)
        self._copy = None
        write()
        with self._errors:
            self._earlier.end(epoch)

    def add(self, piece: Piece) -> None:
        """Take the next piece of a catch-up. `CaughtUp` gives the folder its position, durably.

        Raises:
            InvalidOperation: It has an operation that may not be done.
            Diverged: It does not belong to the pieces before.
            ReplicaError: A file cannot be written.
        """
        assert self._copy is not None
        with self._errors:
            if isinstance(piece, CaughtUp):
                self._begin(Position(self._copy.epoch, piece.number))
                self._copy = None
            else:
                self._copy.add(piece)

    def begin(self, position: Position) -> None:
        """Follow from here on: the files have all operations up to this one, not necessarily durably yet.

        Raises:
            ReplicaError: A file cannot be written.
        """
        with self._errors:
            self._begin(position)

    def _begin(self, position: Position) -> None:
        """Make the files durable, and begin an empty journal."""
        assert not self._stored
        self._changed.sync()
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self._journal = Journal.begin(self._files, self._folder, position)
        self._earlier.end(position.epoch)
        self.position = position
        self._names = NamesSince()

    def end(self, finish: Callable[[], None] = lambda: None) -> None:
        """Follow no longer: make the files durable, and remove the journal. Then a broker may open the folder.

        Args:
            finish: Called before the journal is removed. After a crash until then, the folder follows as before.

        Raises:
            ReplicaError: A file cannot be written, or the folder has not caught up.
        """
        if self.position is None:
            raise ReplicaError(f"{self._folder} has not caught up with a leader: messages are missing in it")
        with self._errors:
            self._do_stored()
            self._changed.sync()
            finish()
            self.close()
            self.position = None
            remove_journals(self._files, self._folder)

    def close(self) -> None:
        """Close all files. What is stored stays so."""
        self._changed.close()
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _fail(self, exc: OSError) -> None:
        if exc.errno in _MISFITS:
            self._forget_position()
            raise Diverged(f"{self._folder} is not what the leader's operations assume: {exc}") from exc
        raise ReplicaError(f"cannot use {exc.filename or self._folder}: {exc.strerror or exc}") from exc

    # ------------------------------------------------------------------ following

    def store(self, *operations: bytes | memoryview) -> Position:
        """Store operations, durably. Then acknowledge them, and call `apply`: they must not change before.

        Args:
            operations: At least one, as `encode` makes them; their numbers follow the position's.

        Returns:
            The new position.

        Raises:
            InvalidOperation: They are not what may come next; nothing was stored.
            Diverged: The folder lacks a file.
            ReplicaError: They cannot be stored.
        """
        if self.position is None:
            raise Diverged(f"{self._folder} has no known position")
        decoded = [each for some in operations for each in decode_all(some)]
        number = self.position.number
        for each in decoded:
            number += 1
            if each.number != number:
                raise InvalidOperation(f"operation {each.number} follows operation {number - 1}")
        if not decoded:
            raise InvalidOperation("a round has no operations")
        with self._errors:
            self._store(operations, decoded)
        self._remember(operations, self.position.number)
        return self.position

    def _store(self, operations: Sequence[bytes | memoryview], decoded: Sequence[Operation]) -> None:
        """Write operations to the journal.

        Those before one that needs a new journal are done first; so are those before a LINK, if they change what is
        linked, which is read.
        """
        whole, pending, copied_bytes = True, list[_Stored](), 0
        for each in decoded:
            if each.kind in CONTENT_KINDS:
                pending.append(_Stored(each, names_older=False))
                continue
            needs_new, is_link = self._names.needs_new(each), each.kind is Kind.LINK
            if (
                needs_new
                or copied_bytes > _COPIED_BYTES
                or (is_link and any(_changes(one.operation, each.path) for one in pending))
            ):
                self._append(_encoded(pending), pending)
                self._do_stored()
                whole, pending, copied_bytes = False, [], 0
            if needs_new:
                assert self.position is not None
                self._begin(self.position)
            whole = whole and not is_link
            for one in self._copied(each) if is_link else (each,):
                pending.append(_Stored(one, self._names.add(one)))
                copied_bytes += len(one.data) if is_link else 0
        self._append(operations if whole else _encoded(pending), pending)

    def _append(self, content: Sequence[bytes | memoryview], operations: Sequence[_Stored]) -> None:
        if not operations:
            return
        assert self._journal is not None
        assert self.position is not None
        number = operations[-1].operation.number
        self._journal.append(content, number)
        self.position = Position(self.position.epoch, number)
        self._stored += operations

    def _copied(self, link: Operation) -> Iterator[Operation]:
        """Yield what makes a copy of a file instead of a second name; the file is read."""
        self._do_stored()
        yield Operation(link.number, Kind.CREATE, link.to)
        for offset, data in self._changed.content(link.path):
            yield Operation(link.number, Kind.WRITE, link.to, offset, data=data)

    def apply(self) -> None:
        """Do what was stored. Raises ReplicaError: a file cannot be written; Diverged."""
        with self._errors:
            self._do_stored()
            assert self._journal is not None
            assert self.position is not None
            if self._journal.size >= self._journal_bytes:
                self._begin(self.position)

    def _do_stored(self) -> None:
        stored, self._stored = self._stored, []
        at = 0
        while at < len(stored):
            operation, names_older = stored[at]
            if names_older:
                self._changed.sync_below(operation.path)
            end = at + 1
            while end < len(stored) and _continues(stored[end].operation, stored[end - 1].operation):
                end += 1
            if end - at > 1:
                data = [each.operation.data for each in stored[at:end]]
                self._changed.sync_if_many()
                self._changed.write(operation.path, operation.position, *data)
            else:
                self._changed.do(operation)
            at = end


def _changes(operation: Operation, path: bytes) -> bool:
    """Whether an operation may change the file of this path."""
    return any(is_at_or_below(path, changed) for changed in (operation.path, operation.to) if changed)


def _continues(operation: Operation, before: Operation) -> bool:
    """Whether an operation writes what follows in the file, so that one write does both."""
    return (
        operation.kind is before.kind is Kind.WRITE
        and operation.path == before.path
        and operation.position == before.position + len(before.data)
    )


def _encoded(stored: Sequence[_Stored]) -> list[bytes]:
    pieces: list[bytes] = []
    for operation, _ in stored:
        number, kind, path, position, to, data = operation
        pieces += encode(number, kind, path, position, to, [bytes(data)] if data else ())
    return pieces
