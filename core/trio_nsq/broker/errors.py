"""What a broker can say of itself. All derive from `NSQError`."""

from ..listening import StartupError as StartupError
from ..protocol import NSQError


class PublishRefused(NSQError):
    """Nothing of a publish was stored; the text is the reason for the client: `exiting`, or the disk's error."""


class TopicFull(PublishRefused):
    """Nothing of a publish was stored, because of a limit of the topic's; the text says which."""


class SaveError(NSQError):
    """What was done is done, but would not outlast a restart; the text is the disk's error."""
