"""Asks the brokers who a viewer is, and what it may do there."""

import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import trio

from ...access.description import Description, parse_description
from ...access.policy import Identity, token_digest
from ...fleet.snapshot import BrokerState
from ..fleet.watcher import Watcher
from ..upstream.client import Upstream, UpstreamError
from .request_head import Refused
from .rights import Rights, rights_of

logger: logging.Logger = logging.getLogger("trio_nsq.console")

CHECK_INTERVAL_S = 20.0
FRESH_S = 50.0
"""What a broker has said about a token counts for so long. With the time of a check, a revoked token ends its session
within a minute."""
FORGET_S = 900.0
"""The token of a viewer that sends no requests is forgotten, and checked again when it does."""
MAX_TOKENS = 1000
_MAX_CHECKS = 16
_SHOWN = 3


@dataclass(slots=True)
class Login:
    """A token that brokers accept.

    Attributes:
        identities: By the address of each broker with authentication.
        open: Brokers without.
        rights: What all of them allow.
        checked_at_s, used_at_s: By trio's clock.
    """

    token: str
    identities: dict[str, Identity]
    open: frozenset[str]
    rights: Rights
    checked_at_s: float
    used_at_s: float

    @property
    def name(self) -> str:
        """The name of the token at the first broker."""
        return next(iter(self.identities.values())).name

    @property
    def expires_at_s(self) -> float:
        """When the first broker stops to accept the token, Unix seconds."""
        return min(identity.expires_at_s for identity in self.identities.values())


@dataclass(slots=True)
class _Known:
    """What is known of a running broker's authentication, by its address and the time of its start."""

    requires: dict[tuple[str, int], bool] = field(default_factory=dict)

    def get(self, broker: BrokerState) -> bool | None:
        return False if broker.is_nsqd else self.requires.get((broker.address, broker.start_time_s))

    def learn(self, broker: BrokerState, requires: bool) -> None:
        self.requires[broker.address, broker.start_time_s] = requires


class BrokerLogins:
    """Checks tokens with all brokers of a fleet, and checks those in use again.

    A token must be valid at each broker that has authentication and answers. A broker that does not answer keeps what
    it has said before.

    Args:
        lends_credentials: The console has credentials of its own: then brokers that were not asked yet count as brokers
            with authentication, so that no stranger uses them.
    """

    def __init__(self, upstream: Upstream, watcher: Watcher, *, lends_credentials: bool) -> None:
        self._upstream = upstream
        self._watcher = watcher
        self._lends_credentials = lends_credentials
        self._known = _Known()
        self._logins: OrderedDict[str, Login] = (
            OrderedDict()
        )  # by the token's digest; least recently used first
        self._checking: dict[str, trio.Event] = {}
        self._started = trio.Event()
        self._answered: tuple[int, frozenset[str]] = (-1, frozenset())

    @property
    def required(self) -> bool:
        """Whether a broker has authentication, as far as is known."""
        if not self._started.is_set():
            return self._lends_credentials
        return any(
            self._known.get(broker) in ((True, None) if self._lends_credentials else (True,))
            for broker in self._brokers()
        )

    @property
    def have_started(self) -> bool:
        """Whether brokers were asked for the first time."""
        return self._started.is_set()

    async def wait_until_started(self) -> None:
        """Wait until brokers were asked for the first time."""
        if not self._started.is_set():
            with trio.move_on_after(self._upstream.request_timeout_s):
                await self._started.wait()

    async def run(self) -> None:
        """Find out which brokers have authentication, and check tokens again; runs until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_brokers)
            while True:
                await trio.sleep(CHECK_INTERVAL_S)
                await self._check_all()

    # ------------------------------------------------------------------- tokens

    def known(self, token: str) -> Login | None:
        """Return the login of a token if brokers were asked about it a short time ago, and have accepted it."""
        key = token_digest(token.encode())
        found = self._logins.get(key)
        if found is None or not self._is_fresh(found):
            return None
        found.used_at_s = trio.current_time()
        self._logins.move_to_end(key)
        return found

    async def login(self, token: str) -> Login:
        """Return who a token is, and what it may do. Raises Refused."""
        key = token_digest(token.encode())
        while (checking := self._checking.get(key)) is not None:
            await checking.wait()
        return self.known(token) or await self._check(key, token)

    def rights(self, token: str) -> Rights | None:
        """Return what brokers allowed a token when they were asked last, for an answer that is being sent.

        None: they have refused it, or were not asked.
        """
        found = self._logins.get(token_digest(token.encode()))
        if found is None:
            return None
        found.used_at_s = trio.current_time()
        return found.rights

    def _is_fresh(self, login: Login) -> bool:
        """Whether a login counts without a check: it is new enough, and includes each broker that answers now."""
        if trio.current_time() >= login.checked_at_s + FRESH_S:
            return False
        return self._answering() <= login.identities.keys() | login.open

    def _answering(self) -> frozenset[str]:
        version = self._watcher.snapshot.version
        if self._answered[0] != version:
            answering = (broker.address for broker in self._brokers() if broker.reachable)
            self._answered = version, frozenset(answering)
        return self._answered[1]

    async def _check(self, key: str, token: str) -> Login:
        """Ask all brokers about a token. Raises Refused, and forgets it."""
        done = self._checking[key] = trio.Event()
        try:
            before = self._logins.get(key)
            found = self._logins[key] = await self._ask(token, before)
            if len(self._logins) > MAX_TOKENS:
                self._logins.popitem(last=False)
            return found
        except Refused:
            self._logins.pop(key, None)
            raise
        finally:
            del self._checking[key]
            done.set()

    async def _ask(self, token: str, before: Login | None) -> Login:
        began_s = trio.current_time()
        brokers = {broker.address: broker for broker in self._brokers()}
        open_ = {address for address, broker in brokers.items() if self._known.get(broker) is False}
        # A broker without authentication need not see the token, and one that hangs must not delay the others.
        asked = [address for address in brokers if brokers[address].reachable and address not in open_]
        results = await self._upstream.on_all(asked, partial(self._describe, token))
        identities = dict(before.identities) if before is not None else {}
        for address, about in results.values.items():
            self._known.learn(brokers[address], about.identity is not None)
            if about.identity is not None:
                identities[address] = about.identity
            else:
                open_.add(address)
        refused = [address for address, error in results.errors.items() if error.status == 401]
        for address in refused:
            self._known.learn(brokers[address], True)
            identities.pop(address, None)
        if refused:
            raise _refusal(refused, list(identities))
        open_ |= {
            address for address, error in results.errors.items() if error.status == 404
        }  # before /access
        identities = {a: identity for a, identity in identities.items() if a in brokers and a not in open_}
        unknown = {a: error for a, error in results.errors.items() if a not in open_ and a not in identities}
        if unknown or not identities:
            raise _unavailable(unknown, all(broker.reachable for broker in brokers.values()))
        used_at_s = before.used_at_s if before is not None else began_s
        return Login(token, identities, frozenset(open_), rights_of(identities.values()), began_s, used_at_s)

    async def _describe(self, token: str | None, address: str) -> Description:
        answer = await self._upstream.with_token(token).json("GET", address, "/access")
        try:
            about = parse_description(answer)
        except ValueError as exc:
            raise UpstreamError(address, f"its answer to /access is not valid: {exc}") from None
        if token is not None and about.identity is not None and about.identity.source == "certificate":
            # A secret that is no token is no obstacle to a certificate, and the certificate is the console's own.
            raise UpstreamError(address, "it does not know the token", status=401)
        return about

    async def _check_all(self) -> None:
        """Check the tokens in use, and forget the others."""
        slots = trio.CapacityLimiter(_MAX_CHECKS)

        async def check(key: str, login: Login) -> None:
            async with slots:
                if key in self._checking:
                    return
                try:
                    await self._check(key, login.token)
                except Refused as exc:
                    logger.info("the login of %s ends: %s", login.name, exc.text)

        async with trio.open_nursery() as nursery:
            for key, login in list(self._logins.items()):
                if trio.current_time() < login.used_at_s + FORGET_S:
                    nursery.start_soon(check, key, login)
                else:
                    self._logins.pop(key, None)

    # ------------------------------------------------------------------ brokers

    def _brokers(self) -> Iterable[BrokerState]:
        return self._watcher.snapshot.brokers.values()

    async def _watch_brokers(self) -> None:
        """Ask each new broker, with the console's own credentials, whether it has authentication."""
        version = 0
        while True:
            snapshot = await self._watcher.changed(version)
            version = snapshot.version
            new = {
                broker.address: broker
                for broker in snapshot.brokers.values()
                if broker.reachable and self._known.get(broker) is None
            }
            results = await self._upstream.on_all(new, partial(self._describe, None))
            for address, about in results.values.items():
                self._known.learn(new[address], about.identity is not None)
            for address, error in results.errors.items():
                if error.status == 401:
                    self._known.learn(new[address], True)
            present = {(broker.address, broker.start_time_s) for broker in snapshot.brokers.values()}
            self._known.requires = {
                key: value for key, value in self._known.requires.items() if key in present
            }
            self._started.set()


def _refusal(refused: list[str], accepted: list[str]) -> Refused:
    if not accepted:
        return Refused(401, "INVALID_TOKEN", "The token is unknown, expired or revoked.", ends_session=True)
    shown = ", ".join(refused[:_SHOWN]) + (" and others" if len(refused) > _SHOWN else "")
    return Refused(
        401,
        "INVALID_TOKEN",
        f"{accepted[0]} accepts this token, but {shown} refuses it. A token for the console must be valid at all "
        "brokers with authentication.",
        ends_session=True,
    )


def _unavailable(errors: dict[str, UpstreamError], all_answer: bool) -> Refused:
    if not errors and all_answer:
        return Refused(401, "NO_AUTHENTICATION", "No broker has authentication, so no token is valid.")
    reasons = "; ".join(f"{address}: {error.reason}" for address, error in list(errors.items())[:_SHOWN])
    return Refused(
        503,
        "AUTH_UNAVAILABLE",
        f"The token cannot be checked now: {reasons or 'no broker answers; the log of the console has the reason'}.",
    )
