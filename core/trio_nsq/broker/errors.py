"""What a broker can say of itself. All derive from `NSQError`."""

from ..listening import StartupError as StartupError
from ..log import LogError
from ..protocol import NSQError


class TopicUnavailable(LogError):
    """Nothing can be done with a topic but to delete it, for its files could not be used at the start."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"topic {name} is unavailable: {reason}")


class PublishRefused(NSQError):
    """Nothing of a publish was stored; the text is the reason for the client: `exiting`, or the disk's error."""


class TopicFull(PublishRefused):
    """Nothing of a publish was stored, because of a limit of the topic's; the text says which."""


class LimitReached(PublishRefused):
    """A topic or channel was not made, for there are as many as the broker's options allow; the text says which."""


class SaveError(NSQError):
    """A state cannot be saved; the text is the disk's error."""


class DeletedError(NSQError):
    """Nothing was done: the topic or the channel was deleted meanwhile."""
