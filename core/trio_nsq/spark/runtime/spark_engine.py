"""An engine that runs tasks on Spark, in Python workers on this machine or on a cluster.

Without a master, Spark runs in a local JVM, which exits with this process, also when this process is killed.
"""

import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, TypeVar

import trio_nsq

from ...platform.extras import install_hint
from ...storage import known_access
from .engine import Advance, Done, Task, attempt
from .failures import SparkFailed, failure, start_failure
from .java import (
    LocalJvm,
    NoJava,
    class_archive,
    find_java_home,
    java_home,
    start_jvm,
    write_class_archive,
)
from .master import check_master

if TYPE_CHECKING:
    from pyspark import SparkContext, StatusTracker
    from pyspark.sql import SparkSession

_Found = TypeVar("_Found")

LOCAL = "local[*,3]"
"""All cores, and three attempts for each task."""
_POLL_S = 0.1
_GROUP = "trio-nsq"
_NO_WORKER_S = 15.0
"""How long a job waits for its first executor before the user is told."""
_END_S = 10.0
_ZIP_TIMESTAMP = (1980, 1, 1, 0, 0, 0)
_LOCAL_CONF = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # For a faster start; the JVM has little to do.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
_CONF = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # A concurrent second attempt would only read the same messages again.
    "spark.speculation": "false",
}


def check_spark() -> None:
    """Check that Spark is installed. Raises SparkFailed."""
    try:
        import pyspark  # noqa: F401
    except ImportError as exc:
        raise SparkFailed(f"the extra 'spark' is not installed ({exc}): {install_hint('spark')}") from exc


@contextmanager
def open_spark(
    master: str | None = None,
    name: str = "qcli to-parquet",
    memory: str = "512m",
    tell: Callable[[str], None] | None = None,
    jvm_flags: Sequence[str] | None = None,
) -> Iterator["SparkEngine"]:
    """Start Spark, or use that of spark-submit, and stop it after the block.

    Args:
        master: The URL of the master; None: run locally, or use the master of spark-submit.
        memory: The memory of a local JVM, which only schedules tasks.
        jvm_flags: Additional flags of a local JVM; None: use the class archive, if there is one.
        tell: Called with a sentence while Spark waits for something that the user should know.

    Raises:
        SparkFailed: Spark is not installed, or does not start.
        NoJava: There is no Java.
    """
    check_spark()
    check_master(master)
    from pyspark import SparkContext

    # Spark's log is needed only if Spark does not start.
    with tempfile.TemporaryFile(prefix="trio-nsq-spark-") as log, tempfile.TemporaryDirectory() as folder:
        with _start_failures(log), _interrupt_handler_kept():
            if "PYSPARK_GATEWAY_PORT" in os.environ:
                context, process = SparkContext.getOrCreate(), None
            else:
                context, process = _started_context(master, name, memory, log, jvm_flags)
        try:
            with _start_failures(log):
                _send_package(context, Path(folder))
            if (server := getattr(context, "_accumulatorServer", None)) is not None:
                # If the JVM is lost, pyspark's threads would print errors; the tasks already raise one.
                server.handle_error = lambda *_: None
            yield SparkEngine(context, name, tell)
        finally:
            _end(context, process)


@contextmanager
def _interrupt_handler_kept() -> Iterator[None]:
    """Undo that pyspark handles SIGINT: its handler calls the JVM, perhaps in the middle of another call."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


def _send_package(context: "SparkContext", folder: Path) -> None:
    """Send this package to workers on other machines, so that they run the same version.

    With spark-submit's `--py-files`, it is already in a zip file.
    """
    if not str(context.master).startswith("local") and Path(trio_nsq.__path__[0]).is_dir():
        write_zip(folder / "trio_nsq.zip")
        context.addPyFile(str(folder / "trio_nsq.zip"))


def make_class_archive() -> Path:
    """Make Spark start faster on this machine: write the classes that an export uses to a class archive.

    Returns:
        The archive, of about 80 MB.

    Raises:
        SparkFailed, NoJava: Spark or Java is missing, or failed.
        OSError: The archive cannot be written.
    """
    check_spark()
    import pyspark

    home, _ = find_java_home()
    spark = Path(pyspark.__file__).parent
    archive = class_archive(home, spark)
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="new-", dir=archive.parent) as folder:
        classes = Path(folder) / "classes"
        with open_spark("local[1]", jvm_flags=[f"-XX:DumpLoadedClassList={classes}"]) as engine:
            engine([_Nothing()], lambda _: None, lambda *_: None)
        try:
            write_class_archive(home, spark, classes, archive)
        except ChildProcessError as exc:
            raise SparkFailed(f"{_java_used()} does not write a class archive: {exc}") from exc
    return archive


@dataclass(frozen=True)
class _Nothing:
    """A task that does nothing."""

    messages: int = 0

    def run(self, advance: Advance | None = None) -> None:
        pass


def write_zip(path: Path, packages: Sequence[ModuleType] = (trio_nsq,)) -> None:
    """Write the sources of packages to a zip file. The file is reproducible.

    Args:
        path: The zip file; replaced if it exists.
        packages: Packages that were imported from folders.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        for package in packages:
            folder = Path(package.__path__[0])
            for source in sorted(folder.rglob("*.py")):
                info = zipfile.ZipInfo(source.relative_to(folder.parent).as_posix(), _ZIP_TIMESTAMP)
                info.compress_type = zipfile.ZIP_DEFLATED
                bundle.writestr(info, source.read_bytes())


def _started_context(
    master: str | None, name: str, memory: str, log: IO[bytes], jvm_flags: Sequence[str] | None
) -> tuple["SparkContext", "subprocess.Popen[bytes] | None"]:
    """Start Spark; return its context and the process of the JVM. Raises NoJava, and the errors of pyspark and py4j."""
    from pyspark import SparkConf, SparkContext

    local = master is None or master.startswith("local")
    settings = {"spark.master": master or LOCAL, "spark.app.name": name, **_CONF}
    settings |= {"spark.driver.memory": memory, **_LOCAL_CONF} if local else {}
    conf = SparkConf(loadDefaults=False)
    conf.setAll(list(settings.items()))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    process: subprocess.Popen[bytes] | None = None
    try:
        if local and (jvm := _start_own_jvm(settings, log, jvm_flags)):
            process = jvm.process
            with _environment(PYSPARK_GATEWAY_PORT=str(jvm.port), PYSPARK_GATEWAY_SECRET=jvm.secret):
                gateway = _gateway(None, log)
        else:
            with java_home() as home, _environment(JAVA_HOME=str(home)):
                gateway = _gateway(conf, log)
            process = gateway.proc
        return SparkContext(gateway=gateway, conf=conf), process
    except BaseException:
        if process is not None:
            process.kill()
            process.wait()
            SparkContext._gateway = SparkContext._jvm = None  # the next context starts a new JVM
        raise


@contextmanager
def _start_failures(log: IO[bytes]) -> Iterator[None]:
    """Convert errors of the start of Spark inside the block to SparkFailed."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError, OSError) as exc:
        log.seek(0)
        raise start_failure(exc, log.read().decode(errors="replace"), _java_used()) from exc


def _start_own_jvm(settings: dict[str, str], log: IO[bytes], flags: Sequence[str] | None) -> LocalJvm | None:
    """Start a JVM without Spark's scripts; None if it does not start."""
    import pyspark

    home, _ = find_java_home()
    try:
        return start_jvm(home, Path(pyspark.__file__).parent, settings, log, flags)
    except OSError:
        return None


def _gateway(conf: Any, log: IO[bytes]) -> Any:
    from pyspark.java_gateway import launch_gateway

    return launch_gateway(conf, {"stdout": log, "stderr": log})  # type: ignore[no-untyped-call]


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _end(context: "SparkContext", process: "subprocess.Popen[bytes] | None") -> None:
    gateway: Any = context._gateway
    with suppress(Exception):  # the JVM may have been killed
        context.stop()
    type(context)._gateway = type(context)._jvm = None  # the next context starts a new JVM
    with suppress(Exception):
        gateway.shutdown()
    if process is None:
        return
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _java_used() -> str:
    """Describe the Java that was used, for error messages."""
    try:
        home, _ = find_java_home()
    except NoJava:  # spark-submit has its own
        return "the Java of spark-submit"
    return f"the Java in {home}{' (from JAVA_HOME)' if os.environ.get('JAVA_HOME') else ''}"


class SparkEngine:
    """An `Engine` that runs tasks on Spark."""

    def __init__(self, context: "SparkContext", name: str, tell: Callable[[str], None] | None = None) -> None:
        self._context = context
        self._name = name
        self._tell = tell or (lambda _: None)

    @property
    def is_local(self) -> bool:
        """Whether workers run on this machine."""
        return str(self._context.master).startswith("local")

    @property
    def slots(self) -> int:
        """The approximate number of tasks that run at the same time."""
        return max(1, int(self._context.defaultParallelism))

    def session(self) -> "SparkSession":
        """Return a new SQL session with its own settings."""
        from pyspark.sql import SparkSession

        return SparkSession(self._context).newSession()

    def __call__(self, tasks: Sequence[Task[Done]], finish: Callable[[Done], None], advance: Advance) -> None:
        """Run all tasks. On an error, running tasks are killed.

        Raises:
            NSQError, OSError: A task failed.
            SparkFailed: Spark failed.
        """

        def collect() -> list[Any]:
            try:
                distributed = self._context.parallelize(tasks, len(tasks))
                return distributed.map(partial(attempt, known_access())).collect()
            except Exception as exc:
                raise failure(exc) from exc

        with self._watched(tasks, advance) as look:
            results = self.interruptible(collect, look)
        for result in results:
            if not isinstance(result, Exception):
                finish(result)
        for result in results:
            if isinstance(result, Exception):
                raise result

    def interruptible(self, work: Callable[[], _Found], look: Callable[[], None] = lambda: None) -> _Found:
        """Call `work` in a thread. If an exception, such as a signal's, ends the wait here, its jobs are cancelled.

        Without the thread, the exception would come in the middle of a call to the JVM. py4j loses it there if an
        object is released, and otherwise gives the answer of that call to the next one. For the same reason this is not
        pyspark's InheritableThread: its `start` asks the JVM for the properties of the calling thread, which has none.

        Args:
            look: Called now and then in this thread.

        Returns:
            The result of `work`. Its exceptions are raised.
        """
        results: list[_Found] = []
        failures: list[BaseException] = []

        def run() -> None:
            try:
                self._context.setJobGroup(_GROUP, self._name, interruptOnCancel=True)
                results.append(work())
            except BaseException as exc:
                failures.append(exc)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_POLL_S)
                look()
        except BaseException:
            with suppress(Exception):
                self._context.cancelJobGroup(_GROUP)
                thread.join(_END_S)
            raise
        if failures:
            raise failures[0]
        return results[0]

    @contextmanager
    def _watched(self, tasks: Sequence[Task[Done]], advance: Advance) -> Iterator[Callable[[], None]]:
        """Watch the tasks of a job: the returned function reports what a thread of its own has asked Spark."""
        total = sum(task.messages for task in tasks)
        completed = reported = 0
        notes: list[str] = []
        ended = threading.Event()

        def ask() -> None:
            tracker = self._context.statusTracker()
            told_at_s = time.monotonic() + _NO_WORKER_S
            while not ended.wait(_POLL_S):
                with suppress(Exception):  # if the JVM has exited, the job fails
                    nonlocal completed
                    completed = _completed_tasks(tracker)
                    if time.monotonic() > told_at_s:
                        told_at_s = math.inf
                        notes.extend(self._reasons_to_wait())

        def look() -> None:
            nonlocal reported
            while notes:
                self._tell(notes.pop())
            messages = total * min(completed, len(tasks)) // len(tasks)
            if messages > reported:
                advance(messages - reported, 0)
                reported = messages

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        try:
            yield look
        finally:
            ended.set()
            asking.join(_END_S)

    def _reasons_to_wait(self) -> Iterator[str]:
        """Yield a sentence if no executor works for this program, because Spark waits for one without an end."""
        jvm_context: Any = self._context._jsc
        if not self.is_local and jvm_context.sc().getExecutorMemoryStatus().size() <= 1:  # the driver
            memory = self._context.getConf().get("spark.executor.memory", "1g")
            yield (
                f"Spark waits for a worker: none of the cluster has a free core and {memory} of memory for an "
                "executor (spark.executor.memory), or executors cannot connect to this machine."
            )


def _completed_tasks(tracker: "StatusTracker") -> int:
    """Return the number of completed tasks of the jobs of `interruptible`."""
    completed = 0
    for job in tracker.getJobIdsForGroup(_GROUP):
        if (known := tracker.getJobInfo(job)) is not None:
            for stage in known.stageIds:
                info = tracker.getStageInfo(stage)
                completed += info.numCompletedTasks if info else 0
    return completed
