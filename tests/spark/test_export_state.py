"""Tests for the state of an export: kills between any two of their steps."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spark.kills import Killed, KillingStorage
from spark.table_support import COUNT, DELTA, duckdb_counts, files_of, write_range
from trio_nsq.log.gaps import Span
from trio_nsq.spark.export.layout import BodyFormat, JsonColumn, Layout, LayoutError, range_name, safe_name
from trio_nsq.spark.export.manifest import ManifestError, RangeResult, result_path
from trio_nsq.spark.export.state import ExportState
from trio_nsq.spark.schemas.column_types import JsonType
from trio_nsq.spark.tables.merging import MergeCounts
from trio_nsq.spark.tables.table import Compacted
from trio_nsq.spark.tables.target import TableOptions
from trio_nsq.storage import ChangedMeanwhile, Lease, LeaseLost, LocalStorage, StorageError


class ListTable:
    """A table that takes each commit once, and checks that their numbers are consecutive."""

    def __init__(self) -> None:
        self.storage: KillingStorage | None = None
        self.commits: list[tuple[str, ...]] = []
        self.layouts: list[Layout] = []

    def commit(self, number: int, results: Sequence[RangeResult], layout: Layout) -> Layout:
        for result in results:
            layout = layout.with_fields(result.new_fields)
        files = tuple(name for result in results for name in result.files)
        assert self.storage is not None
        with self.storage.step():
            if number == len(self.commits):
                assert self.commits[-1] == files
            else:
                assert number == len(self.commits) + 1
                self.commits.append(files)
                self.layouts.append(layout)
        return layout

    def take_counts(self) -> MergeCounts:
        return MergeCounts()

    def reserve(self, layout: Layout) -> Layout:
        return layout

    def compact(self, layout: Layout, brokers: Collection[str], still_ours: Callable[[], None]) -> Compacted:
        return Compacted()


class IgnoringCase(LocalStorage):
    """A folder of a file system that ignores the case of names, as SMB's."""

    def size(self, name: str) -> int | None:
        there = {each.casefold(): each for each in self.names(name.rpartition("/")[0])}
        found = there.get(name.casefold())
        return super().size(found) if found is not None else None


@pytest.mark.parametrize(("kind", "is_refused"), [(JsonType.STRING, True), (JsonType.LONG, False)])
def test_partitions_of_text_need_a_folder_that_distinguishes_case(
    tmp_path: Path, kind: JsonType, is_refused: bool
) -> None:
    layout = Layout(
        body=BodyFormat.JSON, json_columns=(JsonColumn("country", kind, "country"),), levels=("country",)
    )
    for storage_type in IgnoringCase, LocalStorage:
        storage = storage_type(tmp_path / storage_type.__name__)
        with storage.hold("lock", StorageError) as lease:
            state = ExportState("t", storage, lease)
            if is_refused and storage_type is IgnoringCase:
                with pytest.raises(LayoutError, match=r"ignores the case of names.*of country"):
                    state.start(layout, ["b:1"])
            else:
                state.start(layout, ["b:1"])
        assert [path.name for path in storage.folder.rglob("*") if path.is_file()] == ["lock"]


def save_result(storage: LocalStorage, span: Span, **more: object) -> RangeResult:
    result = RangeResult("b:1", *span, span.length, files=[f"{span.first}.parquet"], **more)  # type: ignore[arg-type]
    assert storage.put_new(result_path("t", "b:1", span), result.to_bytes())
    return result


@pytest.mark.parametrize("before", [True, False])
def test_table_gets_each_file_once_over_kills(tmp_path: Path, before: bool) -> None:
    """Two rounds, killed at each step of the first; the tasks of the second saved results before the next start."""
    for kill_at in range(1, 100):
        table = ListTable()
        plain = LocalStorage(tmp_path / str(kill_at))
        killed = False
        try:
            table.storage = KillingStorage(plain.folder, kill_at, before=before)
            with table.storage.hold("lock", StorageError) as lease:
                state = ExportState("t", table.storage, lease)
                state.table = table
                state.start(Layout(), ["b:1"]).plan("b:1", Span(0, 40), 10)
                state.save()
                for first in (0, 10):
                    save_result(plain, Span(first, first + 10))
                state.reconcile()
                state.commit()
        except Killed:
            killed = True
        table.storage = KillingStorage(plain.folder, 0, before=before)
        with table.storage.hold("lock", StorageError) as lease:
            state = ExportState("t", table.storage, lease)
            state.table = table
            if state.manifest is None:
                state.start(Layout(), ["b:1"])
            assert state.manifest is not None
            state.manifest.plan("b:1", Span(0, 40), 10)
            state.save()
            for first in (0, 10, 20, 30):
                if Span(first, first + 10) in state.ranges_of("b:1").pending and not plain.read(
                    result_path("t", "b:1", Span(first, first + 10))
                ):
                    save_result(plain, Span(first, first + 10))
            state.reconcile()
            state.commit()
            assert state.reconcile() == []
            assert state.ranges_of("b:1").done == {Span(0, 40): 40}
            assert state.ranges_of("b:1").pending == {}
        assert sorted(name for names in table.commits for name in names) == [
            "0.parquet",
            "10.parquet",
            "20.parquet",
            "30.parquet",
        ]
        assert plain.names("_nsq/t/done") == []
        if not killed:
            assert kill_at > 6
            return
    raise AssertionError("the first run was killed each time")


def test_results_of_two_runs_count_once(tmp_path: Path) -> None:
    """A result whose file was not removed any more, and one of a task that was considered dead."""
    storage = LocalStorage(tmp_path)
    with storage.hold("lock", StorageError) as lease:
        state = ExportState("t", storage, lease)
        state.start(Layout(), ["b:1"]).plan("b:1", Span(0, 20), 10)
        state.save()
        known = save_result(storage, Span(0, 10))
        assert state.reconcile([known]) == [known]
        save_result(storage, Span(0, 10))
        other = save_result(storage, Span(10, 20))
        assert state.reconcile() == [other]
        assert state.ranges_of("b:1").done == {Span(0, 20): 20}


def test_a_file_that_comes_after_the_conversion_is_converted(tmp_path: Path) -> None:
    """Its task was considered dead, and has an older layout; so has a task that finds its result."""
    layout = Layout(body=BodyFormat.JSON, json_columns=(JsonColumn("a", JsonType.LONG, "a"),), keep_rest=True)
    storage = LocalStorage(tmp_path)
    with storage.hold("lock", StorageError) as lease:
        state = ExportState("t", storage, lease, evolves=True)
        spans = state.start(layout, ["b:1"]).plan("b:1", Span(0, 20), 10)
        state.save()
        files = [f"{range_name('t', 'b:1', span)}.parquet" for span in spans]
        rest = ['{"b":"x"}']
        for number, (span, file) in enumerate(zip(spans, files, strict=True)):
            pq.write_table(pa.table({"a": [1], "rest": rest}), tmp_path / file)
            result = RangeResult(
                "b:1", *span, 10, files=[file], new_fields={"b": "string"} if not number else {}
            )
            assert storage.put_new(result_path("t", "b:1", span), result.to_bytes())
            state.reconcile()
    assert [pq.read_table(tmp_path / file).to_pylist() for file in files] == [
        [{"a": 1, "b": "x", "rest": None}]
    ] * 2


def test_new_fields_become_columns_of_a_table(tmp_path: Path) -> None:
    layout = Layout(body=BodyFormat.JSON, json_columns=(JsonColumn("a", JsonType.LONG, "a"),), keep_rest=True)
    table = ListTable()
    table.storage = storage = KillingStorage(tmp_path, 0, before=False)
    with storage.hold("lock", StorageError) as lease:
        state = ExportState("t", storage, lease)
        state.table = table
        state.start(layout, ["b:1"]).plan("b:1", Span(0, 20), 10)
        state.save()
        save_result(storage, Span(0, 10), new_fields={"b": "string"})
        state.reconcile()
        state.commit()
        assert state.manifest is not None
        assert [column.name for column in state.manifest.layout.json_columns] == ["a", "b"]
        state.manifest.plan("b:1", Span(0, 30), 10)
        assert state.ranges_of("b:1").pending == {Span(10, 20): 0, Span(20, 30): 1}
    assert table.layouts == [state.manifest.layout]


def test_file_of_an_unfinished_range_comes_to_a_table_with_its_result(tmp_path: Path) -> None:
    """A task was killed between its file and its result, when the export had no table."""
    storage = LocalStorage(tmp_path)
    with storage.hold("lock", StorageError) as lease:
        state = ExportState("t", storage, lease)
        state.start(Layout(), ["b"]).plan("b", Span(0, 2 * COUNT), COUNT)
        state.save()
        done, late = (write_range(tmp_path, number, Layout()) for number in range(2))
        for result, names in ((done, done.files), (late, done.files + late.files)):
            storage.put_new(result_path("t", "b", result.span), result.to_bytes())
            state.reconcile()
            state.attach_table(DELTA, TableOptions())
            state.commit()
            assert files_of(DELTA, tmp_path) == [str(tmp_path / name) for name in names]
        assert duckdb_counts(DELTA, tmp_path)[:2] == (2 * COUNT, 2 * COUNT)


def test_fenced_export_changes_nothing(tmp_path: Path) -> None:
    """Another process took the lease over, or has changed the manifest."""

    class TakenOver(Lease):
        lost = False

        def check(self) -> None:
            if self.lost:
                raise LeaseLost("another process exports")

    storage, lease = LocalStorage(tmp_path), TakenOver()
    state = ExportState("t", storage, lease)
    state.start(Layout(), ["b:1"]).plan("b:1", Span(0, 20), 10)
    state.save()
    before = storage.read("_nsq/t/manifest.json")
    save_result(storage, Span(0, 10))
    lease.lost = True
    with pytest.raises(LeaseLost):
        state.reconcile()
    lease.lost = False
    assert storage.read("_nsq/t/manifest.json") == before
    assert len(storage.names("_nsq/t/done")) == 1
    storage.put("_nsq/t/manifest.json", b"other")
    with pytest.raises(ChangedMeanwhile):
        state.reconcile()
    assert len(storage.names("_nsq/t/done")) == 1


NAMES = st.text("ab-_.:", min_size=1, max_size=4)


@given(one=st.tuples(NAMES, NAMES), other=st.tuples(NAMES, NAMES))
@example(one=("a-b", "c"), other=("a", "b-c"))
@example(one=("-", "a"), other=("-a", "-"))
def test_no_two_topics_of_a_place_have_files_of_one_name(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    with TemporaryDirectory() as folder:
        storage = LocalStorage(Path(folder))
        with storage.hold("lock", StorageError) as lease:
            state = ExportState(one[0], storage, lease)
            state.start(Layout(), [one[1]]).plan(one[1], Span(0, 10), 10)
            state.check_names([one[1]])
            state.save()
            same_names = range_name(*one, Span(0, 10)) == range_name(*other, Span(0, 10))
            refused = ""
            try:
                state = ExportState(other[0], storage, lease)
                state.check_names([other[1]])
            except ManifestError as exc:
                refused = str(exc)
            assert not refused or "the same names" in refused
            if one[0] != other[0]:
                assert refused or not same_names
                # The state of an export is in a folder with the name of the topic.
                assert not refused or same_names or safe_name(one[0]) == safe_name(other[0])


def test_commits_to_a_table_with_a_key_have_about_a_million_messages(tmp_path: Path) -> None:
    """The oldest come first; a round that was killed in between goes on."""
    table, plain = ListTable(), LocalStorage(tmp_path)
    table.storage = KillingStorage(tmp_path, 0, before=True)
    layout = Layout(body=BodyFormat.JSON, json_columns=(JsonColumn("k", JsonType.LONG, "k"),), key=("k",))
    with plain.hold("lock", StorageError) as lease:
        state = ExportState("t", plain, lease)
        state.table = table
        state.start(layout, ["b:1"]).plan("b:1", Span(0, 1_500_000), 300_000)
        state.save()
        results = [save_result(plain, Span(first, first + 300_000)) for first in range(0, 1_500_000, 300_000)]
        assert len(state.reconcile(results)) == 4
        assert state.has_more
        again = ExportState("t", plain, lease)
        again.table = table
        found = again.reconcile(results)
        again.commit()
        assert (len(found), again.has_more, again.reconcile(results)) == (1, False, [])
    firsts = [f"{first}.parquet" for first in range(0, 1_500_000, 300_000)]
    assert table.commits == [tuple(firsts[:4]), tuple(firsts[4:])]
