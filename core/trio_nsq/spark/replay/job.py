"""A replay from its beginning to its end: the job, which is written down before anything is published.

In the folder of a job lie

    job.json            what is to be done, and how it is cut: fixed when the job is begun
    selected.bin        the rows that `--where` has chosen, if it was given
    done/PIECE.json     what tasks note of their pieces
    lock
"""

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path

from ...client.connection.tls import TLSFiles
from ...client.http.retry import PATIENCE_S
from ...protocol.errors import NSQError
from ..runtime.engine import Advance, Engine
from ..storage import LocalStorage
from .files import (
    ReplayColumns,
    ReplayFileError,
    ReplayFiles,
    open_files,
    select_topics,
)
from .pieces import Piece, row_groups_from_json, row_groups_to_json, split_into_pieces
from .request import ReplayRequest
from .rows import TimeRange
from .task import (
    MAX_BATCH_MESSAGES,
    MAX_EXAMPLES,
    BatchOptions,
    PieceResult,
    ReplayTask,
    Target,
    read_result,
    result_path,
)

VERSION = 1
KEPT_S = 7 * 24 * 3600
"""So long is it known of a job that is complete."""
_PACE_S = 0.05
"""With a rate, so many messages as go in this time are one batch."""

Chooser = Callable[[ReplayFiles, str], Mapping[str, bytes]]
"""Chooses rows, see `select_rows`."""


class JobError(NSQError):
    """There is no such job, or it is another one, or somebody works on it; the text says so."""


@dataclass(slots=True)
class ReplayResult:
    """What became of a job so far. Counts are of messages, but for those that say otherwise.

    Attributes:
        published, published_bytes: By this run.
        before, before_bytes: Published by an earlier run, or by an attempt that was lost, and not again.
        maybe_twice: See `PieceResult`.
        unmatched, without_body, too_long, examples: Likewise.
        left_out: Rows that times and `--where` leave out.
        rows: In all files.
        files, pieces: How many.
        pieces_done: How many of these are complete.
        remembered: Whether the broker remembers what it has published; None: it was not asked.
    """

    published: int = 0
    published_bytes: int = 0
    before: int = 0
    before_bytes: int = 0
    maybe_twice: int = 0
    unmatched: int = 0
    without_body: int = 0
    too_long: int = 0
    examples: list[str] = field(default_factory=list)
    left_out: int = 0
    rows: int = 0
    files: int = 0
    pieces: int = 0
    pieces_done: int = 0
    remembered: bool | None = None


@dataclass(slots=True)
class _Plan:
    """What a job consists of."""

    place: str
    columns: ReplayColumns
    rows: int
    files: int
    pieces: list[Piece]


class ReplayJob:
    """One job. Made by `open_job`.

    Attributes:
        name: By which it is gone on with.
        request: What is wanted.
        outcome: What became of it; up to date after `run`.
        is_complete: Whether all of it was dealt with, in an earlier run.
        is_new: Whether nothing was planned before.
    """

    def __init__(self, name: str, folder: Path, request: ReplayRequest | None) -> None:
        self.name = name
        self.result = ReplayResult()
        self.is_complete = False
        self._folder = folder
        self._storage = LocalStorage(folder)
        self._plan: _Plan | None = None
        found = self._storage.read("job.json")
        self.is_new = found is None
        if found is None:
            if request is None:
                raise JobError(f"there is no job {name} in {folder.parent}")
            self.request = request
            self._nonce = secrets.token_hex(4)
        else:
            self._load(found)
            if request is not None and (names := request.differs_from(self.request)):
                raise JobError(
                    f"the job {name} was begun with another {', '.join(names)}: say --job {name} and nothing else of "
                    "what is to be published, or name another job"
                )

    # ------------------------------------------------------------------ the books

    def _load(self, data: bytes) -> None:
        try:
            found = json.loads(data)
            if found["version"] != VERSION:
                raise JobError(
                    f"the job {self.name} is of version {found['version']}, and this program knows {VERSION} only"
                )
            asked = found["request"]
            self.request = ReplayRequest(**asked | {"from_topics": tuple(asked["from_topics"])})
            self._nonce = found["nonce"]
            self.is_complete = found["complete"]
            plan = found["plan"]
            packed = b"" if self.is_complete else self._storage.read("selected.bin") or b""
            columns = plan["columns"]
            self._plan = _Plan(
                plan["place"],
                ReplayColumns(**columns | {"order": tuple(columns["order"])}),
                plan["rows"],
                plan["files"],
                [tuple(row_groups_from_json(each, packed) for each in piece) for piece in plan["pieces"]],
            )
        except (ValueError, KeyError, TypeError) as exc:
            raise JobError(f"the job {self.name} cannot be read, in {self._folder}: {exc!r}") from exc

    def _save(self, *, complete: bool = False) -> None:
        assert self._plan is not None
        plan = self._plan
        packed = [each.selected or b"" for piece in plan.pieces for each in piece]
        if any(packed) and not complete:
            self._storage.write("selected.bin", b"".join(packed))
        ends = iter(accumulate(map(len, packed)))
        pieces = (
            []
            if complete
            else [[row_groups_to_json(each, next(ends)) for each in piece] for piece in plan.pieces]
        )
        found = {
            "version": VERSION,
            "job": self.name,
            "nonce": self._nonce,
            "complete": complete,
            "request": asdict(self.request),
            "plan": {
                "place": plan.place,
                "columns": asdict(plan.columns),
                "rows": plan.rows,
                "files": plan.files,
                "pieces": pieces,
            },
        }
        self._storage.write("job.json", json.dumps(found, separators=(",", ":")).encode() + b"\n")

    # ------------------------------------------------------------------ the plan

    def plan(self, choose: Chooser | None) -> None:
        """Write down what is to be done, if that is not written down yet.

        Args:
            choose: For `where`.

        Raises:
            ReplayFileError: The files cannot be replayed.
            FilterError, SparkFailed: `where` cannot be applied.
            StorageError, OSError: The files cannot be read, or the job not be written.
        """
        if self._plan is None:
            request = self.request
            source = open_files(request.source, request.body_column, request.time_column)
            source = select_topics(source, request.from_topics)
            _check_times(source, request)
            self._plan = _Plan(
                source.place, source.columns, sum(file.rows for file in source.files), len(source.files), []
            )
            bits = None
            if request.where is not None:
                assert choose is not None
                bits = choose(source, request.where)
            self._plan.pieces = split_into_pieces(
                source, bits, request.first_ns, request.end_ns, ordered=request.ordered
            )
            self._save()
        self.result.rows, self.result.files = self._plan.rows, self._plan.files
        self.result.pieces = len(self._plan.pieces)

    @property
    def rows(self) -> int:
        """How many rows there are to choose from, after `plan`."""
        assert self._plan is not None
        return sum(row_group_range.wanted for piece in self._plan.pieces for row_group_range in piece)

    @property
    def size_bytes(self) -> int:
        """What the bodies of all pieces are, about."""
        assert self._plan is not None
        return sum(row_group_range.body_bytes for piece in self._plan.pieces for row_group_range in piece)

    def tasks(
        self,
        at_once: int = 1,
        *,
        save_results: bool = True,
        dry_run: bool = False,
        tls: TLSFiles | None = None,
        patience_s: float = PATIENCE_S,
    ) -> list[ReplayTask]:
        """What is left to be done, after `plan`; what is not is counted.

        Args:
            at_once: So many tasks run at the same time, and share the rate.
            save_results: Whether tasks can reach the folder of the job.
            dry_run: Only count.
            tls: For https.
            patience_s: How long a broker that went away is waited for.
        """
        assert self._plan is not None
        request, plan = self.request, self._plan
        at_once = max(1, min(at_once, len(plan.pieces)))
        most = MAX_BATCH_MESSAGES
        if request.rate is not None:
            most = max(1, min(most, int(request.rate * _PACE_S)))
        batching = BatchOptions(
            most,
            max_msg_bytes=request.max_msg_bytes,
            speed=None if dry_run else request.speed,
            pattern=None if request.match is None else os.fsencode(request.match),
        )
        target = None if dry_run else Target(request.address, request.topic, tls or TLSFiles(), patience_s)
        tasks = []
        for number, row_groups in enumerate(plan.pieces):
            noted = read_result(self._storage, number)
            if noted is not None and noted.complete:
                self._add(_as_before(noted))
                continue
            tasks.append(
                ReplayTask(
                    number,
                    f"{self.name}.{self._nonce}:{number}",
                    plan.place,
                    plan.columns,
                    TimeRange(request.first_ns, request.end_ns),
                    row_groups,
                    request.ordered,
                    batching,
                    target,
                    None if request.rate is None else request.rate / at_once,
                    str(self._folder) if save_results and not dry_run else None,
                )
            )
        return tasks

    # ------------------------------------------------------------------ the work

    def run(self, engine: Engine, tasks: Sequence[ReplayTask], advance: Advance) -> None:
        """Have tasks done, and note it, also when that fails.

        Raises:
            NSQError, OSError: What went wrong.
        """
        left = {task.piece: read_result(self._storage, task.piece) for task in tasks}

        def finish(done: PieceResult) -> None:
            if left.pop(done.piece, done) is not done:
                self._add(done)
                if tasks[0].target is not None and tasks[0].results_folder is None:
                    self._storage.write(result_path(done.piece), done.to_bytes())

        try:
            if tasks:
                engine(tasks, finish, advance)
        finally:
            for piece, before in left.items():
                # What Spark has lost, or what was interrupted.
                if (noted := read_result(self._storage, piece)) is not None and noted != before:
                    self._add(noted)
        self._finish()

    def _add(self, done: PieceResult) -> None:
        outcome = self.result
        outcome.published += done.published
        outcome.published_bytes += done.published_bytes
        outcome.before += done.repeated
        outcome.before_bytes += done.repeated_bytes
        outcome.maybe_twice += done.maybe_twice
        outcome.unmatched += done.unmatched
        outcome.without_body += done.without_body
        outcome.too_long += done.too_long
        outcome.examples = (outcome.examples + done.examples)[:MAX_EXAMPLES]
        outcome.pieces_done += done.complete
        if done.remembered is not None:
            outcome.remembered = done.remembered and outcome.remembered is not False

    def _finish(self) -> None:
        """Note that all is done, if it is."""
        outcome = self.result
        if outcome.pieces_done < outcome.pieces:
            return
        dealt_with = (
            outcome.published + outcome.before + outcome.unmatched + outcome.without_body + outcome.too_long
        )
        outcome.left_out = outcome.rows - dealt_with
        self._save(complete=True)
        self._storage.discard("selected.bin")
        shutil.rmtree(self._folder / "done", ignore_errors=True)


def _as_before(done: PieceResult) -> PieceResult:
    """What an earlier run did, as this one sees it."""
    return replace(
        done,
        published=0,
        published_bytes=0,
        repeated=done.published + done.repeated,
        repeated_bytes=done.published_bytes + done.repeated_bytes,
    )


def _check_times(source: ReplayFiles, request: ReplayRequest) -> None:
    """Raises ReplayFileError if times are asked for, and there are none."""
    if source.columns.time is None and (
        request.ordered or request.first_ns is not None or request.end_ns is not None
    ):
        raise ReplayFileError(
            f"the folder {source.place} holds no exports of qcli's, so it is not known which column tells the time of "
            "a message: name it with --time-column"
        )


# ---------------------------------------------------------------------- folders


@contextmanager
def open_job(jobs: Path, name: str | None, request: ReplayRequest | None) -> Iterator[ReplayJob]:
    """Open a job, which nobody else can meanwhile.

    Args:
        jobs: The folder of all jobs.
        name: Of this one; None: one that nobody has.
        request: What is wanted; None: what it was begun with.

    Raises:
        JobError: There is no such job, it was begun with something else, or somebody works on it.
        OSError: The folder cannot be used.
    """
    name = name or new_name()
    folder = jobs / name
    if request is None and not (folder / "job.json").exists():
        raise JobError(
            f"there is no job {name} in {jobs}; 'qcli replay FOLDER TOPIC --job {name}' begins one"
        )
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError(f"another process works on the job {name}") from None
        job = ReplayJob(name, folder, request)
        try:
            yield job
        finally:
            if not (folder / "job.json").exists():  # nothing was planned: there is nothing to go on with
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(fd)


def new_name() -> str:
    """A name that no other job has."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def remove_old_jobs(jobs: Path, now_s: float) -> None:
    """Remove the folders of jobs that are complete for a while.

    Args:
        jobs: The folder of all jobs; it need not exist.
        now_s: The time, Unix seconds.
    """
    for path in jobs.glob("*/job.json"):
        try:
            if path.stat().st_mtime < now_s - KEPT_S and json.loads(path.read_bytes())["complete"]:
                shutil.rmtree(path.parent, ignore_errors=True)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # somebody else's, or no job at all
