"""The results of `pub`: messages acknowledged, in doubt and not stored."""

from dataclasses import dataclass, field

from trio_nsq.client import PublishFailed

from ...framework.errors import ExitCode


@dataclass(slots=True)
class BrokerResult:
    """The results at one broker so far.

    Attributes:
        acknowledged_bytes: Bytes of the bodies that the broker has acknowledged.
        maybe_stored: Messages that were sent and not acknowledged.
        not_stored: Messages that were read and are not stored.
        moved_in_doubt: Messages that were sent and not acknowledged, and then published to another broker.
        failure: The first failure.
    """

    address: str
    acknowledged: int = 0
    acknowledged_bytes: int = 0
    maybe_stored: int = 0
    not_stored: int = 0
    moved_in_doubt: int = 0
    failure: PublishFailed | None = None


@dataclass(slots=True)
class PublishResult:
    """The results so far.

    Attributes:
        brokers: The results at each broker; at least one.
        topics: The topics of messages that were read.
        is_spread: Whether each message goes to one of the brokers. False: to every broker.
        total_bytes: The size of the inputs; None: unknown.
        read_bytes: How much of it was read.
        empty: Empty messages, which are skipped.
        skipped: Other parts of the input that were skipped.
        unfinished_bytes: The bytes of a message that was incomplete at a signal; it is not published.
        input_failure: Why reading the input failed.
        stopped: The exit code of the signal that arrived.
    """

    brokers: list[BrokerResult]
    is_spread: bool
    total_bytes: int | None = None
    topics: set[str] = field(default_factory=set)
    read_bytes: int = 0
    empty: int = 0
    skipped: int = 0
    unfinished_bytes: int = 0
    input_failure: str | None = None
    stopped: ExitCode | None = None

    @property
    def acknowledged(self) -> int:
        """Messages that were acknowledged by every broker that should store them."""
        counts = [broker.acknowledged for broker in self.brokers]
        return sum(counts) if self.is_spread else min(counts)

    @property
    def acknowledged_bytes(self) -> int:
        """The bytes of their bodies."""
        counts = [broker.acknowledged_bytes for broker in self.brokers]
        return sum(counts) if self.is_spread else min(counts)

    @property
    def share(self) -> float | None:
        """The part of the inputs that was read, 0 to 1; None: unknown."""
        return min(1.0, self.read_bytes / self.total_bytes) if self.total_bytes else None

    @property
    def over(self) -> bool:
        """Whether to stop reading."""
        failed = any(broker.failure for broker in self.brokers)
        return bool(failed or self.input_failure or self.stopped)
