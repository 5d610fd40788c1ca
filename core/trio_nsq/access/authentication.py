"""Reads the auth file of a running server, and ends connections whose token was revoked or has expired."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import trio

from ..protocol.errors import StartupError
from ..text.wording import count_of
from .access import Access, AuthService
from .audit import AuditLog
from .auth_file import AuthFileError, read_auth_file
from .policy import Identity, Policy

logger: logging.Logger = logging.getLogger("trio_nsq.access")

_LONGEST_WAIT_S = 60.0
"""The wall clock can be set, so the next expiry is computed again after this time."""


class ReloadableAuthService(AuthService, Protocol):
    """External auth servers of a running server."""

    async def reload(self) -> None:
        """Read the CA file again. Raises StartupError and keeps the previous CAs."""

    async def aclose(self) -> None:
        """Close the connections to the servers."""


class Connections(Protocol):
    """The authenticated connections of a server."""

    def renew_identities(self) -> int:
        """End the connections whose token or certificate was revoked or has expired. Returns their number."""


class Authentication:
    """The authentication of one server.

    Args:
        auth_file: The file of tokens and certificates; None without one.
        service: External auth servers; None without any.
        verifies_clients: The server verifies certificates of clients.
        audit: The audit log; None for none.
        trusted: See `Access`.
        unix_time: Returns the time in Unix seconds.

    Attributes:
        access: Identifies clients; the same object for the life of the server.

    Raises:
        StartupError: The auth file cannot be used.
    """

    def __init__(
        self,
        auth_file: Path | None,
        service: ReloadableAuthService | None = None,
        *,
        verifies_clients: bool,
        audit: AuditLog | None = None,
        trusted: Mapping[str, Identity] | None = None,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._auth_file = auth_file
        self._service = service
        self._verifies_clients = verifies_clients
        try:
            policy = self._read_policy()
        except AuthFileError as exc:
            raise StartupError(f"--auth-file: {exc}") from exc
        self.access: Access = Access(
            policy, self._service, audit=audit, trusted=trusted or {}, unix_time=unix_time
        )
        self._changed = trio.Event()
        self._reading = trio.Lock()  # an earlier reading must not replace a later one

    def _read_policy(self) -> Policy | None:
        if self._auth_file is None:
            return None
        policy = read_auth_file(self._auth_file)
        if policy.certificates and not self._verifies_clients:
            raise AuthFileError(
                f"{self._auth_file} has certificates, but the server does not verify those of clients: give "
                "--tls-client-auth-policy=require-verify or verify-if-given"
            )
        return policy

    async def reload(self, connections: Connections) -> None:
        """Read the auth file and the CAs of auth servers again. Raises AuthFileError, StartupError: nothing changed."""
        async with self._reading:
            file = str(self._auth_file or "")
            try:
                policy = await trio.to_thread.run_sync(self._read_policy)
                if self._service is not None:
                    await self._service.reload()
            except (AuthFileError, StartupError) as exc:
                reason = exc.__cause__ if isinstance(exc.__cause__, ValueError) else exc  # without the path
                self.access.audit.record("reload", "", None, file=file, error=str(reason))
                raise
            if policy is None:
                return
            self.access.policy = policy
            tokens, certificates = len(policy.tokens), len(policy.certificates)
            self.access.audit.record("reload", "", None, file=file, tokens=tokens, certificates=certificates)
            logger.info(
                "read the auth file %s: %s, %s",
                self._auth_file,
                count_of(tokens, "token"),
                count_of(certificates, "certificate"),
            )
            connections.renew_identities()
            self._changed.set()

    async def watch_expiry(self, connections: Connections) -> None:
        """End connections when their token expires; runs until cancelled."""
        while True:
            self._changed = trio.Event()
            # Before the renewal: an entry that expires in between must not be missed.
            wait_s = min(self.access.seconds_to_next_expiry(), _LONGEST_WAIT_S)
            connections.renew_identities()
            with trio.move_on_after(wait_s):
                await self._changed.wait()

    async def aclose(self) -> None:
        """Close the connections to auth servers."""
        if self._service is not None:
            await self._service.aclose()
