"""Identifies clients: by the auth file, or by an external auth server."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Protocol

import trio

from ..protocol import NSQError
from .attempts import FailedAttempts
from .audit import AuditLog
from .policy import Identity, Policy, token_digest

MAX_CACHED_ANSWERS = 1000

_Key = tuple[str, bool, str, str]
"""Address, TLS, common name, and the digest of the secret: the cache must not hold secrets."""


_NONE_TRUSTED: Mapping[str, Identity] = {}


class AuthError(NSQError):
    """No auth server gave a valid answer. The text is for the log, not for the client."""


class AuthDenied(AuthError):
    """An auth server refused the secret (status 401 or 403), and no other one accepted it."""


class AuthService(Protocol):
    """External auth servers (NSQ: `--auth-http-address`)."""

    async def query(
        self, *, remote_ip: str, tls: bool, common_name: str, secret: bytes
    ) -> tuple[Identity, float]:
        """Return a client's identity, and until when it is valid, by trio's clock. Raises AuthError, AuthDenied."""


class Access:
    """Identifies the clients of one server.

    Args:
        policy: The contents of the auth file; None without one.
        service: External auth servers, for secrets that the auth file does not have; None without any.
        audit: The audit log; None for none.
        trusted: Identities by the digest of their token, besides those of the auth file. Their `key` is the digest.
        unix_time: Returns the time in Unix seconds.

    Attributes:
        audit: Where refusals and failed logins are recorded.
        failures: The failed logins.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        service: AuthService | None = None,
        *,
        audit: AuditLog | None = None,
        trusted: Mapping[str, Identity] = _NONE_TRUSTED,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self.audit: AuditLog = audit or AuditLog()
        self.policy = policy
        self.service = service
        self.failures: FailedAttempts = FailedAttempts()
        self._trusted = trusted
        self._unix_time = unix_time
        self._answers: OrderedDict[_Key, tuple[Identity, float]] = OrderedDict()  # least recently used first

    @property
    def is_open(self) -> bool:
        """Whether there is no authentication, so that every client may do everything."""
        return self.policy is None and self.service is None

    def find(self, secret: bytes | None, subject: str) -> Identity | None:
        """Return the identity of a client by the auth file.

        Args:
            secret: The token; None without one.
            subject: The subject of the client's verified certificate; empty without one.

        A token overrides the certificate. A secret that is no token is no obstacle to a certificate, because stock
        clients authenticate only if they are configured with some secret.
        """
        if self._trusted and secret and (trusted := self._trusted.get(token_digest(secret))) is not None:
            return trusted
        if self.policy is None:
            return None
        now_s = self._unix_time()
        found = self.policy.find_token(secret, now_s) if secret else None
        return found or self.policy.find_certificate(subject, now_s)

    @property
    def anonymous(self) -> Identity | None:
        """The identity of clients without credentials, for requests that the auth file allows them; None for none."""
        return self.policy.anonymous if self.policy is not None else None

    def renew(self, identity: Identity) -> Identity | None:
        """Return the current entry of an identity; None if it was removed or has expired."""
        if identity.key in self._trusted:
            return identity
        if identity.source == "auth server":
            return identity if self.service is not None else None
        return self.policy.renew(identity, self._unix_time()) if self.policy is not None else None

    def seconds_to_next_expiry(self) -> float:
        """Return how long until the next entry expires; math.inf if none does."""
        if self.policy is None:
            return math.inf
        now_s = self._unix_time()
        return self.policy.next_expiry_s(now_s) - now_s

    def known_answer(self, *, remote_ip: str, tls: bool, common_name: str, secret: bytes) -> Identity | None:
        """Return a client's identity if the auth servers have given it, and its TTL has not ended."""
        key = remote_ip, tls, common_name, token_digest(secret)
        known = self._answers.get(key)
        if known is None or known[1] <= trio.current_time():
            return None
        self._answers.move_to_end(key)
        return known[0]

    async def query_cached(
        self, *, remote_ip: str, tls: bool, common_name: str, secret: bytes
    ) -> Identity | None:
        """Return a client's identity by the auth servers; the answer is kept for its TTL. Raises AuthError.

        None: the servers refuse the secret, or allow nothing; or there are no servers.
        """
        if self.service is None:
            return None
        known = self.known_answer(remote_ip=remote_ip, tls=tls, common_name=common_name, secret=secret)
        if known is not None:
            return known
        try:
            found = await self.service.query(
                remote_ip=remote_ip, tls=tls, common_name=common_name, secret=secret
            )
        except AuthDenied:
            return None
        if not found[0].grants:
            return None  # not kept: a stranger's secrets must not push out the answers of clients
        key = remote_ip, tls, common_name, token_digest(secret)
        self._answers[key] = found
        self._answers.move_to_end(key)
        if len(self._answers) > MAX_CACHED_ANSWERS:
            self._answers.popitem(last=False)
        return found[0]
