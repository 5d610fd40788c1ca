"""The state of an export: its manifest, the results of its tasks, and the commits to its table.

Everything that is planned or done is in the manifest, or in the results that tasks have saved.
`ExportState.reconcile` brings the results into the manifest, and `ExportState.commit` adds their files to the table, if
there is one. They may be killed at any step: the next call continues there. So each range is planned once, and its
files are in the table once.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from ...storage import Lease, Storage, not_shared
from ..bodies.schema import BodySchema
from ..ranges import BrokerRanges
from ..schemas.column_types import ColumnType, JsonType
from ..schemas.promotions import Promotion, can_widen
from ..tables.merging import MergeCounts
from ..tables.opening import open_table
from ..tables.table import Compacted
from ..tables.target import TableOptions, TableTarget
from .json_columns import common_json_type
from .layout import Layout, LayoutError, files_prefix, is_file_of, safe_name, span_of_file
from .levels import Transform
from .manifest import Manifest, ManifestError, RangeResult, manifest_path, result_path, results_folder
from .widening import columns_too_long, convert_file, exported_files

COMMIT_MESSAGES = 1_000_000
"""About so many messages are in one commit to a table with a key: it needs memory for each key."""
_READERS = 16
"""How many results are read at the same time: requests to object stores are slow."""


class CommittedTable(Protocol):
    """A table of the files, see `Table`."""

    def take_counts(self) -> MergeCounts: ...

    def commit(self, number: int, results: Sequence[RangeResult], layout: Layout) -> Layout: ...

    def reserve(self, layout: Layout) -> Layout: ...

    def compact(
        self, layout: Layout, brokers: Collection[str], still_ours: Callable[[], None]
    ) -> Compacted: ...


class ExportState:
    """The state of the export of one topic to one place.

    Args:
        lease: Of the export; nothing is written after it was lost.
        evolves: Whether new fields become columns of all files, if there is no table; those of a table always get them.

    Attributes:
        manifest: None until `start`, if there was none.
        table: The table to commit files to; None: the files are all there is.
        new_columns: The fields that got columns so far, with their types.
        widened: The fields whose columns got the wider types of a schema so far.
        merged: What the commits so far have changed in a table with a key.
        has_more: Whether the last call of `reconcile` has left results to the next one.

    Raises:
        ManifestError: The manifest cannot be used.
        StorageError, OSError: The place cannot be used.
    """

    def __init__(self, topic: str, storage: Storage, lease: Lease, *, evolves: bool = False) -> None:
        self.table: CommittedTable | None = None
        self.new_columns: dict[str, str] = {}
        self.widened: list[str] = []
        self.merged = MergeCounts()
        self.has_more: bool = False
        self._evolves = evolves
        self._topic = topic
        self._storage = storage
        self._lease = lease
        self._path = manifest_path(topic)
        self._version: str | None = None  # of the manifest's file
        self._saved = b""
        self._distinct: set[str] = set()  # the labels whose files have names that no other topic's have
        self.manifest = self._read()

    @property
    def brokers(self) -> Mapping[str, BrokerRanges]:
        """The ranges of each broker; empty if there is no manifest yet."""
        return self.manifest.brokers if self.manifest is not None else {}

    def ranges_of(self, label: str) -> BrokerRanges:
        """Return the ranges of a broker; empty for a new one."""
        return self.brokers.get(label) or BrokerRanges()

    def _read(self) -> Manifest | None:
        found = self._storage.read(self._path)
        if found is None:
            return None
        self._version = found.version
        manifest = self._parse(self._path, found.data)
        if manifest.topic != self._topic:
            raise ManifestError(
                f"the folder {self._storage.shown} has topic {manifest.topic}, and the files of {self._topic} would "
                "have the same names: choose another folder"
            )
        return manifest

    def _parse(self, path: str, data: bytes) -> Manifest:
        try:
            return Manifest.from_bytes(data)
        except ManifestError as exc:
            raise ManifestError(
                f"the manifest {path} in {self._storage.shown} cannot be used: {exc}"
            ) from exc

    def save(self) -> None:
        """Write the manifest, if it has changed.

        Raises:
            ChangedMeanwhile, LeaseLost: Another process exports to the place.
            StorageError, OSError: The manifest cannot be written.
        """
        assert self.manifest is not None
        data = self.manifest.to_bytes()
        if data != self._saved:
            self._lease.check()
            self._version = self._storage.replace(self._path, data, self._version)
            self._saved = data

    def start(self, layout: Layout, labels: Collection[str]) -> Manifest:
        """Create the manifest; `save` writes it.

        Args:
            labels: The brokers of the export, by label.

        Raises:
            ManifestError: The place has files of this topic and these brokers, whose manifest is missing.
            LayoutError: The place does not distinguish the case of names, as the folders of partitions need.
            StorageError, OSError: The place cannot be listed.
        """
        self._check_case(layout)
        found = self._storage.files()
        for file in found if isinstance(found, list) else []:
            if is_file_of(file.name, self._topic, labels):
                raise ManifestError(
                    f"the folder {self._storage.shown} has files of topic {self._topic}, such as {file.name}, and no "
                    f"manifest {self._path}, which says what is in them: messages would be exported twice. Restore "
                    "it, or choose another folder"
                )
        self.manifest = Manifest(self._topic, [layout])
        return self.manifest

    def _check_case(self, layout: Layout) -> None:
        """Check that the values `DE` and `de` have different folders. Raises LayoutError."""
        with_text = (Transform.IDENTITY, Transform.TRUNCATE)
        fields = [level.field for level in layout.field_levels if level.transform in with_text]
        texts = [field for field in fields if layout.column_of(field).type is JsonType.STRING]
        if not texts:
            return
        folder = self._path.rpartition("/")[0]
        probe, other = f"{folder}/case-a", f"{folder}/case-A"
        self._storage.put_new(probe, b"")
        try:
            if self._storage.size(other) is None:
                return
        finally:
            self._storage.remove([probe])
        raise LayoutError(
            f"the folder {self._storage.shown} ignores the case of names, so the partitions DE and de of "
            f"{texts[0]} would have the same files: choose another folder, or partition by date or hour"
        )

    def check_names(self, labels: Iterable[str]) -> None:
        """Check that no other topic of the place has files with the names of these brokers' files.

        Topics and brokers may have hyphens, and a hyphen separates them in the names: those of topic `a-b` from
        broker `c` are those of topic `a` from broker `b-c`.

        Raises:
            ManifestError: Another topic has such files, or a manifest that cannot be used.
            StorageError, OSError: A manifest cannot be read.
        """
        for label in set(labels) - self._distinct:
            names = files_prefix(self._topic, label)
            topics = {names[: hyphen.start()] for hyphen in re.finditer("(?<=.)-(?=.)", names)}
            for topic in topics - {safe_name(self._topic)}:
                path = manifest_path(topic)
                if (found := self._storage.read(path)) is None:
                    continue
                other = self._parse(path, found.data)
                if same := [each for each in other.brokers if files_prefix(other.topic, each) == names]:
                    raise ManifestError(
                        f"the folder {self._storage.shown} has topic {other.topic} from broker {same[0]}, and the "
                        f"files of {self._topic} from {label} would have the same names: choose another folder"
                    )
            self._distinct.add(label)

    def attach_table(self, target: TableTarget | None, options: TableOptions) -> None:
        """Commit the files to a table from now on, at first those that are there; None: there is no table.

        Raises:
            ManifestError: The files are in another table, or in one although there should be none.
            TableError: The table does not fit the manifest or its layout, or cannot be used.
            NSQError, OSError: As `save`.
        """
        manifest = self.manifest
        assert manifest is not None
        wanted = "" if target is None else str(target)
        if manifest.table not in ("", wanted):
            raise ManifestError(
                f"the files in {self._storage.shown} are in a table: give {manifest.table}, or choose another folder"
            )
        if target is None:
            return
        self._convert()  # no table could follow
        manifest.layouts = [layout.fixed() for layout in manifest.layouts]
        files = [] if manifest.table else [name for name in self._files() if self._is_done(name)]
        if files:
            manifest.commit, manifest.uncommitted = 1, [RangeResult("", 0, 0, files=files)]
        manifest.table = wanted
        table = open_table(target, self._storage, self._topic, manifest.id, options)
        unfinished, is_new = (
            bool(manifest.uncommitted),
            not any(each.planned for each in self.brokers.values()),
        )
        manifest.layouts[-1] = table.check(
            manifest.commit, unfinished=unfinished, layout=manifest.layout, is_new=is_new
        )
        if is_new:
            self.save()  # a run after a kill infers the same columns
            manifest.layouts[-1] = table.reserve(manifest.layout)
        self.table = table

    def _is_done(self, name: str) -> bool:
        """Whether a file is of a range that is done in the manifest; of a pending one there will be a result."""
        for label, ranges in self.brokers.items():
            if (span := span_of_file(name, self._topic, label)) is not None:
                return any(done.common(span) == span.length for done in ranges.done)
        return False

    def reconcile(self, known: Sequence[RangeResult] = ()) -> list[RangeResult]:
        """Bring the results of tasks into the manifest, also of a killed run. `commit` adds their files to the table.

        With a key, these are results of about `COMMIT_MESSAGES`: call it again after `commit` if it `has_more`.

        Args:
            known: Results that need not be read, because their tasks have returned them; also of earlier calls.

        Returns:
            The results that are new in the manifest.

        Raises:
            StorageError: A known result is not in the place: nothing is marked as done.
            NSQError, OSError: As `save`, or as `commit` for files of an earlier call. The next call continues.
        """
        manifest = self.manifest
        if manifest is None:
            return []
        self.commit()  # of a killed run: its number and its files must not change
        self._convert()
        names = self._storage.names(results_folder(self._topic))
        by_name = {
            result_path(self._topic, each.broker, each.span): each
            for each in known
            if manifest.is_pending(each)
        }
        self._check_there(by_name.keys() - set(names))
        results = self._results(names, by_name)
        self.has_more = False
        if manifest.layout.key and self.table is not None:
            results, left = _of_one_commit(results)
            self.has_more = bool(left)
            left_names = {result_path(self._topic, each.broker, each.span) for each in left}
            names = [name for name in names if name not in left_names]
        new = manifest.mark_done(results)
        if self.table is None and any(each.files and each.layout < len(manifest.layouts) - 1 for each in new):
            manifest.widening = True  # of a task that was considered dead, and has ended after the conversion
        if self._evolves and self.table is None:
            self._change_files(manifest.layout.with_fields(_new_fields(new), widens=True))
        if self.table is not None and (committed := [result for result in new if result.files]):
            manifest.commit += 1
            manifest.uncommitted = committed
        self.save()
        self._storage.remove(names)
        if manifest.layout.key:
            # Of a task that was considered dead, and has ended after the commit of its range.
            late = [each for each in results if each not in new]
            self._storage.remove([name for result in late for name in result.files])
        self._convert()
        return new

    def _change_files(self, layout: Layout) -> None:
        """Have the next call of `_convert` give all files this layout; the caller saves the manifest."""
        manifest = self.manifest
        assert manifest is not None
        if layout != manifest.layout:
            self._note_new(layout)
            manifest.widen(layout)

    def _note_new(self, layout: Layout) -> None:
        """Note the columns that a layout has, and the last one of the manifest has not."""
        manifest = self.manifest
        assert manifest is not None
        there = {column.field for column in manifest.layout.json_columns}
        self.new_columns |= {
            each.field: each.type.value for each in layout.json_columns if each.field not in there
        }

    def extend_schema(self, fields: Iterable[tuple[str, ColumnType]], promotion: Promotion | None) -> None:
        """Give the place the columns of a schema that it lacks, and the wider types of a schema.

        Raises:
            LayoutError: A column cannot have its type.
            NSQError, OSError: As `save` and `commit`, or a file cannot be converted. The next call of `reconcile`
                continues.
        """
        manifest = self.manifest
        assert manifest is not None
        layout = manifest.layout
        types = {column.field: column.type for column in layout.json_columns}
        wider = {
            field: kind.value
            for field, kind in fields
            if field in types.keys() - layout.fixed_fields
            and promotion is not None
            and can_widen(types[field], kind, promotion)
        }
        new = {field: kind.value for field, kind in fields if field not in types}
        if self.table is None:
            if wider:
                self.widened += self.widen_schema(wider)
            self._change_files(manifest.layout.with_fields(new, at_most=None))
            self.save()
            self._convert()
        elif new or wider:
            self._change_table(layout.widened(wider).with_fields(new, at_most=None))
            self.widened += sorted(wider)

    def _change_table(self, layout: Layout) -> None:
        """Give the table, and the next files, this layout."""
        manifest = self.manifest
        assert manifest is not None
        assert self.table is not None
        layout = self.table.reserve(layout)
        self._note_new(layout)
        manifest.widen(layout)
        manifest.widening = False  # a table takes files with narrower types
        self.save()

    def adopt_schema(self, schema: BodySchema, promotion: Promotion | None, *, with_fields: bool) -> None:
        """Decode the bodies of new ranges with a schema.

        Args:
            with_fields: Whether its new fields become columns, and wider types those of their columns.

        Raises:
            BodySchemaError: The schema cannot be used.
            LayoutError, NSQError, OSError: See `extend_schema`.
        """
        manifest = self.manifest
        assert manifest is not None
        if manifest.layout.body_schema != schema:
            if with_fields:
                self.extend_schema(schema.columns(), promotion)
            manifest.add_layout(replace(manifest.layout, body_schema=schema))

    def widen_schema(self, types: Mapping[str, str]) -> list[str]:
        """Give columns wider types in all files, unless a file has a value that would not fit.

        Args:
            types: The types by field, as in `RangeResult.widen`.

        Returns:
            The fields whose columns are wider now. The others keep their type from now on.

        Raises:
            NSQError, OSError: As `save`, or a file cannot be converted. The next call of `reconcile` continues.
        """
        manifest = self.manifest
        assert manifest is not None
        if self.table is not None:
            self._change_table(manifest.layout.widened(types))
            return sorted(types)
        columns = {each.name: each.field for each in manifest.layout.json_columns if each.field in types}
        doubles = [name for name, field in columns.items() if types[field] == JsonType.DOUBLE]
        too_long = columns_too_long(self._storage, self._files(), doubles)
        fixed = {columns[name] for name in too_long}
        wider = {field: kind for field, kind in types.items() if field not in fixed}
        manifest.widen(manifest.layout.keeping_types(fixed).widened(wider))
        self.save()
        self._convert()
        return sorted(set(columns.values()) - fixed)

    def _convert(self) -> None:
        """Convert the files that have an older layout than the last one, also after a killed run."""
        manifest = self.manifest
        if manifest is None or not manifest.widening:
            return
        names = self._files()
        folders = {name.rpartition("/")[0] for name in names} - {""}
        self._storage.remove_unfinished([f"{folder}/" for folder in folders])  # of a killed conversion
        for name in names:
            self._lease.check()
            convert_file(self._storage, name, manifest.layout)
        manifest.widening = False
        self.save()

    def _files(self) -> list[str]:
        return exported_files(self._storage, self._topic, self.brokers)

    def _check_there(self, names: Collection[str]) -> None:
        """Check that results are in the place: each is written after the files of its messages.

        A list may be older than a file of another machine, so each is asked for. Raises StorageError.
        """
        for name in sorted(names):
            if self._storage.file(name) is None:
                raise not_shared(self._storage.shown, f"a worker has written {name}, and it is not here")

    def _results(self, names: Sequence[str], known: Mapping[str, RangeResult]) -> list[RangeResult]:
        """Return the known results, and those of the other files."""
        others = [name for name in names if name.endswith(".json") and name not in known]
        with ThreadPoolExecutor(_READERS, "trio-nsq-results") as readers:
            found = list(readers.map(self._storage.read, others))
        return [*known.values(), *(RangeResult.from_bytes(each.data) for each in found if each is not None)]

    def commit(self) -> None:
        """Commit the results of the manifest to the table, unless it is known to have them.

        Raises:
            TableError: The table cannot be changed, or it is not known whether it was. The next call continues.
            NSQError, OSError: As `save`.
        """
        manifest = self.manifest
        if self.table is None or manifest is None or not manifest.uncommitted:
            return
        self.save()
        self._lease.check()
        layout = self.table.commit(manifest.commit, manifest.uncommitted, manifest.layout)
        self._note_new(layout)
        self.merged += self.table.take_counts()
        manifest.add_layout(layout)
        manifest.uncommitted = []
        self.save()

    def compact(self) -> Compacted:
        """Merge small files of the table, if there is one, where it is worth it. Raises the errors of `commit`."""
        if self.table is None or self.manifest is None:
            return Compacted()
        return self.table.compact(self.manifest.layout, self.brokers.keys(), self._lease.check)

    def remove_unfinished(self) -> None:
        """Remove the unfinished files of killed tasks, but not those of another topic's export."""
        ours = (files_prefix(self._topic, label) for label in self.brokers)
        merged = f"{safe_name(self._topic)}-merged-"
        folder = self._path.rpartition("/")[0]
        self._storage.remove_unfinished([f"{folder}/", f"{results_folder(self._topic)}/", merged, *ours])


def _of_one_commit(results: Sequence[RangeResult]) -> tuple[list[RangeResult], list[RangeResult]]:
    """Return the results for the next commit to a table with a key, oldest messages first, and the others."""
    results = sorted(results, key=lambda each: (each.first, each.broker))
    messages = count = 0
    while count < len(results) and messages < COMMIT_MESSAGES:
        messages += results[count].messages
        count += 1
    return results[:count], results[count:]


def _new_fields(results: Iterable[RangeResult]) -> dict[str, str]:
    """Return the fields without a column, with types that have the values of all results."""
    found: dict[str, str] = {}
    for result in results:
        for field, kind in result.new_fields.items():
            before = JsonType(found.get(field, kind))
            found[field] = common_json_type(before, JsonType(kind)).value
    return found
