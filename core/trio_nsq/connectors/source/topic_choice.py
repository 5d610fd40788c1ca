"""Which topics to read: those that are named, and those whose name matches a pattern."""

from collections.abc import Callable, Collection, Iterable

from ...api.lookupd import Node
from ...protocol.names import is_valid_name


class TopicChoice:
    """Topics by name, and by a pattern.

    Args:
        topics: Names of topics.
        pattern: A regular expression (RE2) that has a match in the name; None: only `topics`.
        left_out: Whether the pattern does not select a topic.
    """

    def __init__(
        self,
        topics: Collection[str],
        pattern: str | None,
        left_out: Callable[[str], bool] = lambda topic: False,
    ) -> None:
        self._topics = topics
        self._pattern = None
        self._left_out = left_out
        if pattern is not None:
            import re2  # type: ignore[import-untyped]  # no types are published

            self._pattern = re2.compile(pattern)

    def __contains__(self, topic: str) -> bool:
        return topic in self._topics or (
            self._pattern is not None
            and is_valid_name(topic)  # a discovery service can answer anything
            and self._pattern.search(topic) is not None
            and not self._left_out(topic)
        )


def topics_of(nodes: Iterable[Node]) -> set[str]:
    """Return the topics of a broker that is listed by several services, without those that are being deleted."""
    listed = list(nodes)
    topics = {topic for node in listed for topic in node.topics}
    return topics - {topic for node in listed for topic in node.tombstones}
