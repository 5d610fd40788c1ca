"""Names as segments of a path. Any name gets through, also those that a path cannot hold as they are.

Browsers resolve `.` and `..`, servers split at `/`, and a channel may have the name of a page of its topic, such as
`messages`. Such names are escaped twice; `name_of` removes the second escape after the server has removed the first.
Names of topics and channels have no `%`, so all other paths are nsqadmin's.
"""

from collections.abc import Collection, Iterable
from urllib.parse import quote, unquote


def segment(name: str, reserved: Collection[str] = ()) -> str:
    """Return a name as a segment of a path; `reserved` are names with another meaning there."""
    escaped = name.replace("%", "%25").replace("/", "%2F")
    if name in reserved or name in (".", ".."):
        escaped = f"%{ord(name[0]):02X}{escaped[1:]}"
        escaped = escaped.replace(".", "%2E") if name == ".." else escaped
    return quote(escaped, safe="")


def name_of(decoded: str) -> str:
    """Return the name that `segment` was given, from a segment that the server has decoded."""
    return unquote(decoded)


def reserved_segments(paths: Iterable[str]) -> frozenset[str]:
    """Return the last segments of pages of topics, such as `settings`. A channel of that name must be escaped."""
    prefix = "/topics/{topic}/"
    rest = (path.removeprefix(prefix).split("/")[0] for path in paths if path.startswith(prefix))
    return frozenset(each for each in rest if not each.startswith("{"))
