"""The hosts of brokers that a client of a discovery service accepts."""

import re
from collections.abc import Callable, Iterable


def host_filter(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return whether a name or address of a host matches one of these patterns; without any, every host does.

    In a pattern, `*` stands for any characters. Letter case does not matter.
    """
    compiled = [
        re.compile(".*".join(map(re.escape, normal_host(pattern).split("*"))), re.DOTALL)
        for pattern in patterns
    ]
    return lambda host: not compiled or any(pattern.fullmatch(normal_host(host)) for pattern in compiled)


def normal_host(host: str) -> str:
    """Return a name or address of a host, comparable: without letter case, brackets and a dot at its end."""
    return host.strip("[]").lower().rstrip(".")
