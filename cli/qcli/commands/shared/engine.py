"""Engines for commands that can run in this process or on Spark: options, the choice of one, and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING

import click

from trio_nsq.text.wording import count_of

from ...broker.failures import http_failure
from ...framework.errors import Failure
from ...framework.options import Decorator, all_of, option, output_format, verbose_option
from ...framework.output import print_diagnostic, size
from ...framework.params import Integer

if TYPE_CHECKING:
    from trio_nsq.client import RequestRefused
    from trio_nsq.spark.runtime.engine import Engine
    from trio_nsq.spark.runtime.spark_engine import SparkEngine

SPARK_WORTH_BYTES = 4 * 1024**3
"""Below this size, this process finishes before Spark would have started and caught up."""
PROCESSES_WORTH_BYTES = 512 * 1024**2
"""Below this size, other processes start in a noticeable part of the time that they save."""

WORK = "Engine"


def engine_options(reachable: str, report: str, jobs_note: str, records: Sequence[type]) -> Decorator:
    """Return the options of a command that can run on Spark: the engine, and the report.

    Args:
        reachable: The places that Spark's workers must be able to reach.
        report: The name of the report that `--quiet` leaves out, with the progress.
        jobs_note: Sentences of the help of `--jobs`: what a process does, and the default.
        records: The types of the records of the report as JSON.
    """
    return all_of(
        option(
            WORK,
            "--engine",
            type=click.Choice(["auto", "inline", "spark"]),
            default="auto",
            brief=True,
            help="inline: work in this process, without Java. spark: use Spark. auto: use the faster one.",
        ),
        option(
            WORK,
            "--master",
            metavar="URL",
            brief=True,
            help="Use this Spark master, such as spark://HOST:7077. By default Spark runs within this command. All "
            f"workers must be able to reach {reachable}.",
        ),
        option(
            WORK,
            "--jobs",
            "processes",
            type=Integer(min=1),
            metavar="N",
            brief=True,
            help=f"Without Spark, work in up to N processes on this machine. {jobs_note}",
        ),
        output_format(
            "text: report on stderr. json: write an object to stdout.",
            "text",
            "json",
            records=records,
        ),
        option(
            "Output", "--quiet", "-q", is_flag=True, help=f"Show errors only, no progress and no {report}."
        ),
        verbose_option("Show everything that Spark and the store reported about an error."),
    )


def check_extra(command: str) -> None:
    """Raises Failure if pyarrow, or Spark, which the options ask for, is not installed.

    Args:
        command: The command of `engine_options`, for the text.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        from trio_nsq.platform.extras import install_hint

        raise Failure(
            f"{command} needs the package pyarrow, which is not installed ({error}): pip install pyarrow. "
            f"To use Spark, too: {install_hint('spark')}."
        ) from error
    options = click.get_current_context().params
    if options["engine"] == "spark" or options["master"] is not None:
        from trio_nsq.spark.runtime.spark_engine import check_spark

        with library_errors():
            check_spark()


_WhenRefused = Callable[["RequestRefused"], Failure]


@contextmanager
def library_errors(when_refused: _WhenRefused = http_failure) -> Iterator[None]:
    """Convert the library's errors inside the block into failures; `when_refused` converts refused requests."""
    from trio_nsq.protocol import NSQError

    try:
        yield
    except NSQError as error:
        raise _library_failure(error, when_refused) from error


def failure_from(error: Exception, when_refused: _WhenRefused = http_failure) -> Failure:
    """Return the failure for an error while the command works. Raises the error again if it is a bug in qcli."""
    from trio_nsq.protocol import NSQError

    if isinstance(error, Failure):
        return error
    if isinstance(error, NSQError):
        return _library_failure(error, when_refused)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return Failure(f"{where}{error.strerror or error}.")
    raise error from None


def _library_failure(error: Exception, when_refused: _WhenRefused) -> Failure:
    from trio_nsq.client import BrokerUnreachable, RequestRefused

    if isinstance(error, RequestRefused):
        return when_refused(error)
    if isinstance(error, BrokerUnreachable):
        return http_failure(error)
    text = str(error)
    is_url = "://" in text.partition(" ")[0]
    return Failure((text if is_url else text[:1].upper() + text[1:]) + "." * (not text.endswith(".")))


def better_engine(size_bytes: int, tasks: int, what: str, min_cores: int = 2) -> tuple[str, str]:
    """Return the faster engine for this many bytes in this many tasks, and a reason that users should know.

    The reason is empty if this process is the faster one: most users have no Spark, and need none.

    Args:
        what: The name of a task, such as `range`.
        min_cores: With fewer cores, this process is faster than Spark at any size.
    """
    import os

    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return "spark", "spark-submit runs this"
    if size_bytes < SPARK_WORTH_BYTES or tasks < 2 or (os.cpu_count() or 1) < min_cores:
        return "inline", ""
    much = f"{size(size_bytes)} in {count_of(tasks, what)}"
    try:
        from trio_nsq.spark.runtime.java import find_java_home
        from trio_nsq.spark.runtime.spark_engine import check_spark

        check_spark()
        find_java_home()
    except Exception as error:
        return "inline", f"{much} would be faster with Spark, but {error}"
    return "spark", much


def useful_processes(size_bytes: int, tasks: int) -> int:
    """Return how many processes make an export of this size faster than one does."""
    import os

    if size_bytes < PROCESSES_WORTH_BYTES:
        return 1
    # One process reads while its second thread compresses, and the broker may be on this machine, too.
    return max(1, min(tasks, (os.cpu_count() or 1) // 2))


def local_engine(stack: ExitStack, processes: int) -> Engine:
    """Return the engine without Spark. Its processes end with the stack."""
    from trio_nsq.spark.runtime.engine import run_inline
    from trio_nsq.spark.runtime.processes import ProcessEngine

    return run_inline if processes == 1 else stack.enter_context(ProcessEngine(processes))


def check_engine(engine: str, master: str | None, processes: int | None) -> None:
    """Raises UsageError for options of `engine_options` that exclude each other."""
    if engine == "inline" and master is not None:
        raise click.UsageError("--engine inline and --master exclude each other.")
    if processes is not None and (engine == "spark" or master is not None):
        raise click.UsageError("--jobs is for work without Spark, which has its own workers.")


def spark_engine(
    master: str | None, name: str = "qcli to-parquet", memory: str = "512m"
) -> AbstractContextManager[SparkEngine]:
    """Start Spark for the time of the block; see `open_spark`. Notes are printed, unless the command has `--quiet`."""
    import logging

    from trio_nsq.spark.runtime.spark_engine import open_spark

    # py4j logs each lost connection to the JVM at the root logger; the command reports it once.
    logging.getLogger().addHandler(logging.NullHandler())
    quiet = click.get_current_context().params["quiet"]
    return open_spark(master, name, memory, None if quiet else lambda text: print_diagnostic(f"Note: {text}"))
