"""The interface of tasks and of engines that run them, and the engine that runs tasks in this process."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ...protocol.errors import NSQError

Advance = Callable[[int, int], None]
"""Progress callback, called with the number of messages and the bytes of their bodies."""

Done = TypeVar("Done")
_Done = TypeVar("_Done", covariant=True)


class Task(Protocol[_Done]):
    """A part of a job; it can be pickled."""

    @property
    def messages(self) -> int:
        """The number of messages, about."""

    def run(self, advance: Advance | None = None) -> _Done:
        """Run it and return its result. Raises NSQError, OSError: another attempt would not help."""


class Engine(Protocol):
    """Runs tasks, in any order."""

    def __call__(
        self, tasks: Sequence[Task[Done]], finish: Callable[[Done], None], advance: Advance, /
    ) -> None:
        """Run all tasks.

        Args:
            advance: Called with the progress, as far as it is known.

        Raises:
            NSQError, OSError: A task failed; no other task runs any more.
        """


def run_inline(tasks: Sequence[Task[Done]], finish: Callable[[Done], None], advance: Advance) -> None:
    """Run tasks one after the other in this thread; the exception of a signal handler ends it cleanly."""
    for task in tasks:
        finish(task.run(advance))


def attempt(task: Task[Done]) -> Done | NSQError | OSError:
    """Run a task in a worker. Errors that another attempt would not help are returned, so that they keep their type."""
    try:
        return task.run()
    except (NSQError, OSError) as exc:
        return exc
