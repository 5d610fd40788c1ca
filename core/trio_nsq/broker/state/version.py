"""Version numbers: the checkpointer uses them to find the topics and channels with unsaved changes."""


class Version:
    """Counts the changes to the saved state of a topic or a channel.

    Each saved part (a cursor, messages in flight, ...) has its owner's version. Every method that changes the part
    increments it, so callers need not.

    Args:
        topic: The version of the channel's topic, which also counts the changes of its channels. None: this is a
            topic's version.

    Attributes:
        number: For a topic: the number of changes. For a channel: the topic's number after the channel's last change.
    """

    __slots__ = ("_changed", "_name", "_topic", "number")

    def __init__(self, topic: "Version | None" = None) -> None:
        self.number: int = 0
        self._topic = topic
        self._name = ""
        self._changed: set[str] | None = None

    def report_to(self, changed: set[str] | None, name: str) -> None:
        """From now on, add a topic's name to this set when the topic changes; None: to no set."""
        self._changed = changed
        self._name = name

    def increment(self) -> None:
        """Record a change. This is the only place where one is recorded."""
        topic = self._topic or self
        self.number = topic.number = topic.number + 1
        if topic._changed is not None:
            topic._changed.add(topic._name)
