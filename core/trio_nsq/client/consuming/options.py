"""The options of a consumer, in addition to those of discovery and of every connection."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypedDict

from trio_nsq.text.arguments import in_milliseconds

from ...event_loop.retries import MAX_DELAY_S, MIN_DELAY_S
from ..connection.options import OFF
from ..discovery.options import MINUTE_S, DiscoveryOptions, DiscoverySettings
from .answers import GivenUp, OnFailure


class RunOptions(TypedDict, total=False):
    """The keyword arguments of `Consumer.run` besides `decode`; see there."""

    concurrency: int
    on_failure: OnFailure | None
    max_attempts: int
    given_up: GivenUp | None
    dead_letter_topic: str | None
    auto_touch: bool
    stop_on: Iterable[int]


BackoffStrategy = Literal["exponential", "full_jitter"]


class ConsumerOptions(DiscoveryOptions, total=False):
    """The keyword arguments of `Consumer`; see `ConsumerSettings`, `DiscoverySettings` and
    `ConnectionSettings`."""

    private_channel: bool
    default_requeue_delay_s: float
    max_requeue_delay_s: float
    backoff_strategy: BackoffStrategy
    max_backoff_duration_s: float
    backoff_multiplier_s: float
    backoff_after: int
    low_rdy_idle_timeout_s: float
    low_rdy_timeout_s: float
    rdy_redistribute_interval_s: float
    reconnect_min_s: float
    reconnect_max_s: float
    close_timeout_s: float


@dataclass(frozen=True, slots=True)
class ConsumerSettings(DiscoverySettings):
    """Settings of a consumer, with the Go client's names and defaults where it has them.

    Attributes:
        private_channel: Create the channel as a private one; its name must end in `#ephemeral`. A private channel
            starts at the end of the topic and does not count as its first channel, so it takes no messages from other
            channels. An existing channel is not changed. Only `qcli serve` has private channels; with another broker,
            connecting raises `ConnectionFailed`, unless `Consumer.without_private_channels` allows it.
        default_requeue_delay_s: The requeue delay of a failed message per attempt; within 0..3600.
        max_requeue_delay_s: The upper limit of that delay; within 0..3600.
        backoff_strategy: The length of pauses after failures: `exponential`, or `full_jitter`, a random part of that.
        max_backoff_duration_s: The longest pause after failures, within 0..3600. Pauses stop growing before they exceed
            it. If the first pause would exceed it, as with 0, there are no pauses.
        backoff_multiplier_s: Half of the first pause, within 0..3600; each failure doubles the pause. 0: no pauses.
        backoff_after: How many failures in a row start the first pause, at least 1. The Go client pauses after one.
        low_rdy_idle_timeout_s: With more connections than `max_in_flight`: how long a connection without messages keeps
            its ready count before it passes it to another connection, more than 0.
        low_rdy_timeout_s: The same for a connection with messages, more than 0.
        rdy_redistribute_interval_s: The shortest time between two such redistributions, more than 0.
        reconnect_min_s: The first delay before reconnecting, more than 0.
        reconnect_max_s: The longest delay before reconnecting; delays double.
        close_timeout_s: The longest time for closing; 0: disconnect at once, and leave messages in flight until their
            timeout.

    Raises:
        ValueError: A value is invalid.
    """

    private_channel: bool = False
    default_requeue_delay_s: float = 90.0
    max_requeue_delay_s: float = 15 * MINUTE_S
    backoff_strategy: BackoffStrategy = "exponential"
    max_backoff_duration_s: float = 2 * MINUTE_S
    backoff_multiplier_s: float = 1.0
    backoff_after: int = 5
    low_rdy_idle_timeout_s: float = 10.0
    low_rdy_timeout_s: float = 30.0
    rdy_redistribute_interval_s: float = 5.0
    reconnect_min_s: float = MIN_DELAY_S
    reconnect_max_s: float = MAX_DELAY_S
    close_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        DiscoverySettings.__post_init__(self)  # super() fails here: slots=True creates a new class
        if self.heartbeat_interval_s == OFF:
            raise ValueError("heartbeat_interval_s is -1; brokers accept no subscription without heartbeats")
        for name in (
            "low_rdy_idle_timeout_s",
            "low_rdy_timeout_s",
            "rdy_redistribute_interval_s",
        ):
            self._require(name, getattr(self, name) > 0, "more than 0")
        for name in (
            "default_requeue_delay_s",
            "max_requeue_delay_s",
            "max_backoff_duration_s",
            "backoff_multiplier_s",
        ):
            self._require(name, 0 <= getattr(self, name) <= 60 * MINUTE_S, f"within 0..{60 * MINUTE_S:g}")
        self._require("close_timeout_s", self.close_timeout_s >= 0, "at least 0")
        self._require("backoff_after", self.backoff_after >= 1, "at least 1")

    def requeue_delay_ms(self, attempts: int) -> int:
        """Return the requeue delay of a message that failed at this attempt."""
        delay_s = min(self.default_requeue_delay_s * attempts, self.max_requeue_delay_s)
        return in_milliseconds(delay_s)
