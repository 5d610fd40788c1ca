"""Query discovery services (nsqlookupd) for the brokers that have a topic."""

import logging
from collections.abc import Callable, Sequence

import trio

from ...lookup.hosts import HostPatterns
from ...lookup.query import LookupFailed, ProducerAddress, lookup_topic
from ...protocol.address import format_address, without_secrets
from ...secret import SecretFileError
from ..connection.addresses import nsqd_address
from ..errors import ConnectionFailed
from ..consuming.options import ConsumerSettings

FIRST_PAUSE_S = 1.0

_logger = logging.getLogger("trio_nsq.client")


class Discovery:
    """Queries all services at intervals. The latest answer of each counts, so a service that is down removes no broker.

    Args:
        addresses: The HTTP addresses of the services.
        random: Returns numbers in [0, 1), for the jitter.
        found: Called with the brokers of each answer, `host:port` each.

    Attributes:
        answered: Whether any service has ever answered.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        topic: str,
        settings: ConsumerSettings,
        random: Callable[[], float],
        found: Callable[[list[str]], None],
    ) -> None:
        self.answered = False
        self._topic = topic
        self._settings = settings
        self._random = random
        self._found = found
        self._is_allowed = HostPatterns(settings.lookupd_allowed_hosts).allow
        self._tls = settings.client_context() if settings.has_tls_files else None
        self._answers: dict[str, list[str]] = {address: [] for address in addresses}
        self._failures: dict[str, LookupFailed] = {}
        self._again = trio.Event()

    def names(self, nsqd_address: str) -> bool:
        """Whether the latest answer of some service has this broker."""
        return any(nsqd_address in answer for answer in self._answers.values())

    def ask_again(self) -> None:
        """Query now instead of at the end of the interval."""
        self._again.set()

    def failures_to_connect(self) -> list[ConnectionFailed]:
        """Return an error for each service whose last query failed."""
        failures = []
        for cause in self._failures.values():
            failures.append(ConnectionFailed(cause.address, cause.reason))
            failures[-1].__cause__ = cause
        return failures

    async def ask(self) -> None:
        """Query all services concurrently."""
        self._again = trio.Event()
        async with trio.open_nursery() as nursery:
            for address in self._answers:
                nursery.start_soon(self._ask, address)

    async def keep_asking(self) -> None:
        """Query all services at every interval; returns only if there are none. Call `ask` before.

        While no service knows a broker with the topic, query more often: the topic is often about to be created.
        """
        if not self._answers:
            return
        interval_s = self._settings.lookupd_poll_interval_s
        pause_s = interval_s * self._jitter()
        early_s = FIRST_PAUSE_S
        while True:
            for failure in self._failures.values():
                _logger.warning("%s", failure)
            nowhere = not self._failures and not any(self._answers.values())
            if nowhere and early_s < pause_s:
                wait_s, early_s = min(early_s * self._jitter(), pause_s), 2 * early_s
            else:
                wait_s, pause_s = pause_s, interval_s
                early_s = early_s if nowhere else FIRST_PAUSE_S
            with trio.move_on_after(wait_s):
                await self._again.wait()
            await self.ask()

    def _jitter(self) -> float:
        return 1 + self._settings.lookupd_poll_jitter * self._random()

    async def _ask(self, address: str) -> None:
        try:
            producers = await lookup_topic(
                address,
                self._topic,
                timeout_s=self._settings.lookupd_poll_timeout_s,
                tls=self._tls,
                token=self._settings.secret.read(),
            )
        except SecretFileError as error:
            self._failures[address] = LookupFailed(address, str(error))
            return
        except LookupFailed as failure:
            self._failures[address] = failure
            return
        self._failures.pop(address, None)
        brokers = [found for broker in producers if (found := self._address_of(broker, address)) is not None]
        self.answered = True
        self._answers[address] = brokers
        self._found(brokers)

    def _address_of(self, broker: ProducerAddress, service: str) -> str | None:
        """Return the address to connect to; None, logged as a warning, if it is not a host name, or not allowed."""
        host = broker.broadcast_address
        problem = "not a host name"
        try:
            if host.isprintable():
                address = nsqd_address(format_address(host, broker.tcp_port))
                if self._is_allowed(host):
                    return address
                problem = "not among the allowed hosts"
        except ValueError:
            pass
        words = "nsqlookupd %s returned a broker address that is %s: %r"
        _logger.warning(words, without_secrets(service), problem, host)
        return None
