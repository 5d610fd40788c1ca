"""Reads the auth file of a running broker, and closes connections whose token was revoked or has expired."""

import logging

import trio

from ..access import AuthFileError, Policy, read_auth_file
from ..access.access import Access
from ..wording import count_of
from .errors import StartupError
from .options import BrokerOptions
from .session.auth_service import AuthClient
from .session.sessions import Sessions

logger = logging.getLogger("trio_nsq.broker")

_LONGEST_WAIT_S = 60.0
"""The wall clock can be set, so the next expiry is computed again after this time."""


class Authentication:
    """The authentication of one broker.

    Attributes:
        access: Identifies clients; the same object for the life of the broker.

    Raises:
        StartupError: The auth file or an option of the auth servers cannot be used.
    """

    def __init__(self, options: BrokerOptions) -> None:
        self._options = options
        self._service = AuthClient(options) if options.auth_http_addresses else None
        try:
            policy = self._read_policy()
        except AuthFileError as exc:
            raise StartupError(f"--auth-file: {exc}") from exc
        self.access = Access(policy, self._service)
        self._changed = trio.Event()

    def _read_policy(self) -> Policy | None:
        if self._options.auth_file is None:
            return None
        policy = read_auth_file(self._options.auth_file)
        if policy.certificates and self._options.tls_client_auth_policy not in (
            "require-verify",
            "verify-if-given",
        ):
            raise AuthFileError(
                f"{self._options.auth_file} has certificates, but the broker does not verify those of clients: give "
                "--tls-client-auth-policy=require-verify or verify-if-given"
            )
        return policy

    async def reload(self, sessions: Sessions) -> None:
        """Read the auth file and the CAs of auth servers again. Raises AuthFileError, StartupError: nothing changed."""
        policy = await trio.to_thread.run_sync(self._read_policy)
        if self._service is not None:
            await self._service.reload()
        if policy is not None:
            self.access.policy = policy
            logger.info(
                "read the auth file %s: %s, %s",
                self._options.auth_file,
                count_of(len(policy.tokens), "token"),
                count_of(len(policy.certificates), "certificate"),
            )
            sessions.renew_identities()
            self._changed.set()

    async def watch_expiry(self, sessions: Sessions) -> None:
        """Close connections when their token expires; runs until cancelled."""
        while True:
            self._changed = trio.Event()
            with trio.move_on_after(min(self.access.seconds_to_next_expiry(), _LONGEST_WAIT_S)):
                await self._changed.wait()
                continue
            sessions.renew_identities()

    async def aclose(self) -> None:
        """Close the connections to auth servers."""
        if self._service is not None:
            await self._service.aclose()
