"""The errors of copying to other brokers."""

from ...protocol.errors import NSQError
from ..source.log_source import LogChanged


class Unavailable(NSQError):
    """A destination did not store messages for a reason that may pass.

    Attributes:
        address: The destination.
        reason: The reason, as text.
        in_doubt: The messages may be stored.
        is_full: The broker answered that it cannot store them now. It may have room for fewer messages.
    """

    def __init__(self, address: str, reason: str, *, in_doubt: bool = False, is_full: bool = False) -> None:
        super().__init__(f"the broker at {address} is unavailable: {reason}")
        self.address = address
        self.reason = reason
        self.in_doubt = in_doubt
        self.is_full = is_full


class CopiesLost(LogChanged):
    """A destination lacks messages that it had stored. The source is opened again, at the last one that is there."""

    def __init__(self, topic: str, address: str) -> None:
        super().__init__(
            f"the broker at {address} lacks messages that were copied to topic {topic}: it was restored from a backup, "
            "or the topic was deleted"
        )


class NoDestination(NSQError):
    """No destination can be reached at the start. The text has the addresses and the reasons.

    If there is one, the error is the `__cause__`.
    """


class CopyRefused(NSQError):
    """A destination refuses messages for a reason that does not pass. The text has the reason and what to do."""


class LoopFound(NSQError):
    """A topic would be copied to itself."""

    def __init__(self, topic: str, address: str) -> None:
        super().__init__(
            f"topic {topic} would be copied to itself: {address} is the source and a destination. "
            "Name another topic or another destination"
        )
