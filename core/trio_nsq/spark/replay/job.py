"""A replay job: plan its pieces, have an engine publish them, and keep its state in a folder.

The plan is stored before the first publish, so an interrupted job continues with the same pieces:

    job.json            the request and the pieces; once the job is planned, only the broker's address changes
    done/PIECE.json     the results of pieces, written by their tasks
    lock                held by the process that runs the job
"""

import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ...event_loop.retries import PATIENCE_S
from ...protocol.errors import NSQError
from ...storage import PRIVATE_MODE, LocalStorage, StoredFile, shown_place
from ..options import BrokerAccess
from ..runtime.engine import Advance, Engine
from .files import ReplayColumns, ReplayFileError, ReplayFiles, open_files, select_topics
from .pieces import Piece, split_into_pieces
from .request import PieceResult, ReplayRequest, ReplayResult
from .rows import RowGroupRange
from .task import ReplayTask

VERSION = 2
_FILE = "job.json"
_QUESTIONS = 8
"""How many pieces to ask a broker about at the same time."""
KEPT_S = 7 * 24 * 3600
"""Complete jobs are removed after this time."""

RowSelector = Callable[[ReplayFiles, str], Mapping[str, bytes]]
"""Selects rows by a condition, see `select_rows`."""


class JobError(NSQError):
    """A job does not exist, has another request, or is in use; the text has the reason."""


@dataclass(slots=True)
class _Plan:
    """The plan of a job: the folder, the columns to read, the number of rows and files, and the pieces."""

    place: str
    columns: ReplayColumns
    rows: int
    files: int
    pieces: list[Piece]


class ReplayJob:
    """One job. Created by `open_job`.

    Attributes:
        result: The result, updated by `run`.
        is_complete: Whether an earlier run completed the job.
        is_new: Whether the job was not planned before.
    """

    def __init__(
        self, name: str, folder: Path, request: ReplayRequest | None, address: str | None = None
    ) -> None:
        self.name = name
        self.result: ReplayResult = ReplayResult()
        self.is_complete: bool = False
        self._folder = folder
        self._storage = LocalStorage(folder, PRIVATE_MODE)
        self._plan: _Plan | None = None
        found = self._storage.read(_FILE)
        self.is_new: bool = found is None
        self._version = None if found is None else found.version
        if found is None:
            if request is None:
                raise JobError(f"there is no job {name} in {folder.parent}")
            self.request: ReplayRequest = request
            self._nonce = secrets.token_hex(4)
        else:
            self._load(found.data)
            if request is not None and (names := request.differs_from(self.request)):
                raise JobError(
                    f"the job {name} was started with another {', '.join(names)}: to continue it, give --job {name} "
                    "without these; or choose another job name"
                )
            if address is not None:
                self.request = replace(self.request, address=address)

    # ------------------------------------------------------------------ job.json

    def _load(self, data: bytes) -> None:
        try:
            found = json.loads(data)
            if found["version"] != VERSION:
                raise JobError(
                    f"the job {self.name} has version {found['version']}; this program supports only version {VERSION}"
                )
            asked = found["request"]
            self.request = ReplayRequest(**asked | {"from_topics": tuple(asked["from_topics"])})
            self._nonce = found["nonce"]
            self.is_complete = found["complete"]
            plan = found["plan"]
            columns = plan["columns"]
            plan["columns"] = ReplayColumns(**columns | {"order": tuple(columns["order"])})
            plan["pieces"] = [
                tuple(RowGroupRange(StoredFile(*stamp), *others) for stamp, *others in piece)
                for piece in plan["pieces"]
            ]
            self._plan = _Plan(**plan)
        except (ValueError, KeyError, TypeError) as exc:
            raise JobError(f"the job {self.name} cannot be read, in {self._folder}: {exc!r}") from exc

    def _save(self, *, complete: bool = False) -> None:
        """Write `job.json`. Raises ChangedMeanwhile: it is not the file that was read or written last."""
        assert self._plan is not None
        plan = self._plan
        found = {
            "version": VERSION,
            "job": self.name,
            "nonce": self._nonce,
            "complete": complete,
            "request": asdict(self.request),
            "plan": asdict(replace(plan, pieces=[])) | {"pieces": [] if complete else plan.pieces},
        }
        data = json.dumps(found, separators=(",", ":")).encode() + b"\n"
        self._version = self._storage.replace(_FILE, data, self._version)

    # ------------------------------------------------------------------ the plan

    def plan(self, select: RowSelector | None) -> None:
        """Split the files into pieces and store the plan, unless the job is already planned.

        Args:
            select: Applies the condition of the request; may be None without a condition.

        Raises:
            ReplayFileError, TableError: The files cannot be replayed.
            FilterError, SparkFailed: The condition cannot be applied.
            StorageError, OSError: The files cannot be read, or the job cannot be written.
        """
        if self._plan is None:
            request = self.request
            files = open_files(request.source, request.body_column, request.time_column, request.version)
            files = select_topics(files, request.from_topics)
            needs_times = request.ordered or request.first_ns is not None or request.end_ns is not None
            if needs_times and files.columns.time is None:
                raise ReplayFileError(
                    f"the files in {shown_place(files.place)} are not exports of qcli: choose the column of the "
                    "publish times with --time-column"
                )
            self._plan = _Plan(
                files.place, files.columns, sum(file.rows for file in files.files), len(files.files), []
            )
            bits = None
            if request.where is not None:
                assert select is not None
                bits = select(files, request.where)
            self._plan.pieces = split_into_pieces(
                files, bits, request.first_ns, request.end_ns, ordered=request.ordered
            )
            self._save()
        self.result.rows, self.result.files = self._plan.rows, self._plan.files
        self.result.pieces = len(self._plan.pieces)

    @property
    def size_bytes(self) -> int:
        """The approximate size of the bodies of all pieces."""
        assert self._plan is not None
        return sum(group.body_bytes for piece in self._plan.pieces for group in piece)

    def tasks(
        self,
        at_once: int = 1,
        *,
        save_results: bool = True,
        dry_run: bool = False,
        access: BrokerAccess | None = None,
        patience_s: float = PATIENCE_S,
    ) -> list[ReplayTask]:
        """Return the tasks of the pieces that are not complete, after `plan`. Count the others in the result.

        Args:
            at_once: How many tasks run at the same time; they share the rate.
            save_results: Whether tasks can write to the folder of the job.
            dry_run: Only count messages.
            patience_s: How long to wait for an unreachable broker.
        """
        assert self._plan is not None
        request, plan = self.request, self._plan
        at_once = max(1, min(at_once, len(plan.pieces)))
        tasks = []
        for number, row_groups in enumerate(plan.pieces):
            saved = PieceResult.load(self._storage, number)
            if saved is not None and saved.complete:
                self.result.add(saved.as_before())
                continue
            tasks.append(
                ReplayTask(
                    request,
                    number,
                    self._producer(number),
                    plan.place,
                    plan.columns,
                    row_groups,
                    None if request.rate is None else request.rate / at_once,
                    str(self._folder) if save_results and not dry_run else None,
                    dry_run,
                    access or BrokerAccess(),
                    patience_s,
                )
            )
        return tasks

    # ------------------------------------------------------------------ the destination

    def check_destination(
        self,
        *,
        publish_missing: bool = False,
        access: BrokerAccess | None = None,
    ) -> None:
        """Check that the broker has what earlier runs have published, as far as it deduplicates.

        Also store its address, which may be another one than before.

        Args:
            publish_missing: Publish again what the broker has lost.

        Raises:
            JobError: The broker has lost something, or is another one.
            BrokerUnreachable, RequestRefused: It cannot be asked.
        """
        if self._plan is None:
            return

        request, connecting = self.request, access or BrokerAccess()

        def lacks(piece: PieceResult) -> bool:
            name = self._producer(piece.piece)
            with connecting.producer(request.address, request.topic, name, PATIENCE_S) as producer:
                last = producer.last_number()
                return (-1 if last is None else last) < piece.batches - 1 and not producer.may_be_forgotten

        begun = [PieceResult.load(self._storage, number) for number in range(len(self._plan.pieces))]
        stored = [piece for piece in begun if piece is not None and piece.batches and piece.remembered]
        with ThreadPoolExecutor(_QUESTIONS, "trio-nsq-replay") as threads:
            lacking = [piece for piece, lost in zip(stored, threads.map(lacks, stored), strict=True) if lost]
        if lacking and not publish_missing:
            raise JobError(
                f"the broker at {request.address} lacks messages that the job {self.name} has published to topic "
                f"{request.topic}: it was restored from a backup, the topic was deleted, or it is another broker. "
                "Give --publish-missing to publish them again, or --allow-gaps to go on without them"
            )
        for piece in lacking:
            piece.forget(self._storage)
        self._save()

    def _producer(self, piece: int) -> str:
        """Return the name of a piece as a producer."""
        return f"{self.name}.{self._nonce}:{piece}"

    # ------------------------------------------------------------------ the work

    def run(self, engine: Engine, tasks: Sequence[ReplayTask], advance: Advance) -> None:
        """Run tasks and update the result, even if one fails. Raises NSQError or OSError if a task failed."""
        left = {task.piece: PieceResult.load(self._storage, task.piece) for task in tasks}

        def finish(done: PieceResult) -> None:
            if left.pop(done.piece, done) is not done:
                self.result.add(done)
                if not tasks[0].dry_run and tasks[0].results_folder is None:
                    done.save(self._storage)

        try:
            if tasks:
                engine(tasks, finish, advance)
        finally:
            for piece, before in left.items():
                # Tasks that were interrupted, or whose result Spark lost.
                if (saved := PieceResult.load(self._storage, piece)) is not None and saved != before:
                    self.result.add(saved)
        self._finish()

    def _finish(self) -> None:
        """Mark the job as complete, if all pieces are."""
        if self.result.pieces_done < self.result.pieces:
            return
        self.result.count_left_out()
        self._save(complete=True)
        shutil.rmtree(self._folder / "done", ignore_errors=True)


# ---------------------------------------------------------------------- folders


@contextmanager
def open_job(
    jobs: Path, name: str | None, request: ReplayRequest | None, address: str | None = None
) -> Iterator[ReplayJob]:
    """Open a job and lock it.

    Args:
        name: The name of the job; None: a new job.
        request: The request; None: the stored request of the job.
        address: The address of the broker now; None: as in the request.

    Raises:
        JobError: The job does not exist, has another request, or is in use.
        OSError: The folder cannot be used.
    """
    name = name or f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    folder = jobs / name
    if request is None and not (folder / _FILE).exists():
        raise JobError(
            f"there is no job {name} in {jobs}; start one with 'qcli replay FOLDER TOPIC --job {name}'"
        )
    folder.mkdir(parents=True, exist_ok=True)
    storage = LocalStorage(folder, PRIVATE_MODE)
    with storage.hold("lock", lambda holder: JobError(f"another process runs the job {name}: {holder}")):
        job = ReplayJob(name, folder, request, address)
        try:
            yield job
        finally:
            if not (folder / _FILE).exists():  # the job was not planned
                shutil.rmtree(folder, ignore_errors=True)


def remove_old_jobs(jobs: Path, now_s: float) -> None:
    """Remove the folders of jobs that have been complete for a while.

    Args:
        jobs: The folder of all jobs; need not exist.
        now_s: The time, Unix seconds.
    """
    for path in jobs.glob(f"*/{_FILE}"):
        try:
            if path.stat().st_mtime < now_s - KEPT_S and json.loads(path.read_bytes())["complete"]:
                shutil.rmtree(path.parent, ignore_errors=True)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not a job, or of another program
