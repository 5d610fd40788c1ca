"""How well names match what was typed: the order of results of the page that finds everything. Pure."""

import heapq
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")
MAX_TYPED = 200


def best_matches(typed: str, items: Iterable[_T], name: Callable[[_T], str], most: int) -> list[_T]:
    """Return the items whose names match best, the best first. Equal ones keep their order.

    A name matches if it has the typed characters in their order: `orbi` matches `orders/billing`. The same name is
    better than its beginning, this than the beginning of a word in it, this than any part, and a part is better than
    characters with others between them. The case of letters and blanks do not count.

    Args:
        name: Returns the name of an item.
        most: How many are returned.
    """
    wanted = "".join(typed[:MAX_TYPED].split()).casefold()
    if not wanted:
        return [item for _, item in zip(range(most), items, strict=False)]
    # Each character is searched for up to its first place only: without `*+`, the time would grow exponentially.
    scattered = re.compile("".join(f"[^{char}]*+{char}" for char in map(re.escape, wanted)))

    def ranked() -> Iterator[tuple[tuple[int, int, int], int, _T]]:
        for number, item in enumerate(items):
            if (rank := _rank(wanted, scattered, name(item).casefold())) is not None:
                yield rank, number, item

    return [item for _, _, item in heapq.nsmallest(most, ranked(), key=lambda each: each[:2])]


def _rank(wanted: str, scattered: re.Pattern[str], name: str) -> tuple[int, int, int] | None:
    """Return the rank of a name, the lowest for the best; None: it does not match."""
    at = name.find(wanted)
    if at == 0:
        return (0 if len(name) == len(wanted) else 1, 0, len(name))
    if at > 0:
        return (3 if name[at - 1].isalnum() else 2, 0, len(name))
    found = scattered.match(name)
    return None if found is None else (4, found.end() - name.index(wanted[0]), len(name))
