"""The interface of tables, and what both kinds have in common: numbered commits, and the compaction of small files."""

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...event_loop.retries import Delays
from ...storage import Storage, StorageError
from ...text.wording import count_of
from ..export.columns import file_schema
from ..export.layout import HEADERS, HEADERS_TYPE, Layout, is_file_of
from ..export.manifest import RangeResult
from .columns import TableColumn, TableColumns
from .compaction import AT_ONCE, TableFile, merge_files, small_files
from .merging import MergeCounts, Merger
from .target import TableBusy, TableError, TableOptions

_ATTEMPTS = 20
"""How often a commit is repeated that other writers of the table preceded."""
_PAUSE_S, _MAX_PAUSE_S = 0.07, 3.0
"""Before jitter, for the first repetition and the later ones."""


@dataclass(frozen=True, slots=True)
class Compacted:
    """The result of a compaction: the numbers of files that were replaced, and of those that replaced them."""

    replaced: int = 0
    written: int = 0


KEY = "qcli.key"
"""The property of a table with its key, see `key_of`."""


def key_of(layout: Layout) -> str:
    """Return the columns of the key of a layout, as tables have them; empty: it has no key."""
    return ",".join(layout.key_columns)


class Table(ABC):
    """A table, as one export uses it. Created by `open_table`.

    Args:
        storage: The export folder.
        topic: The topic of the export.
    """

    shown: str
    """The table, for messages."""
    _place: str
    """What to choose if the table does not fit, for messages: another folder, or another table."""

    def __init__(self, storage: Storage, topic: str, options: TableOptions) -> None:
        self._storage = storage
        self._topic = topic
        self._options = options
        self._merged = MergeCounts()
        self._merger = Merger(storage, topic, options)
        self._new_files: int | None = None  # since the last compaction; None: there was none

    # ------------------------------------------------------------------ commits

    def check(self, number: int, *, unfinished: bool, layout: Layout, is_new: bool = False) -> Layout:
        """Check at the start of an export that the table can take its files.

        Args:
            number: The number of the last commit in the manifest; 0: none.
            unfinished: Whether that commit may be missing in the table.
            layout: The layout of the next files.
            is_new: Whether no file has this layout yet. Then inferred columns may get other names.

        Returns:
            The layout, with names that the table can have.

        Raises:
            TableError: The table has other columns or partitions, or other commits of this export than the manifest.
            TableUnavailable: The table cannot be reached.
        """
        self._load()
        at = self._committed()
        if at < number - unfinished:
            raise self._lost(number)
        self._check_kept(at)
        if at > number:
            raise TableError(
                f"{self.shown} has commit {at} of the export in {self._storage.shown}, whose manifest knows only "
                f"{number}: the manifest is an old copy. Restore it, or export to another folder"
            )
        if is_new:
            layout = self._fitting(layout)
        self._check_layout(layout)
        return layout

    def reserve(self, layout: Layout) -> Layout:
        """Give the table the columns of a layout that no file has yet: no other writer can give them other types then.

        A missing Delta table gets them with the first files.

        Returns:
            The layout, see `check`.

        Raises:
            TableError, TableBusy, TableUnavailable: See `commit`.
        """
        fitting = layout

        def reserve() -> None:
            nonlocal fitting
            fitting = self._fitting(layout)
            self._check_layout(fitting)
            self._reserve(fitting)

        self._repeat(reserve)
        return fitting

    def _fitting(self, layout: Layout) -> Layout:
        """Return a layout, which no file has yet, with columns that fit the table. It may have no place for headers."""
        names = self._names()
        if self._is_there and layout.headers:
            is_free = names.fits(HEADERS, HEADERS_TYPE) and (self._takes_columns or HEADERS in names)
            layout = replace(layout, headers=is_free)
        return layout.renamed(names.fits)

    def _check_layout(self, layout: Layout) -> None:
        """Check that files of this layout can be added; the table may be missing. Raises TableError."""
        if self._is_there:
            self._check_key(layout)
            self._check_partitions(layout)
            self._names().check(self._schema(layout), self.shown, self._place)

    def _check_key(self, layout: Layout) -> None:
        """Check that the table has the key of the layout, or none yet. Raises TableError."""
        there, wanted = self._key(), key_of(layout)
        if there not in (None, wanted):
            raise TableError(
                f"{self.shown} has the key {there}, and the export {wanted or 'none'}: give --key {there}, or choose "
                f"another {self._place}"
            )

    def _names(self) -> TableColumns:
        columns = self._columns() if self._is_there else ()
        return TableColumns(columns, self._type_name, self._widens, evolves=self._options.evolves)

    def _check_kept(self, number: int) -> None:
        """Check that the table was not restored to a version before this commit, its last one. Raises TableError."""
        if number and not self._is_kept(number):
            raise self._lost(number)

    def _lost(self, number: int) -> TableError:
        return TableError(
            f"{self.shown} has no commit {number} of the export in {self._storage.shown}: the table was dropped, "
            "recreated or restored to an older version. Restore it, or export to another folder"
        )

    def commit(self, number: int, results: Sequence[RangeResult], layout: Layout) -> Layout:
        """Add the files of exported ranges to the table, once: a repeated call with the same number does nothing.

        The table is created if it is missing. It gets the columns of the layout that it lacks, and those of new fields
        of the results, before any file has them, see `reserve`.

        Args:
            number: One more than that of the previous commit of this export.
            layout: The newest layout; it has all columns of the files.

        Returns:
            The layout of the next files: with the columns of the new fields, if the table can have more columns.

        Raises:
            TableError: The table cannot take the files.
            TableBusy: Other writers changed the table each time.
            TableUnavailable: The table cannot be reached; repeat the call with the same arguments.
        """
        names = [name for result in results for name in result.files]
        added: Sequence[str] = names
        counts = MergeCounts()
        fields: dict[str, str] = {}
        for result in results:
            fields = result.new_fields | fields
        extended = layout

        def append() -> None:
            nonlocal extended, added, counts
            at = self._committed()
            extended = layout.with_fields(fields, self._names().fits) if self._takes_columns else layout
            if at == number:
                return
            if at != number - 1:
                raise TableError(
                    f"commit {number} of the export in {self._storage.shown} does not follow commit {at}, the last one "
                    f"in {self.shown}"
                )
            self._check_kept(at)
            self._check_layout(extended)
            if not layout.key:
                self._append(number, names, extended)
                return
            now_ms = time.time_ns() // 10**6
            try:
                merge = self._merger.merge(number, names, extended, self._files_to_merge, now_ms)
            except (StorageError, OSError):
                self._load()
                if self._committed() == number:
                    return  # another process has made this commit meanwhile, and removed the files
                raise
            self._append(number, merge.added, extended, merge.replaced)
            added, counts = merge.added, merge.counts

        self._repeat(append)
        self._merged += counts
        if layout.key:
            self._merger.finish(number, names)
        if self._new_files is not None:
            self._new_files += len(added)
        return extended

    def take_counts(self) -> MergeCounts:
        """Return what the commits since the last call have changed in a table with a key."""
        counts, self._merged = self._merged, MergeCounts()
        return counts

    def _files_to_merge(self) -> list[TableFile]:
        """Return the files of the table. Raises TableError: the rows of a file cannot be written again."""
        files, others = self._files()
        if others:
            raise TableError(
                f"{self.shown} has {count_of(others, 'file')} that --key cannot change: outside of "
                f"{self._storage.shown}, of earlier partitions of the table, or with rows that another program has "
                "deleted without rewriting the file. Rewrite them with that program"
            )
        return files

    def _repeat(self, change: Callable[[], None]) -> None:
        """Call a function with the current state of the table, until no other writer precedes it."""
        pauses = Delays(_PAUSE_S, _MAX_PAUSE_S, random.random)
        for attempt in range(_ATTEMPTS):
            self._load()
            try:
                change()
                return
            except TableBusy:
                if attempt == _ATTEMPTS - 1:
                    raise
            time.sleep(pauses.next_s())

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
        schema = file_schema(layout)
        replaced = written = 0
        ours = [file for file in self._files()[0] if is_file_of(file.name, self._topic, brokers)]
        for group in small_files(ours):
            name = merge_files(self._storage, self._topic, group, schema, self._options)
            if name is None:
                continue
            still_ours()
            try:
                self._replace(group, name, layout)
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
    def _is_kept(self, number: int) -> bool:
        """Whether the current version comes after this commit; also if that is unknown because versions expired."""

    @property
    @abstractmethod
    def _is_there(self) -> bool:
        """Whether the table exists."""

    @property
    def _takes_columns(self) -> bool:
        """Whether columns can be added."""
        return True

    @abstractmethod
    def _columns(self) -> Sequence[TableColumn]:
        """Return the columns of the table."""

    @abstractmethod
    def _schema(self, layout: Layout) -> Any:
        """Return the Arrow schema of the columns that a table of this layout needs."""

    @abstractmethod
    def _type_name(self, field: Any) -> str:
        """Return the type of a column of files, as in `TableColumn`. Raises TableError: tables do not have it."""

    def _widens(self, one: str, other: str) -> bool:
        """Whether a column of the table can change from one type to another one."""
        return False

    @abstractmethod
    def _check_partitions(self, layout: Layout) -> None:
        """Check that each file is in one partition. Raises TableError."""

    @abstractmethod
    def _reserve(self, layout: Layout) -> None:
        """Add the columns that are missing, based on the loaded state. Raises TableBusy."""

    @abstractmethod
    def _key(self) -> str | None:
        """Return the key that the table was given, see `key_of`; None: it was not said."""

    @abstractmethod
    def _append(
        self, number: int, names: Sequence[str], layout: Layout, replaced: Sequence[TableFile] = ()
    ) -> None:
        """Add files, remove others, and store the number in one transaction, based on the loaded state.

        Raises TableBusy.
        """

    @abstractmethod
    def _files(self) -> tuple[list[TableFile], int]:
        """Return the files that may be written again, of all topics in the export folder, and the number of others.

        The table may be missing.
        """

    @abstractmethod
    def _replace(self, old: Sequence[TableFile], new: str, layout: Layout) -> None:
        """Replace files by one with the same rows in one transaction, based on the loaded state. Raises TableBusy."""

    @abstractmethod
    def _expire(self) -> None:
        """Remove files that only expired versions of the table need."""
