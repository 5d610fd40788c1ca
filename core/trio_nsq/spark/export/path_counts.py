"""Count values by the path of their field. Names of fields come from bodies, so their number and length have limits."""

from collections.abc import Mapping, MutableMapping

OTHER_PATHS = "..."
"""The path of the values whose own paths have no count."""
_MAX_PATHS = 1_000
_MAX_PATH_CHARS = 255


def count_path(counts: MutableMapping[str, int], path: str, values: int = 1) -> None:
    """Add to the count of a path; to that of `OTHER_PATHS` if it is new and there are 1,000, or if it is too long."""
    if path not in counts and (len(counts) >= _MAX_PATHS or len(path) > _MAX_PATH_CHARS):
        path = OTHER_PATHS
    counts[path] = counts.get(path, 0) + values


def sum_of_counts(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of both, by path."""
    found = dict(one)
    for path, values in other.items():
        count_path(found, path, values)
    return found
