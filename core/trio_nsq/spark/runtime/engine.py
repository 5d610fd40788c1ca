"""The interfaces of tasks and engines, and an engine that runs tasks in this process."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ...protocol.errors import NSQError
from ...storage import KnownAccess

Advance = Callable[[int, int], None]
"""A progress callback, called with the number of messages and the size of their bodies."""

Done = TypeVar("Done")
_Done = TypeVar("_Done", covariant=True)


class Task(Protocol[_Done]):
    """A part of a job. Can be pickled."""

    @property
    def messages(self) -> int:
        """The approximate number of messages."""

    def run(self, advance: Advance | None = None) -> _Done:
        """Run the task and return its result. Raises NSQError or OSError if another attempt would not help."""


class Engine(Protocol):
    """Runs tasks, in any order."""

    def __call__(
        self, tasks: Sequence[Task[Done]], finish: Callable[[Done], None], advance: Advance, /
    ) -> None:
        """Run all tasks.

        Args:
            finish: Called with the result of each task.
            advance: Called with the progress, if known.

        Raises:
            NSQError, OSError: A task failed; all other tasks have ended.
        """


def run_inline(tasks: Sequence[Task[Done]], finish: Callable[[Done], None], advance: Advance) -> None:
    """Run tasks one after the other in this thread; an exception of a signal handler ends it cleanly."""
    for task in tasks:
        finish(task.run(advance))


def attempt(access: KnownAccess, task: Task[Done]) -> Done | NSQError | OSError:
    """Run a task in a worker. Return permanent errors instead of raising them, so that they keep their type.

    Args:
        access: How the process that planned the task reaches object stores.
    """
    access.keep()
    try:
        return task.run()
    except (NSQError, OSError) as exc:
        return exc
