"""Who works through the tasks of a plan: this process here, and what `spark_engine` has its workers do.

What a task does is its own affair: it is asked to run, and gives a note of what became of it.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ...protocol.errors import NSQError

Advance = Callable[[int, int], None]
"""Is told of messages and bytes of bodies as they are dealt with."""

Done = TypeVar("Done")
_Done = TypeVar("_Done", covariant=True)


class Task(Protocol[_Done]):
    """Part of a plan; can be pickled."""

    @property
    def messages(self) -> int:
        """How many it deals with, about."""
        ...

    def run(self, advance: Advance | None = None) -> _Done:
        """Do it. Raises NSQError, OSError: what another attempt would not mend."""
        ...


class Engine(Protocol):
    """Works through tasks, in any order."""

    def __call__(
        self, tasks: Sequence[Task[Done]], finish: Callable[[Done], None], advance: Advance, /
    ) -> None:
        """Have all of them done.

        Args:
            tasks: The tasks, at least one.
            finish: Is told of each that is done.
            advance: Is told of messages and bytes as far as that is known.

        Raises:
            NSQError, OSError: What went wrong with one of them; nobody works on any other any more.
        """
        ...


def run_inline(tasks: Sequence[Task[Done]], finish: Callable[[Done], None], advance: Advance) -> None:
    """One after the other, in this thread; a signal's exception ends it, with nothing left half done."""
    for task in tasks:
        finish(task.run(advance))


def attempt(task: Task[Done]) -> Done | NSQError | OSError:
    """One task; what goes wrong in a way that another attempt would not mend is returned, and keeps its type."""
    try:
        return task.run()
    except (NSQError, OSError) as exc:
        return exc
