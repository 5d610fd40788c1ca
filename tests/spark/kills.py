"""A folder of an export whose process is killed at one of its writes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trio_nsq.storage import LocalStorage


class Killed(BaseException):
    """The process was killed."""


class KillingStorage(LocalStorage):
    """A folder in which the process is killed before or after the call number `kill_at` that changes it."""

    def __init__(self, folder: Path, kill_at: int, *, before: bool) -> None:
        super().__init__(folder)
        self._kill_at = kill_at
        self._before = before
        self.calls = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        self.calls += 1
        if self.calls == self._kill_at and self._before:
            raise Killed
        yield
        if self.calls == self._kill_at:
            raise Killed

    def replace(self, name: str, data: bytes, version: str | None) -> str:
        with self.step():
            return super().replace(name, data, version)

    def remove(self, names: Sequence[str]) -> None:  # type: ignore[override]
        for name in names:
            with self.step():
                super().remove([name])
