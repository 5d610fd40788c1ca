"""The options of a producer, in addition to those of discovery and of every connection."""

from dataclasses import dataclass

from trio_nsq.protocol import Limits
from trio_nsq.protocol.limits import MIB

from ...event_loop.retries import MAX_DELAY_S, MIN_DELAY_S, PATIENCE_S
from ..arguments import check_producer
from ..discovery.options import DiscoveryOptions, DiscoverySettings
from .limits import PublishLimits
from .queue import MPUB_TARGET_BYTES

_NSQD = Limits()


class ProducerOptions(DiscoveryOptions, total=False):
    """The keyword arguments of `Producer`; see `ProducerSettings`, `DiscoverySettings` and `ConnectionSettings`."""

    name: str | None
    patience_s: float
    retry: bool
    ordered: bool
    wait_connected: bool
    max_in_flight_bytes: int
    max_msg_size: int
    max_body_size: int
    max_req_timeout_s: float | None
    silence_timeout_s: float
    publish_timeout_s: float | None
    reconnect_min_s: float
    reconnect_max_s: float
    close_timeout_s: float


@dataclass(frozen=True, slots=True)
class ProducerSettings(DiscoverySettings):
    """Settings of a producer.

    Attributes:
        name: The producer numbers its messages under this name, 1 to 64 of A-Z a-z 0-9 . _ : -, so that each is stored
            once. For `qcli serve` only; not with `retry` or `ordered`. None: no numbers.
        patience_s: With a name: how long to try a publish again after its first failure, at least 0; math.inf: until
            the producer is closed.
        retry: If a broker does not acknowledge a publish because the connection is lost or it cannot store it, publish
            again through each other broker once. If the first broker did store it, the message is stored twice.
        ordered: If a publish fails, fail all later ones that are not acknowledged; they are not stored. So the stored
            messages never have a gap. With one broker only, and without discovery services.
        wait_connected: Opening waits for a broker, and fails if none can be reached. False: publishes fail until one
            can. Not with discovery services alone.
        max_in_flight_bytes: The limit of unacknowledged bytes per broker; more wait in the queue. A larger command is
            sent alone.
        max_msg_size: The brokers' limit for a message, in bytes.
        max_body_size: The brokers' limit for the body of an MPUB, in bytes.
        max_req_timeout_s: The brokers' limit for deferring a message. None: not checked; a broker that refuses closes
            the connection. nsqd's option is `--max-req-timeout`, one hour by default; that of `qcli serve` is
            `--max-defer`, one year by default.
        silence_timeout_s: A broker that answers no publish for this time, although some are unanswered, is silent: hung
            or slow. Until it answers, new publishes and those that were not sent go to the other brokers. More than 0.
        publish_timeout_s: After this time without an answer the connection counts as lost: unanswered publishes fail,
            or go to another broker with `retry`. More than 0; None: only missing heartbeats end the connection.
        reconnect_min_s: How long a broker is excluded after its first failure.
        reconnect_max_s: The longest time a broker is excluded.
        close_timeout_s: How long closing waits for acknowledgements; 0: does not wait.

    Raises:
        ValueError: A value is invalid.
    """

    name: str | None = None
    patience_s: float = PATIENCE_S
    retry: bool = False
    ordered: bool = False
    wait_connected: bool = True
    max_in_flight_bytes: int = 4 * MIB
    max_msg_size: int = _NSQD.max_msg_size
    max_body_size: int = _NSQD.max_body_size
    max_req_timeout_s: float | None = None
    silence_timeout_s: float = 0.5
    publish_timeout_s: float | None = 30.0
    reconnect_min_s: float = MIN_DELAY_S
    reconnect_max_s: float = MAX_DELAY_S
    close_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        DiscoverySettings.__post_init__(self)  # super() fails here: slots=True creates a new class
        if self.name is not None:
            check_producer(self.name)
            self._require("retry", not self.retry, "False with a name, which tries again without doubling")
            self._require(
                "ordered", not self.ordered, "False with a name, which keeps the order of each topic"
            )
        self._require("patience_s", self.patience_s >= 0, "at least 0")
        self._require("max_in_flight_bytes", self.max_in_flight_bytes >= 1, "at least 1")
        self._require("silence_timeout_s", self.silence_timeout_s > 0, "more than 0")
        timeout_s = self.publish_timeout_s
        self._require("publish_timeout_s", timeout_s is None or timeout_s > 0, "more than 0, or None")
        self._require("close_timeout_s", self.close_timeout_s >= 0, "at least 0")
        defer_s = self.max_req_timeout_s
        self._require("max_req_timeout_s", defer_s is None or defer_s >= 0, "at least 0, or None")
        _ = self.limits

    @property
    def limits(self) -> PublishLimits:
        """The limits of the brokers. Raises ValueError."""
        return PublishLimits(self.max_msg_size, self.max_body_size, self.max_req_timeout_s)

    @property
    def part_bytes(self) -> int:
        """The size at which lists are split, and up to which single messages are combined."""
        return min(MPUB_TARGET_BYTES, self.limits.max_set_bytes, self.max_in_flight_bytes)
