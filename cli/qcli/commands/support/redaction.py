"""Removes secrets, and addresses of clients, from what a user sends to others."""

import hashlib
import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from trio_nsq.access.secret import SECRET_WORDS, redacted
from trio_nsq.protocol.address import without_secrets

HIDDEN = "***"
_MIN_SECRET = 4
"""Characters. Shorter values, such as 1, also occur in other places."""
_NO_SECRET = re.compile(r"(?i)[-+]?[\d.]+|true|false|none|null")
"""Numbers and switches, such as the value of MAX_TOKENS, which occur in other places."""

_SECRET_NAME = re.compile(rf"(?i){SECRET_WORDS}|headers?$|authorization|(?<![a-z])sas(?![a-z])")
_NO_SECRET_NAME = re.compile(r"(?i)_(file|count|ms|s|total)$")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>\\]+")
_PATTERNS = (
    (re.compile(r"\?[\w%.~-]+=[^\s\"'<>\\]*"), "?xxxxx"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[^\s\"',;]+"), rf"\1 {HIDDEN}"),
    (re.compile(r"(?i)\b(authorization[\"']?\s*[:=]\s*[\"']?\w+)\s+[^\s\"',;]+"), rf"\1 {HIDDEN}"),
    (re.compile(r"\bqnsq_[\w-]+"), HIDDEN),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), HIDDEN),
)
"""Queries of paths, Authorization headers, tokens of this project's brokers, and AWS key ids."""
_OF_CLIENTS = frozenset(
    {"remote_address", "client_id", "hostname", "name", "auth_identity", "tls_common_name"}
)
_LISTS_OF_CLIENTS = {"clients": _OF_CLIENTS, "producers": _OF_CLIENTS, "jobs": frozenset({"host", "client"})}
"""By the name of a list: the fields of its objects that say who a client is."""


def is_secret_name(name: str) -> bool:
    """Return whether a value with this name may be a secret: not the path of a file."""
    return bool(_SECRET_NAME.search(name)) and not _NO_SECRET_NAME.search(name)


class Redactor:
    """Removes the secrets that are known, and what looks like one.

    A client's address is replaced by a hash with a random salt, so that it is recognized within one bundle only.

    Args:
        environment: The values of variables whose names say that they are secret are removed everywhere.
        others: Other secrets.
    """

    def __init__(self, environment: Mapping[str, str], others: Iterable[str] = ()) -> None:
        known = {
            value
            for name, value in environment.items()
            if is_secret_name(name) and not _NO_SECRET.fullmatch(value)
        } | set(others)
        known |= {json.dumps(value)[1:-1] for value in known}
        self._known = sorted((text for text in known if len(text) >= _MIN_SECRET), key=len, reverse=True)
        self._salt = secrets.token_bytes(16)
        self._clients: dict[str, str] = {}

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        for each in self._known:
            text = text.replace(each, HIDDEN)
        text = _URL.sub(lambda found: without_secrets(found[0]), text)
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
        return redacted(text)

    def clients(self, text: str) -> str:
        """Return a text with hashes instead of the addresses of clients in values that this has seen."""
        for address, hashed in self._clients.items():
            text = text.replace(address, hashed)
        return text

    def value(self, value: Any, name: str = "", *, of_client: Collection[str] = ()) -> Any:
        """Return a JSON value without secrets.

        Args:
            name: The name of the field with the value, or of the one around it if that name says that it is secret.
            of_client: The names of fields that say who a client is, in the description of one.
        """
        if isinstance(value, dict):
            return {
                self.text(key): self.value(each, name if is_secret_name(name) else key, of_client=of_client)
                for key, each in value.items()
            }
        if isinstance(value, list):
            inside = _LISTS_OF_CLIENTS.get(name, of_client)
            return [self.value(each, name, of_client=inside) for each in value]
        if not isinstance(value, str) or not value:
            return value
        if name in of_client:
            return self._client(value, is_address=name == "remote_address")
        return HIDDEN if is_secret_name(name) else self.text(value)

    def _client(self, text: str, *, is_address: bool) -> str:
        hashed = f"client-{hashlib.blake2b(text.encode(), key=self._salt, digest_size=6).hexdigest()}"
        if is_address:
            self._clients[text] = hashed
        return hashed
