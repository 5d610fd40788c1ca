"""The interface of tables, and what both kinds have in common: numbered commits, and the compaction of small files."""

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..export.columns import schema_of
from ..export.layout import Layout, is_file_of
from ..export.manifest import RangeResult
from ..storage import Storage
from .compaction import AT_ONCE, TableFile, merge_files, small_files
from .target import TableBusy, TableError, TableOptions

_ATTEMPTS = 20
"""How often a commit is repeated that other writers of the table preceded."""
_PAUSE_S = 0.05
"""The mean pause before the first repetition; it doubles up to `_MAX_PAUSE_S`."""
_MAX_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Compacted:
    """The result of a compaction: the numbers of files that were replaced, and of those that replaced them."""

    replaced: int = 0
    written: int = 0


class Table(ABC):
    """A table, as one export uses it. Created by `open_table`.

    Args:
        storage: The export folder.
        topic: The topic of the export.
    """

    shown: str
    """The table, for messages."""

    def __init__(self, storage: Storage, topic: str, options: TableOptions) -> None:
        self._storage = storage
        self._topic = topic
        self._options = options
        self._new_files: int | None = None  # since the last compaction; None: there was none

    # ------------------------------------------------------------------ commits

    def check(self, number: int, *, unfinished: bool, layout: Layout | None) -> None:
        """Check at the start of an export that the table can take its files.

        Args:
            number: The number of the last commit in the manifest; 0: none.
            unfinished: Whether that commit may be missing in the table.
            layout: The layout of the next files; None if it is not known yet.

        Raises:
            TableError: The table has other columns or partitions, or other commits of this export than the manifest.
            TableUnavailable: The table cannot be reached.
        """
        self._load()
        at = self._committed()
        if at < number - unfinished:
            raise TableError(
                f"{self.shown} has no commit {number} of the export in {self._storage.shown}: the table was dropped, "
                "recreated or restored to an older version. Restore it, or export to another folder"
            )
        if at > number:
            raise TableError(
                f"{self.shown} has commit {at} of the export in {self._storage.shown}, whose manifest knows only "
                f"{number}: the manifest is an old copy. Restore it, or export to another folder"
            )
        if layout is not None:
            self._check_layout(layout)

    def commit(self, number: int, results: Sequence[RangeResult], layout: Layout) -> None:
        """Add the files of exported ranges to the table, once: a repeated call with the same number does nothing.

        The table is created if it is missing; columns of the layout that it lacks are added.

        Args:
            number: One more than that of the previous commit of this export.
            layout: The newest layout; it has all columns of the files.

        Raises:
            TableError: The table cannot take the files.
            TableBusy: Other writers changed the table each time.
            TableUnavailable: The table cannot be reached; repeat the call with the same arguments.
        """
        names = [name for result in results for name in result.files]

        def append() -> None:
            at = self._committed()
            if at == number:
                return
            if at != number - 1:
                raise TableError(
                    f"commit {number} of the export in {self._storage.shown} does not follow commit {at}, the last one "
                    f"in {self.shown}"
                )
            self._check_layout(layout)
            self._append(number, names, layout)

        self._repeat(append)
        if self._new_files is not None:
            self._new_files += len(names)

    def _repeat(self, change: Callable[[], None]) -> None:
        """Call a function with the current state of the table, until no other writer precedes it."""
        pause_s = _PAUSE_S
        for attempt in range(_ATTEMPTS):
            self._load()
            try:
                change()
                return
            except TableBusy:
                if attempt == _ATTEMPTS - 1:
                    raise
            time.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    # ------------------------------------------------------------------ compaction

    def compact(self, layout: Layout, brokers: Collection[str], still_ours: Callable[[], None]) -> Compacted:
        """Replace small files of this export by larger ones, where it is worth it; readers never see a row twice.

        Then remove files that older versions needed, as far as the table's retention allows.

        Args:
            layout: See `commit`.
            brokers: The brokers of the export, by label.
            still_ours: Called before a change; raises an error if another process exports to the folder now.

        Raises:
            TableError, TableUnavailable, StorageError, OSError: See `commit`. The table has not lost anything.
        """
        if self._new_files is not None and self._new_files < AT_ONCE:
            return Compacted()
        self._load()
        schema = schema_of(layout)
        replaced = written = 0
        ours = [file for file in self._files() if is_file_of(file.name, self._topic, brokers)]
        for group in small_files(ours):
            name = merge_files(self._storage, self._topic, group, schema, self._options)
            if name is None:
                continue
            still_ours()
            try:
                self._replace(group, name)
            except TableBusy:
                # Another writer was faster. The next round finds the merged file and tries again.
                self._load()
                continue
            replaced += len(group)
            written += 1
            self._load()
        still_ours()
        self._expire()
        self._new_files = 0
        return Compacted(replaced, written)

    # ------------------------------------------------------------------ what the kinds provide

    @abstractmethod
    def _load(self) -> None:
        """Read the current state of the table, which may be missing."""

    @abstractmethod
    def _committed(self) -> int:
        """Return the number of the last commit of this export; 0: none."""

    @abstractmethod
    def _check_layout(self, layout: Layout) -> None:
        """Check that files of this layout can be added; the table may be missing. Raises TableError."""

    @abstractmethod
    def _append(self, number: int, names: Sequence[str], layout: Layout) -> None:
        """Add files and store the number in one transaction, based on the loaded state. Raises TableBusy."""

    @abstractmethod
    def _files(self) -> list[TableFile]:
        """Return the files of the table that may be merged, of all topics in the export folder."""

    @abstractmethod
    def _replace(self, old: Sequence[TableFile], new: str) -> None:
        """Replace files by one with the same rows in one transaction, based on the loaded state. Raises TableBusy."""

    @abstractmethod
    def _expire(self) -> None:
        """Remove files that only expired versions of the table need."""
