"""Errors of the broker. All derive from `NSQError`."""

from ..log import LogError
from ..protocol import NSQError
from ..protocol.errors import StartupError as StartupError


class TopicUnavailable(LogError):
    """The topic's files could not be opened. Until a retry succeeds, the topic can only be deleted."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"topic {name} is unavailable: {reason}")


class PublishRefused(NSQError):
    """A publish was refused; nothing of it was stored. The text is the reason: `exiting`, or a disk error."""


class TopicFull(PublishRefused):
    """A publish was refused because of a limit of the topic, which the text names. Nothing of it was stored."""


class NoChannel(PublishRefused):
    """A message for one channel was refused, because the channel does not exist. Nothing of it was stored."""

    def __init__(self, topic: str, channel: str) -> None:
        super().__init__(f"there is no channel {topic}/{channel}")
        self.channel = channel


class NotLeading(PublishRefused):
    """This member of a cluster no longer leads. What was asked for may have been done, and may be lost."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"this member no longer leads the cluster: {reason}")


class NotArchived(NotLeading):
    """The broker stops before what was asked for is archived. It is on this disk."""

    def __init__(self, reason: str) -> None:
        PublishRefused.__init__(self, f"it is not known to be archived: {reason}")


class TooFewInSync(PublishRefused):
    """Fewer members of the cluster are in sync than a publish needs. Nothing of it was stored."""


class Draining(PublishRefused):
    """A publish was refused because the broker drains. Nothing of it was stored."""

    def __init__(self) -> None:
        super().__init__("DRAINING: this broker accepts no publishes; publish to another broker")


class LimitReached(PublishRefused):
    """A topic, channel or consumer exceeds a limit of the broker's options, which the text names."""


class BatchRefused(NSQError):
    """A numbered batch does not follow the producer's last one. Nothing of it was stored.

    The text begins with a code.

    Attributes:
        code: `OVERLAP`, `GAP` or `FENCED`.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class SaveError(NSQError):
    """A state cannot be saved. The text is the disk error."""


class MoveRefused(NSQError):
    """A request about a move to another broker, or one that a move forbids, was refused. Nothing was changed.

    The text begins with a code.
    """


class OtherLog(NSQError):
    """A request is about another log than the one that the topic has now. Nothing was changed.

    The text begins with a code.
    """

    def __init__(self, topic: str) -> None:
        super().__init__(
            f"OTHER_LOG: topic {topic} has another log; it was deleted and created, or is another broker's"
        )


class ClusterRefusal(NSQError):
    """A change of the cluster was refused. Nothing was changed. The text says why, in a sentence."""


class DeletedError(NSQError):
    """The topic or channel was deleted meanwhile; nothing was changed."""
