"""What commands that work on a lot of messages share: who does the work, and how far it has come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from ...broker.connection_options import Connecting
from ...framework.errors import Failure
from ...framework.output import count_of, plain_terminal, rate, size, talks_to_live_terminal

if TYPE_CHECKING:
    from trio_nsq.client.connection.tls import TLSFiles
    from trio_nsq.spark.runtime.engine import Advance
    from trio_nsq.spark.runtime.spark_engine import SparkEngine

SPARK_WORTH_BYTES = 4 * 1024**3
"""With less to be read, this process is done before Spark has begun and caught up."""
_REFRESH_S = 0.2


def check_extra(command: str) -> None:
    """Raises Failure if what nothing works without is not installed, for the command of this name."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        from trio_nsq.extras import install_hint

        raise Failure(
            f"{command} needs the extra 'spark', which is not installed ({error}): {install_hint('spark')}. "
            "With pyarrow alone, pip install pyarrow, --engine inline works."
        ) from error


def tls_files(connecting: Connecting) -> TLSFiles:
    """What tasks are told of how to speak https."""
    from trio_nsq.client.connection.tls import TLSFiles

    return TLSFiles(
        connecting.tls_root_ca_file,
        connecting.tls_cert,
        connecting.tls_key,
        connecting.tls_insecure_skip_verify,
    )


def said_by_library(error: Exception) -> Failure:
    """The failure that says what the library did, as a sentence."""
    text = str(error)
    return Failure(text[:1].upper() + text[1:] + "." * (not text.endswith(".")))


def failure_of(error: Exception, failures: Callable[[], AbstractContextManager[None]]) -> Failure:
    """What to say of an error that came while it was at work; raises it, if it is a mistake of ours.

    Args:
        error: What came.
        failures: What turns errors of the library inside it into failures.
    """
    try:
        with failures():
            raise error
    except Failure as failure:
        return failure
    except OSError as failure:
        where = f"{failure.filename}: " if failure.filename else ""
        return Failure(f"{where}{failure.strerror or failure}.")
    except Exception:
        raise error from None


@contextmanager
def progress(total: int | None, quiet: bool) -> Iterator[Advance]:
    """Show a bar on standard error while the block runs, if that is a terminal; None: nobody knows how long it gets."""
    if quiet or not talks_to_live_terminal():
        yield lambda _messages, _size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("messages, {task.fields[read]}, {task.fields[speed]} messages/s"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True, no_color=plain_terminal())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        shown = bar.add_task("", total=total, read="0 B", speed="0")
        begun_s = shown_s = time.monotonic()
        messages = read = 0

        def advance(more: int, more_bytes: int) -> None:
            nonlocal messages, read, shown_s
            messages += more
            read += more_bytes
            now_s = time.monotonic()
            if now_s - shown_s >= _REFRESH_S:
                shown_s = now_s
                speed = rate(messages / (now_s - begun_s))
                bar.update(shown, completed=messages, read=size(read), speed=speed, refresh=True)

        yield advance


# ---------------------------------------------------------------------- engines


def better_engine(size_bytes: int, tasks: int, what: str) -> tuple[str, str]:
    """The engine that is done sooner, and why.

    Args:
        size_bytes: To be read.
        tasks: How many there are.
        what: One of them is.
    """
    import os

    much = f"{size(size_bytes)} in {count_of(tasks, what)}"
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return "spark", "spark-submit runs this"
    if size_bytes < SPARK_WORTH_BYTES or tasks < 2 or (os.cpu_count() or 1) < 2:
        return "inline", f"{much}; Spark would take longer to start than it saves (--engine spark)"
    try:
        from trio_nsq.spark.runtime.java import find_java_home
        from trio_nsq.spark.runtime.spark_engine import check_spark

        check_spark()
        find_java_home()
    except Exception as error:
        return "inline", f"{much} would be faster with Spark, but {error}"
    return "spark", much


@contextmanager
def spark_engine(
    master: str | None, name: str = "qcli to-parquet", memory: str = "512m"
) -> Iterator[SparkEngine]:
    """Spark, while the block runs; see `open_spark`."""
    import logging

    from trio_nsq.spark.runtime.spark_engine import open_spark

    # py4j logs every connection that a JVM does not answer on any more, at the root; we say that once.
    logging.getLogger().addHandler(logging.NullHandler())
    with open_spark(master, name, memory) as engine:
        yield engine
