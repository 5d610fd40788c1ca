"""The hosts of brokers that a client of a discovery service accepts."""

import re
from collections.abc import Iterable


class HostPatterns:
    """Names and addresses of hosts; `*` stands for any characters. Letter case does not matter.

    Args:
        patterns: If empty, every host is allowed.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self._patterns = [
            re.compile(".*".join(map(re.escape, _normal(pattern).split("*"))), re.DOTALL)
            for pattern in patterns
        ]

    def allow(self, host: str) -> bool:
        """Whether the whole name matches a pattern."""
        name = _normal(host)
        return not self._patterns or any(pattern.fullmatch(name) for pattern in self._patterns)


def _normal(host: str) -> str:
    return host.strip("[]").lower().rstrip(".")
