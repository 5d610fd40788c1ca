"""Who works through the tasks of a plan: this process here, and what `spark_engine` has its workers do."""

from collections.abc import Callable, Sequence

from ..protocol.errors import NSQError
from .export import Advance, ExportTask, export_range
from .manifest import RangeDone


def run_inline(tasks: Sequence[ExportTask], finish: Callable[[RangeDone], None], advance: Advance) -> None:
    """One after the other, in this thread; a signal's exception ends it, with nothing left half done."""
    for task in tasks:
        finish(export_range(task, advance))


def attempt(task: ExportTask) -> RangeDone | NSQError | OSError:
    """One task; what goes wrong in a way that another attempt would not mend is returned, and keeps its type."""
    try:
        return export_range(task)
    except (NSQError, OSError) as exc:
        return exc
