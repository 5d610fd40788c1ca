"""What can be set for a consumer, beyond what every connection has."""

from dataclasses import dataclass
from typing import Literal, get_args

from trio_nsq.protocol.limits import SECOND_MS

from ..connection.options import OFF, ConnectionOptions, ConnectionSettings
from ..connection.reconnect import MAX_DELAY_S, MIN_DELAY_S

BackoffStrategy = Literal["exponential", "full_jitter"]
BACKOFF_STRATEGIES: tuple[str, ...] = get_args(BackoffStrategy)
MINUTE_S = 60.0


class ConsumerOptions(ConnectionOptions, total=False):
    """The keyword arguments of `Consumer`; `ConsumerSettings` and `ConnectionSettings` say what each means."""

    private_channel: bool
    lookupd_poll_interval_s: float
    lookupd_poll_jitter: float
    lookupd_poll_timeout_s: float
    default_requeue_delay_ms: int
    max_requeue_delay_ms: int
    backoff_strategy: BackoffStrategy
    max_backoff_duration_s: float
    backoff_multiplier_s: float
    low_rdy_idle_timeout_s: float
    low_rdy_timeout_s: float
    rdy_redistribute_interval_s: float
    reconnect_min_s: float
    reconnect_max_s: float
    close_timeout_s: float


@dataclass(frozen=True, slots=True)
class ConsumerSettings(ConnectionSettings):
    """Settings of a consumer, with the Go client's names and defaults where it has them.

    Attributes:
        private_channel: Have the channel, whose name must end in `#ephemeral`, made a private one: it begins at the end
            of the topic, and does not count as its first channel, so the consumer takes nothing from anybody. A
            channel that exists stays what it is. Only `qcli serve` has private channels; any other is refused with
            `ConnectionFailed`, unless `Consumer.without_private_channels` says otherwise.
        lookupd_poll_interval_s: How often the discovery services are asked, more than 0. They are also asked when a
            connection is lost, and earlier, after 1, 2, 4, ... seconds, while none of them knows
            a broker with the topic.
        lookupd_poll_jitter: Up to this part of the interval, at random, is added once, before the second time, so that
            consumers that were started together do not ask together; within 0..1.
        lookupd_poll_timeout_s: How long a discovery service may take to answer, more than 0.
        default_requeue_delay_ms: How long a message that failed stays away, times its attempts; within 0..3600000.
        max_requeue_delay_ms: But no longer than this; within 0..3600000.
        backoff_strategy: How long a pause after failures is: `exponential`, or `full_jitter`, a random part of that.
        max_backoff_duration_s: The longest pause after failures, within 0..3600. Pauses stop growing before they would
            be longer; if even the first one would be, as with 0, there are none.
        backoff_multiplier_s: Half of the first pause, within 0..3600; each failure doubles it. 0: no pauses.
        low_rdy_idle_timeout_s: With more connections than messages may be in flight: how long one without messages
            keeps what others wait for, more than 0.
        low_rdy_timeout_s: How long one with messages does, more than 0.
        rdy_redistribute_interval_s: How long to wait at least between two times of passing it on, more than 0.
        reconnect_min_s: The first delay before a connection is made again, more than 0.
        reconnect_max_s: The longest one; they double.
        close_timeout_s: How long leaving may take at most; 0: just hang up, leaving messages in flight until
            their time is up.

    Raises:
        ValueError: A value that cannot work.
    """

    private_channel: bool = False
    lookupd_poll_interval_s: float = MINUTE_S
    lookupd_poll_jitter: float = 0.3
    lookupd_poll_timeout_s: float = MINUTE_S
    default_requeue_delay_ms: int = 90 * SECOND_MS
    max_requeue_delay_ms: int = 15 * 60 * SECOND_MS
    backoff_strategy: BackoffStrategy = "exponential"
    max_backoff_duration_s: float = 2 * MINUTE_S
    backoff_multiplier_s: float = 1.0
    low_rdy_idle_timeout_s: float = 10.0
    low_rdy_timeout_s: float = 30.0
    rdy_redistribute_interval_s: float = 5.0
    reconnect_min_s: float = MIN_DELAY_S
    reconnect_max_s: float = MAX_DELAY_S
    close_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        ConnectionSettings.__post_init__(self)  # super() does not find it: slots make a new class of this one
        if self.heartbeat_interval_ms == OFF:
            raise ValueError("heartbeat_interval_ms is -1; brokers let nobody subscribe without heartbeats")
        for name in (
            "lookupd_poll_interval_s",
            "lookupd_poll_timeout_s",
            "low_rdy_idle_timeout_s",
            "low_rdy_timeout_s",
            "rdy_redistribute_interval_s",
        ):
            self._require(name, getattr(self, name) > 0, "more than 0")
        for name, most in (
            ("lookupd_poll_jitter", 1),
            ("default_requeue_delay_ms", 60 * 60 * SECOND_MS),
            ("max_requeue_delay_ms", 60 * 60 * SECOND_MS),
            ("max_backoff_duration_s", 60 * MINUTE_S),
            ("backoff_multiplier_s", 60 * MINUTE_S),
        ):
            self._require(name, 0 <= getattr(self, name) <= most, f"within 0..{most:g}")
        self._require("close_timeout_s", self.close_timeout_s >= 0, "at least 0")
        if self.backoff_strategy not in BACKOFF_STRATEGIES:
            raise ValueError(
                f"backoff_strategy is {self.backoff_strategy!r}; it must be one of {', '.join(BACKOFF_STRATEGIES)}"
            )

    def requeue_delay_ms(self, attempts: int) -> int:
        """The requeue delay of a message that failed at this attempt."""
        return min(self.default_requeue_delay_ms * attempts, self.max_requeue_delay_ms)
