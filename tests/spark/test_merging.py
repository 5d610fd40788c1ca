"""Tables with a key: the rows after any order of ranges, repeated commits and kills are those of a ledger."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.table import TableAlterer
from hypothesis import given, settings
from hypothesis import strategies as st

from soak import examples
from spark.kills import Killed
from spark.support import NOON_NS
from spark.table_support import DELTA, ICEBERG, catalog_environment, table_rows, use_catalog, write_changes
from trio_nsq.spark.export.layout import BodyFormat, JsonColumn, Layout, PartitionBy
from trio_nsq.spark.export.manifest import RangeResult
from trio_nsq.spark.schemas.column_types import JsonType
from trio_nsq.spark.tables.changes import key_names, keyed_rows
from trio_nsq.spark.tables.opening import open_table
from trio_nsq.spark.tables.table import Table
from trio_nsq.spark.tables.target import TableTarget
from trio_nsq.storage import LocalStorage, NewFile

DEADLINE_S = 60.0
BROKERS = ("a:4151", "b:4151")
KEYS: dict[JsonType, Sequence[Any]] = {
    JsonType.STRING: ["", "x", "X", "ü", "1"],
    JsonType.LONG: [0, 1, -1, 2**63 - 1, -(2**63)],
    JsonType.BOOLEAN: [False, True],
    JsonType.DATE: ["2026-11-21", "1970-01-01", "0001-01-01"],
}
"""The values of keys by the type of their column."""


@dataclass(frozen=True)
class Change:
    """A message: its key as indexes of `KEYS`, when it was published, and its value; None deletes the key."""

    key: tuple[int, int]
    time_ns: int
    value: int | None


@dataclass(frozen=True)
class Case:
    """Messages of two brokers, cut into ranges, which commits have in some order; and where a process is killed."""

    types: tuple[JsonType, JsonType]
    logs: tuple[Sequence[Change], Sequence[Change]]
    cuts: tuple[Sequence[int], Sequence[int]]
    order: Sequence[int]
    kills: Sequence[int]
    partition: PartitionBy


@st.composite
def cases(draw: st.DrawFn) -> Case:
    types = draw(st.tuples(st.sampled_from(list(KEYS)), st.sampled_from(list(KEYS))))
    logs, cuts = [], []
    for _ in BROKERS:
        count, at = draw(st.integers(1, 14)), NOON_NS
        log = []
        for _ in range(count):
            at += draw(st.sampled_from([1, 2, 1_000, 1800 * 10**9]))
            key = (draw(st.integers(0, len(KEYS[types[0]]) - 1)), draw(st.integers(0, 1)))
            log.append(Change(key, at, draw(st.none() | st.integers(0, 99))))
        logs.append(log)
        cuts.append(sorted(draw(st.sets(st.integers(1, count), max_size=3)) | {count}))
    ranges = sum(map(len, cuts))
    return Case(
        types,
        (logs[0], logs[1]),
        (cuts[0], cuts[1]),
        draw(st.permutations(range(ranges))),
        draw(st.lists(st.integers(1, 6), min_size=ranges, max_size=ranges)),
        draw(st.sampled_from(PartitionBy)),
    )


def layout_of(case: Case) -> Layout:
    columns = (
        JsonColumn("one", case.types[0], "one"),
        JsonColumn("other", case.types[1], "other"),
        JsonColumn("value", JsonType.LONG, "value"),
        JsonColumn("op", JsonType.STRING, "op"),
    )
    return Layout(case.partition, BodyFormat.JSON, columns, key=("one", "other"), operation="op")


def key_of(case: Case, change: Change) -> tuple[Any, ...]:
    return tuple(KEYS[kind][index] for kind, index in zip(case.types, change.key, strict=True))


def expected(case: Case) -> dict[tuple[Any, ...], int]:
    """Return the rows by key: the newest message of each, of the brokers in the order of time."""
    found: dict[tuple[Any, ...], int] = {}
    every = [(each.time_ns, number, each) for number, log in enumerate(case.logs) for each in log]
    for _, _, change in sorted(every, key=lambda each: each[:2]):
        key = key_of(case, change)
        found.pop(key, None)
        if change.value is not None:
            found[key] = change.value
    return found


def ranges_of(case: Case, folder: Path, layout: Layout) -> list[RangeResult]:
    results = []
    for broker, log, cuts in zip(BROKERS, case.logs, case.cuts, strict=True):
        first = 0
        for end in cuts:
            messages = [
                (
                    each.time_ns,
                    {
                        **dict(zip(("one", "other"), key_of(case, each), strict=True)),
                        "value": each.value,
                        "op": "d" if each.value is None else "u",
                    },
                )
                for each in log[first:end]
            ]
            results.append(write_changes(folder, layout, broker, first, messages))
            first = end
    return results


class KilledWriter(LocalStorage):
    """A folder in which the process is killed after a number of writes."""

    def __init__(self, folder: Path, writes: int) -> None:
        super().__init__(folder)
        self._left = writes

    @contextmanager
    def _step(self) -> Iterator[None]:
        yield
        self._left -= 1
        if self._left == 0:
            raise Killed

    def put(self, name: str, data: bytes) -> None:
        with self._step():
            super().put(name, data)

    def create(self, name: str) -> NewFile:
        with self._step():
            pass
        return super().create(name)

    def remove(self, names: Any) -> None:
        for name in names:
            with self._step():
                super().remove([name])


def commit_with_kills(case: Case, target: TableTarget, folder: Path) -> None:
    layout = layout_of(case)
    results = ranges_of(case, folder, layout)
    for number, (index, kill) in enumerate(zip(case.order, case.kills, strict=True), 1):
        killed = open_table(target, KilledWriter(folder, kill), "t", "e")
        try:
            killed.commit(number, [results[index]], layout)
        except Killed:
            open_table(target, LocalStorage(folder), "t", "e").commit(number, [results[index]], layout)


def rows_of(target: TableTarget, folder: Path) -> dict[tuple[Any, ...], int]:
    found = table_rows(target, folder).select(["one", "other", "value"]).to_pylist()
    rows = {tuple(map(plain, (each["one"], each["other"]))): each["value"] for each in found}
    assert len(rows) == len(found)
    return rows


def plain(value: object) -> object:
    return value.isoformat() if hasattr(value, "isoformat") else value


@settings(max_examples=examples(10))
@given(cases())
def test_rows_of_a_delta_table_are_those_of_the_ledger(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        commit_with_kills(case, DELTA, Path(folder))
        assert rows_of(DELTA, Path(folder)) == expected(case)


@settings(max_examples=4)
@given(cases())
def test_rows_of_an_iceberg_table_are_those_of_the_ledger(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in catalog_environment(Path(folder)).items():
            patch.setenv(name, value)
        commit_with_kills(case, ICEBERG, Path(folder) / "f")
        assert rows_of(ICEBERG, Path(folder) / "f") == expected(case)


@pytest.mark.parametrize("target", [DELTA, ICEBERG], ids=["delta", "iceberg"])
def test_commits_of_two_processes(
    target: TableTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes believe that they export to the folder; another export changes the table, too."""
    use_catalog(monkeypatch, tmp_path)
    folder, begin = tmp_path / "f", Barrier(3)
    layout = Layout(body=BodyFormat.JSON, json_columns=(JsonColumn("k", JsonType.LONG, "k"),), key=("k",))
    tables = [open_table(target, LocalStorage(folder), topic, topic) for topic in ("t", "t", "u")]

    def commit(table: Table, number: int, result: RangeResult) -> None:
        begin.wait(DEADLINE_S)
        table.commit(number, [result], layout)

    with ThreadPoolExecutor(3) as threads:
        for number in range(1, 5):
            times = NOON_NS + 10 * number
            ours = write_changes(
                folder, layout, "a", 3 * number, [(times + n, {"k": n % 2}) for n in range(3)]
            )
            others = write_changes(
                folder, layout, "a", 3 * number, [(times + 5 - n, {"k": n}) for n in range(3)], "u"
            )
            for done in [
                threads.submit(commit, table, number, result)
                for table, result in zip(tables, (ours, ours, others), strict=True)
            ]:
                done.result(DEADLINE_S)
            rows = table_rows(target, folder).select(["k", "topic", "seq"]).to_pylist()
            # Of key 0, the other topic has the message that was published last; of key 1 also, of key 2 the only one.
            assert sorted((row["k"], row["topic"], row["seq"] - 3 * number) for row in rows) == [
                (0, "u", 0),
                (1, "u", 1),
                (2, "u", 2),
            ]


@pytest.mark.parametrize("change", ["create", "add_columns"])
def test_commit_of_another_export_beside_a_change_of_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The rows were compared with the state before: with the other export's rows, a key would have two."""
    columns = [JsonColumn(name, JsonType.LONG, name) for name in ("k", "v")]
    layout = Layout(body=BodyFormat.JSON, json_columns=(columns[0],), key=("k",))
    slow, fast = (open_table(DELTA, LocalStorage(tmp_path), topic, topic) for topic in ("t", "u"))
    theirs = [
        write_changes(tmp_path, layout, "a", number, [(NOON_NS + number, {"k": 1})], "u")
        for number in range(2)
    ]
    left = [partial(fast.commit, number, [each], layout) for number, each in enumerate(theirs, 1)]
    if change == "add_columns":
        left.pop(0)()
        layout = replace(layout, json_columns=tuple(columns))
    where = DeltaTable if change == "create" else TableAlterer
    make = getattr(where, change)

    def overtaken(*arguments: Any, **options: Any) -> None:
        make(*arguments, **options)
        if left:
            left.pop(0)()

    monkeypatch.setattr(where, change, overtaken)
    ours = write_changes(tmp_path, layout, "a", 0, [(NOON_NS + 9, {"k": 1, "v": 2})])
    slow.commit(1, [ours], layout)
    assert table_rows(DELTA, tmp_path).select(["k", "topic"]).to_pylist() == [{"k": 1, "topic": "t"}]


class OvertakenStorage(LocalStorage):
    """A folder where another process makes a commit before the first file of it is read."""

    commit: Callable[[], object] | None = None

    def open_input(self, name: str) -> Any:
        if self.commit is not None:
            commit, self.commit = self.commit, None
            commit()
        return super().open_input(name)


@pytest.mark.parametrize("overtaken", [True, False])
def test_commit_whose_files_another_process_has_removed(tmp_path: Path, overtaken: bool) -> None:
    """It has made the same commit, or it has not: then the error is reported."""
    layout = Layout(body=BodyFormat.JSON, json_columns=(JsonColumn("k", JsonType.LONG, "k"),), key=("k",))
    storage = OvertakenStorage(tmp_path)
    slow, fast = (open_table(DELTA, each, "t", "t") for each in (storage, LocalStorage(tmp_path)))
    result = write_changes(tmp_path, layout, "a", 0, [(NOON_NS, {"k": 1})])
    storage.commit = partial(fast.commit, 1, [result], layout)
    if overtaken:
        slow.commit(1, [result], layout)
        assert table_rows(DELTA, tmp_path).column("k").to_pylist() == [1]
    else:
        storage.commit = partial(LocalStorage(tmp_path).remove, result.files)
        with pytest.raises(FileNotFoundError):
            slow.commit(1, [result], layout)


def test_clock_that_was_set_back(tmp_path: Path) -> None:
    """Of one log, the sequence counts; of another one, the time."""
    layout = Layout(body=BodyFormat.JSON, json_columns=(JsonColumn("k", JsonType.LONG, "k"),), key=("k",))
    table = open_table(DELTA, LocalStorage(tmp_path), "t", "e")
    late = write_changes(tmp_path, layout, "a", 5, [(NOON_NS - 100, {"k": 1}), (NOON_NS - 100, {"k": 2})])
    early = write_changes(tmp_path, layout, "a", 0, [(NOON_NS, {"k": 1}), (NOON_NS, {"k": 2})])
    other = write_changes(tmp_path, layout, "b", 0, [(NOON_NS - 200, {"k": 1}), (NOON_NS - 50, {"k": 2})])
    for number, result in enumerate((late, early, other), 1):
        table.commit(number, [result], layout)
    rows = table_rows(DELTA, tmp_path).select(["k", "broker", "seq"]).to_pylist()
    assert rows == [{"k": 1, "broker": "a", "seq": 5}, {"k": 2, "broker": "b", "seq": 1}]


def test_bounds_of_a_field_with_the_same_path_do_not_matter(tmp_path: Path) -> None:
    """Statistics are found by path, and the field `id` of the struct `user` has the same as the column `user.id`."""
    version = {"topic": ["t"], "broker": ["b"], "seq": [1], "ts_ns": [0]}
    pq.write_table(pa.table({"user": [{"id": 100}], "user.id": [1], **version}), tmp_path / "f.parquet")
    layout = Layout(
        PartitionBy.NONE,
        BodyFormat.JSON,
        (JsonColumn("user.id", JsonType.LONG, "user.id"),),
        key=("user.id",),
    )
    (name,) = key_names(1)
    (found,) = keyed_rows(LocalStorage(tmp_path), "f.parquet", layout, {name: (1, 1)})
    assert found[name].to_pylist() == [1]
