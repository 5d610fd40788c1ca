"""What a broker itself does with messages that fail: the settings `max_attempts` and `dead_letter_topic` of a channel.

A dead letter that the broker makes has its origin, so that `qcli dlq requeue` can return it. The broker makes it when a
message is requeued at its last attempt.
"""

from dataclasses import dataclass, field

import trio

from trio_nsq.client.consuming.options import ConsumerSettings
from trio_nsq.client.errors import BrokerUnreachable, ConnectionFailed, RequestRefused
from trio_nsq.protocol.address import next_port

from ..source.broker_http import BrokerFinder
from ..source.options import BrokerAddresses, SourceOptions

KNOWN_FOR_S = 5.0
"""How long an answer is used: settings may change at any time."""


@dataclass(eq=False, slots=True)
class _Known:
    """The limit of one channel, as last seen."""

    attempts: int = 0
    until: float = 0.0
    lock: trio.Lock = field(default_factory=trio.Lock)


class BrokerLimits:
    """Asks brokers for the settings of a channel.

    Only brokers whose HTTP address is known are asked: those of the options, and, if there is no secret that could go
    to another server, those that listen at the port after the TCP port.
    """

    def __init__(self, sources: SourceOptions) -> None:
        settings = ConsumerSettings(**sources.consumer)
        self._finder = BrokerFinder(sources, sources.brokers, settings)
        self._channel = sources.channel
        self._brokers = {each.tcp: each for each in sources.brokers if each.tcp}
        self._may_guess = not settings.secret
        self._known: dict[tuple[str, str], _Known] = {}

    async def attempts(self, address: str, topic: str) -> int:
        """Return at which attempt the broker (TCP address) makes a message of the topic a dead letter; 0: never."""
        known = self._known.setdefault((address, topic), _Known())
        async with known.lock:
            if trio.current_time() >= known.until:
                known.attempts = await self._ask(address, topic)
                known.until = trio.current_time() + KNOWN_FOR_S
            return known.attempts

    async def _ask(self, address: str, topic: str) -> int:
        guess = BrokerAddresses(address, (next_port(address),) if self._may_guess else ())
        try:
            found = await self._finder.find(self._brokers.get(address, guess))
            if not found.http:
                return 0
            attempts, to = await self._finder.dead_letter_settings(found.http, topic, self._channel)
        except (BrokerUnreachable, ConnectionFailed, RequestRefused):
            return 0  # the program stores the message itself
        return attempts if to else 0
