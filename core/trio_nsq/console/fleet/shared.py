"""What pages ask brokers besides the watcher's polls: once for each snapshot, for all viewers together."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import trio

_T = TypeVar("_T")


@dataclass(slots=True)
class _Kept(Generic[_T]):
    version: int = -1
    value: _T | None = None
    asking: trio.Lock = field(default_factory=trio.Lock)


class Shared:
    """The newest results, by name. One for a console."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept[Any]] = {}

    async def once(self, name: str, version: int, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Return the result of `ask` for a version of the snapshot. Others that want the same wait for it.

        Args:
            name: A constant: the results of each name are kept.
        """
        kept: _Kept[_T] = self._kept.setdefault(name, _Kept())
        async with kept.asking:
            if kept.version != version or kept.value is None:
                kept.value = await ask()
                kept.version = version
            return kept.value
