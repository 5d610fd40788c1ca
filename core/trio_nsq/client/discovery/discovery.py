"""Query discovery services (nsqlookupd) for brokers, again and again."""

import logging
import ssl
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from ...access.secret import SecretFileError
from ...api.lookupd import ProducerAddress
from ...event_loop import runtime
from ...lookup.hosts import host_filter
from ...lookup.query import LookupFailed
from ...protocol.address import format_address, without_secrets
from ..connection.addresses import nsqd_address
from ..errors import ConnectionFailed
from .options import DiscoverySettings

FIRST_PAUSE_S = 1.0
MIN_PAUSE_S = 0.25
"""The shortest time between two queries: brokers may be lost in quick succession."""
PROMPT_S = 1.0
"""Services that do not answer within this time are not waited for."""

Found = TypeVar("Found", bound=ProducerAddress)
FoundAlways = TypeVar("FoundAlways", bound=ProducerAddress, covariant=True)

_logger = logging.getLogger("trio_nsq.client")


class Query(Protocol[FoundAlways]):
    """Queries one service for brokers. Raises LookupFailed."""

    async def __call__(
        self, address: str, /, *, timeout_s: float, tls: ssl.SSLContext | None, token: str
    ) -> Sequence[FoundAlways]: ...


class Discovery(Generic[Found]):
    """Queries all services at intervals. The latest answer of each counts, so a service that is down removes no broker.

    Args:
        addresses: The HTTP addresses of the services.
        random: Returns numbers in [0, 1), for the jitter.
        query: Queries one service.
        answered: Called after each answer of a service, when `found` is up to date.

    Attributes:
        found: The brokers of the latest answers of all services, by address (`host:port`). Each with one description
            from every service that returns it.
        has_answer: Whether any service has ever answered.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        settings: DiscoverySettings,
        random: Callable[[], float],
        query: Query[Found],
        answered: Callable[[], None],
    ) -> None:
        self.found: dict[str, list[Found]] = {}
        self.has_answer: bool = False
        self._settings = settings
        self._random = random
        self._query = query
        self._answered = answered
        self._is_allowed = host_filter(settings.lookupd_allowed_hosts)
        self._tls = settings.https_context()
        self._answers: dict[str, dict[str, Found]] = {address: {} for address in addresses}
        self._failures: dict[str, LookupFailed] = {}
        self._asking: set[str] = set()
        self._again = runtime.Event()

    @property
    def services(self) -> Iterable[str]:
        """The addresses of the services, without passwords."""
        return map(without_secrets, self._answers)

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
        """Query all services concurrently, except those whose last query is not decided yet."""
        self._again = runtime.Event()
        async with runtime.open_nursery() as nursery:
            for address in self._answers.keys() - self._asking:
                nursery.start_soon(self._ask, address)

    async def ask_until(self, deadline: float, is_enough: Callable[[], bool]) -> None:
        """Query all services, again and again until it is enough or too late; at least once."""
        await self.ask()
        while self._answers and not is_enough() and (now := runtime.current_time()) < deadline:
            await runtime.sleep_until(min(now + FIRST_PAUSE_S, deadline))
            await self.ask()

    async def keep_asking(self) -> None:
        """Query all services at every interval; returns only if there are none. Call `ask` before.

        While no service knows a broker, query more often: the topic is often about to be created, or the broker about
        to be started. A service that does not answer does not delay the queries of the others.
        """
        if not self._answers:
            return
        interval_s = self._settings.lookupd_poll_interval_s
        pause_s = interval_s * self._jitter()
        early_s = FIRST_PAUSE_S
        async with runtime.open_nursery() as nursery:
            while True:
                for failure in self._failures.values():
                    _logger.warning("%s", failure)
                nowhere = not self._failures and not self.found
                if nowhere and early_s < pause_s:
                    wait_s, early_s = min(early_s * self._jitter(), pause_s), 2 * early_s
                else:
                    wait_s, pause_s = pause_s, interval_s
                    early_s = early_s if nowhere else FIRST_PAUSE_S
                not_before = runtime.current_time() + min(wait_s, MIN_PAUSE_S)
                with runtime.move_on_after(wait_s):
                    await self._again.wait()
                await runtime.sleep_until(not_before)
                asked = runtime.Event()
                nursery.start_soon(self._ask_all, asked)
                with runtime.move_on_after(PROMPT_S):
                    await asked.wait()

    async def _ask_all(self, asked: runtime.Event) -> None:
        await self.ask()
        asked.set()

    def _jitter(self) -> float:
        return 1 + self._settings.lookupd_poll_jitter * self._random()

    async def _ask(self, address: str) -> None:
        self._asking.add(address)
        try:
            brokers = await self._query(
                address,
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
        finally:
            self._asking.discard(address)
        self._failures.pop(address, None)
        self.has_answer = True
        self._answers[address] = {
            place: broker for broker in brokers if (place := self._address_of(broker, address)) is not None
        }
        self.found = {}
        for answer in self._answers.values():
            for place, broker in answer.items():
                self.found.setdefault(place, []).append(broker)
        self._answered()

    def _address_of(self, broker: Found, service: str) -> str | None:
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
