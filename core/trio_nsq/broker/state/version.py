"""Version numbers: how a checkpointer finds the topics and channels that have changed since they were saved."""


class Version:
    """Counts the changes of what a checkpoint saves, of a topic or of one of its channels.

    Every part that is saved (a cursor, messages in flight, ...) is given the version of its owner, and increments it in
    each of its methods that changes the part. So nobody who calls these methods has to remember it.

    Args:
        topic: The version of the channel's topic, which counts the changes of all its channels, too. None: this is the
            version of a topic.

    Attributes:
        number: Of a topic: how many changes there were. Of a channel: the topic's number after its last change.
    """

    __slots__ = ("_changed", "_name", "_topic", "number")

    def __init__(self, topic: "Version | None" = None) -> None:
        self.number = 0
        self._topic = topic
        self._name = ""
        self._changed: set[str] | None = None

    def report_to(self, changed: set[str] | None, name: str) -> None:
        """Add a topic's name to a set whenever the topic changes, from now on; None: to no set."""
        self._changed = changed
        self._name = name

    def increment(self) -> None:
        """Record a change. This is the only place where one is recorded."""
        topic = self._topic or self
        self.number = topic.number = topic.number + 1
        if topic._changed is not None:
            topic._changed.add(topic._name)
