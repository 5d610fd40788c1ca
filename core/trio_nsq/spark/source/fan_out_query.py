"""Ask several servers at once, so that one that hangs or is down does not delay the others."""

import logging
import random
import ssl
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Generic, NamedTuple, TypeVar

from ...client.errors import BrokerUnreachable
from ...event_loop.fan_out import start
from ...event_loop.retries import Delays

PROMPT_S = 1.0
"""How long others are waited for, once a server has answered."""
_MIN_DELAY_S, _MAX_DELAY_S = 0.1, 5.0

_log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Answers(NamedTuple, Generic[K, V]):
    """The answers, by server, and the errors of servers that did not answer."""

    found: dict[K, V]
    away: dict[K, BrokerUnreachable]


class FanOutQuery(Generic[K, V]):
    """Asks servers again and again, each in a thread of its own. Not for several threads.

    A server that does not answer is asked again after growing delays, and is not waited for. A late answer is returned
    by the next call, so it must still be useful then.

    Args:
        consequence: The end of the warning about a server that does not answer: what happens meanwhile.
        away: The errors of servers that do not answer, to share them with another query; None: an own dict.
        needs_trust: Whether a certificate that is not trusted is an error at once, instead of a server that does not
            answer yet.
    """

    def __init__(
        self,
        consequence: str,
        away: dict[K, BrokerUnreachable] | None = None,
        *,
        needs_trust: bool = False,
    ) -> None:
        self._consequence = consequence
        self._needs_trust = needs_trust
        self._running: dict[K, Future[V]] = {}
        self._away = {} if away is None else away
        self._delays: dict[K, Delays] = {}
        self._not_before_s: dict[K, float] = {}

    def ask(
        self, requests: Mapping[K, Callable[[], V]], patience_s: float, *, waits_for_all: bool = False
    ) -> Answers[K, V]:
        """Call a function for each server, and return their results.

        Args:
            patience_s: How long to wait for the first answer, and with `waits_for_all` for each server that has
                answered the last time.

        Raises:
            BrokerUnreachable: No server answered.
            NSQError: Another error of one of the functions.
        """
        found: dict[K, V] = {}
        given_up_s = time.monotonic() + max(patience_s, PROMPT_S)  # a first attempt needs time, too
        prompt_s = given_up_s if waits_for_all else None
        known_away = set(self._away)
        while True:
            now_s = time.monotonic()
            for key in requests.keys() - found.keys() - self._running.keys():
                if self._not_before_s.get(key, 0.0) <= now_s:
                    self._running[key] = start(requests[key])
            self._collect(found, requests)
            now_s = time.monotonic()
            if found and prompt_s is None:
                prompt_s = min(given_up_s, now_s + PROMPT_S)
            missing = requests.keys() - found.keys()
            expected = missing - known_away if waits_for_all else missing - self._away.keys()
            until_s = given_up_s if prompt_s is None else prompt_s
            if not missing or now_s >= until_s or (found and not expected):
                break
            self._pause(missing, until_s - now_s)
        for key in missing:
            if key not in self._away:
                self._note_away(key, BrokerUnreachable(str(key), "it has not answered yet"))
        away = {key: self._away[key] for key in missing}
        if away and not found:
            raise next(iter(away.values()))
        return Answers(found, away)

    def assume_away(self, away: Mapping[K, BrokerUnreachable]) -> None:
        """Do not wait for servers until they answer."""
        self._away |= away

    def _collect(self, found: dict[K, V], requests: Mapping[K, Callable[[], V]]) -> None:
        for key, future in list(self._running.items()):
            if not future.done():
                continue
            del self._running[key]
            error = future.exception()
            if isinstance(error, BrokerUnreachable) and not self._is_final(error):
                self._note_away(key, error)
                delays = self._delays.setdefault(key, Delays(_MIN_DELAY_S, _MAX_DELAY_S, random.random))
                self._not_before_s[key] = time.monotonic() + delays.next_s()
            elif error is not None:
                raise error
            elif key in requests:
                found[key] = future.result()
                self._delays.pop(key, None)
                if self._away.pop(key, None) is not None:
                    _log.warning("nsq: the server at %s answers again.", key)

    def _is_final(self, error: BrokerUnreachable) -> bool:
        return self._needs_trust and isinstance(error.cause, ssl.SSLCertVerificationError)

    def _pause(self, missing: set[K], most_s: float) -> None:
        """Wait for the next answer, or until a server may be asked again."""
        now_s = time.monotonic()
        running = [self._running[key] for key in missing & self._running.keys()]
        retries = [self._not_before_s.get(key, 0.0) - now_s for key in missing - self._running.keys()]
        pause_s = max(0.0, min([most_s, *retries]))
        if running:
            wait(running, pause_s, FIRST_COMPLETED)
        else:
            time.sleep(pause_s)

    def _note_away(self, key: K, error: BrokerUnreachable) -> None:
        if key not in self._away:
            _log.warning("nsq: %s; %s.", error, self._consequence)
        self._away[key] = error
