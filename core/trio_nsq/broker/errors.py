"""What a broker can say of itself. All derive from `NSQError`."""

from ..protocol import NSQError


class StartupError(NSQError):
    """The broker cannot start; the text says what is wrong and what to do, for the person who started it."""


class PublishRefused(NSQError):
    """Nothing of a publish was stored; the text is the reason for the client: `exiting`, or the disk's error."""


class SaveError(NSQError):
    """What was done is done, but would not outlast a restart; the text is the disk's error."""
