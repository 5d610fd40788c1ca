"""Fixtures for all tests."""

import functools
import gc
import logging
import os
import re
import signal
import sys
import threading
import zlib
from collections.abc import Generator, Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio.testing
import trustme
from _pytest.assertion import rewrite
from hypothesis import HealthCheck, settings
from trio._core import _thread_cache

from soak import SOAK, examples
from trio_nsq.protocol.bulk import COMPILED

if TYPE_CHECKING:
    from storage.stores import Store

# A shell starts background processes with SIGINT ignored, which would also be so for the commands that tests
# interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Property tests draw the same examples each time, without a deadline. `make soak` draws random ones, and
# prints the seed.
settings.register_profile(
    "fixed",
    max_examples=examples(),
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=False,
)
settings.register_profile("random", settings.get_profile("fixed"), derandomize=False, print_blob=True)
settings.load_profile("fixed")

_JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A JVM of a test runs for seconds, so optimizing its code costs more than it saves."""
_SPARK_CONF = f"""\
spark.driver.extraJavaOptions {_JVM_OPTIONS}
spark.executor.extraJavaOptions {_JVM_OPTIONS}
spark.ui.enabled false
spark.sql.adaptive.enabled false
spark.sql.codegen.wholeStage false
spark.sql.shuffle.partitions 1
"""
"""Spark's defaults for the tests, which have few rows: query plans are not compiled."""
_SLOW_FOLDERS = {
    "browser",
    "cli",
    "faults",
    "fleet",
    "interop",
    "model",
    "node",
    "spark",
    "storage",
    "coordination",
    "cluster",
    "archive",
}
"""Folders in which most tests start processes or repeat a scenario."""
_SPARK_FOLDERS = {"spark", "documents"}
"""Folders with the slowest files."""
_SPARK_SESSION = re.compile(r"\b(spark: \"?SparkSession|engine: (Spark)?Engine)\b")
"""An argument of a test or fixture that is the Spark of its process."""


def pytest_configure(config: pytest.Config) -> None:
    """Fail at once if the modules that are compiled are of other sources, because these would not be tested."""
    if getattr(config, "workerinput", None) is not None:
        return
    project = Path(__file__).parents[1]
    spec = spec_from_file_location("hatch_build", project / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    hatch_build = module_from_spec(spec)
    spec.loader.exec_module(hatch_build)
    core = project / "core"
    if reason := hatch_build.stale(core) or _other_form(core, hatch_build.extension_files()):
        pytest.exit(reason, returncode=pytest.ExitCode.USAGE_ERROR)


def _other_form(core: Path, extensions: set[str]) -> str:
    """Return why not the form of `core` that `TRIO_NSQ_COMPILE` selects would be tested; empty: it is.

    Without this variable, CI tests the compiled form, and other machines the one that is there.
    """
    imported = find_spec("trio_nsq")
    if imported is None or imported.origin != str(core / "trio_nsq" / "__init__.py"):
        return f"trio_nsq would not be imported from {core}; run `make setup`"
    found = any((core / name).exists() for name in extensions)
    wanted = os.environ.get("TRIO_NSQ_COMPILE") or ("1" if os.environ.get("CI") == "true" else "")
    if wanted == "0" and found:
        return f"TRIO_NSQ_COMPILE=0 selects pure Python, and {core} is compiled; run `make pytest-pure`"
    if wanted == "1" and not found:
        return f"CI or TRIO_NSQ_COMPILE=1 selects the compiled form, and {core} is pure Python; run `make compile`"
    return ""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile a part of the test modules, if several workers collect all of them.

    All collect at the same time and in the same order. In a new clone, each would compile each module, in 14 s.
    """
    config = session.config
    worker = getattr(config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode or config.args != config.getini("testpaths"):
        return
    modules = sorted(Path(__file__).parent.rglob("test_*.py"))
    for path in modules[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        _compile_asserts(path, config)


def _compile_asserts(path: Path, config: pytest.Config) -> None:
    """Write the file in which pytest keeps a compiled test module, unless there is one; pytest has no API for this."""
    folder = rewrite.get_cache_dir(path)
    compiled = folder / (path.stem + rewrite.PYC_TAIL)
    if rewrite.try_makedirs(folder) and rewrite._read_pyc(path, compiled) is None:
        source_hash, code = rewrite._rewrite_test(path, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, compiled)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, None, None]:
    """Collect without looking for garbage, and never look for it among the 15,000 tests: they stay until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what only the uncompiled modules can show; CI runs the tests in both forms."""
    if COMPILED and item.get_closest_marker("uncompiled") is not None:
        pytest.skip("the modules whose functions it replaces or watches are compiled: make pure")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `make soak` runs, and sort files that run side by side.

    Those that share a Spark are first, then other slow files, then fast ones, so that all workers end together. Slow
    files of all folders are mixed: some mostly compute, others mostly wait.
    """
    if not SOAK and (left_out := [item for item in items if item.get_closest_marker("soak")]):
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    slow |= {item.path for item in items if item.path.parent.name in _SLOW_FOLDERS}

    shared = {path for path in slow if _shares_spark(path)}

    def order(item: pytest.Item) -> tuple[bool, bool, bool, int]:
        is_slow = item.path in slow
        mixed = zlib.crc32(item.path.name.encode()) if is_slow else 0
        return item.path not in shared, not is_slow, item.path.parent.name not in _SPARK_FOLDERS, mixed

    items.sort(key=order)  # stable


@functools.cache
def _shares_spark(path: Path) -> bool:
    """Return whether tests of a file use the Spark of their process."""
    return path.parent.name == "spark" and _SPARK_SESSION.search(path.read_text()) is not None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist=loadfile`, run all files that share a Spark in one worker, because it takes 10 s to start."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    if config.getoption("dist") != "loadfile":
        return None

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            return "the shared Spark" if _shares_spark(config.rootpath / scope) else scope

    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def _processes_start_fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep compiled modules, let HTTP clients read one authority instead of 150, and start Spark in half the time."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("authority") / "ca.pem"
        trustme.CA().cert_pem.write_to_path(str(path))
        patch.setenv("SSL_CERT_FILE", str(path))
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        spark = tmp_path_factory.mktemp("spark")
        (spark / "spark-defaults.conf").write_text(_SPARK_CONF)
        patch.setenv("SPARK_CONF_DIR", str(spark))
        patch.setenv("SPARK_LAUNCHER_OPTS", _JVM_OPTIONS)
        patch.setenv("SPARK_DAEMON_JAVA_OPTS", _JVM_OPTIONS)
        yield


@pytest.fixture(autouse=True)
def _logging_is_put_back() -> Iterator[None]:
    """Restore logging: a command in this process configures it as if the process were its own."""
    logger = logging.getLogger("trio_nsq")
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate, level = before
    logger.setLevel(level)


def _works(thread: threading.Thread) -> bool:
    """Return whether this is a busy thread of trio: threads have such names while they run a function."""
    return " from " in thread.name


def _have_begun() -> bool:
    """Return whether no thread of trio has a job that it has not begun: it gets its name when it begins."""
    unnamed = sum(thread.name.startswith("Trio thread ") for thread in threading.enumerate())
    return unnamed <= len(_thread_cache.THREAD_CACHE._idle_workers)


@pytest.fixture
def autojump_clock(monkeypatch: pytest.MonkeyPatch) -> trio.testing.MockClock:
    """A clock that jumps to the next deadline when all tasks and threads wait.

    pytest-trio's own fixture, which this replaces, jumps while a thread writes the log, so that a test's time
    limits pass too early.
    """
    clock = trio.testing.MockClock(autojump_threshold=0.001)
    jump = clock._autojump

    def jump_unless_threads_work() -> None:
        if _have_begun() and not any(map(_works, threading.enumerate())):
            jump()

    monkeypatch.setattr(clock, "_autojump", jump_unless_threads_work)  # the class cannot be subclassed
    return clock


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Store]":
    """An S3 server that enforces signatures and conditions."""
    from storage.stores import versitygw

    with versitygw(tmp_path_factory.mktemp("versitygw")) as store:
        yield store


@pytest.fixture(scope="session")
def moto_s3() -> "Iterator[Store]":
    """Another S3 server."""
    from storage.stores import moto

    with moto() as store:
        yield store


@pytest.fixture(scope="session")
def azure() -> "Iterator[Store]":
    """An emulator of Azure Blob Storage."""
    from storage.stores import azurite

    with azurite() as store:
        yield store


@pytest.fixture(scope="session")
def gcs() -> "Iterator[Store]":
    """An imitation of Google Cloud Storage."""
    from storage.stores import google

    with google() as store:
        yield store
