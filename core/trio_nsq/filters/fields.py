"""Reduce JSON objects to some of their members. The text of the values does not change."""

import json
from collections.abc import Mapping, Sequence
from typing import Union

from .conditions import Path
from .json_text import members_of

_Tree = dict[str, Union["_Tree", None]]
"""The members to keep, by name; None: the whole member."""


class FieldList:
    """The members to keep, in the order of the output. Nested members stay nested."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._tree: _Tree = {}
        for path in paths:
            _add(self._tree, path)
        self._names = {name: _encoded(name) for path in paths for name in path}

    def select(self, members: Mapping[str, str]) -> str:
        """Return an object with these members of an object, `{}` if it has none of them."""
        return self._select(members, self._tree)

    def _select(self, members: Mapping[str, str], tree: _Tree) -> str:
        parts = []
        for name, below in tree.items():
            value = members.get(name)
            if value is not None and below is not None:
                inner = members_of(value)
                value = self._select(inner, below) if inner is not None else None
            if value is not None and (below is None or value != "{}"):
                parts.append(f"{self._names[name]}:{value}")
        return f"{{{','.join(parts)}}}"


def _add(tree: _Tree, path: Path) -> None:
    for name in path[:-1]:
        below = tree.setdefault(name, {})
        if below is None:
            return  # the whole member is kept
        tree = below
    tree[path[-1]] = None


def _encoded(name: str) -> str:
    """Return a name as a JSON string; bytes of the command line that are not UTF-8 stay."""
    return json.dumps(name, ensure_ascii=False)
