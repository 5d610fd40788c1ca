"""What pages ask brokers besides the watcher's polls: once for each snapshot, for all viewers together."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import trio

_T = TypeVar("_T")
_MAX_KEPT = 100


@dataclass(slots=True)
class _Kept(Generic[_T]):
    version: int = -1
    value: _T | None = None
    asking: trio.Lock = field(default_factory=trio.Lock)


class Shared:
    """The newest results, by key: those that were used last. One for a console."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, _Kept[Any]] = OrderedDict()

    async def once(self, key: Hashable, version: int, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Return the result of `ask` for a version of the snapshot, or a newer one. Others that want it wait for it.

        Args:
            key: What is asked for, for example a name and a channel.
        """
        kept: _Kept[_T] = self._kept.setdefault(key, _Kept())
        self._kept.move_to_end(key)
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        async with kept.asking:
            if kept.value is None or kept.version < version:
                kept.value = await ask()
                kept.version = version
            return kept.value
