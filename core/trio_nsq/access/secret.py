"""The secret of a client: sent with AUTH over TCP, and in the Authorization header over HTTP."""

import logging
import re
import string
from base64 import b64encode
from dataclasses import dataclass, field
from os import PathLike
from typing import TypeAlias

from ..protocol.address import host_of, is_loopback
from ..protocol.errors import NSQError

StrPath: TypeAlias = str | PathLike[str]

MAX_SECRET_BYTES = 64 * 1024
"""The longest AUTH that brokers accept."""
SECURITY_LOGGER = "trio_nsq.security"
"""The logger of warnings that programs should always show."""

_TOKEN_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-._~+/=")
"""The characters of a bearer token (RFC 6750)."""
SECRET_WORDS = (
    "secret|password|passphrase|token|credential"
    "|(?:access|account|api|private|tls|storage|master)[-_. ]?key|connection[-_. ]?string"
)
"""A regular expression of the parts of names whose values are secret."""
_SECRETS = (
    (re.compile(r"(?<=://)[^/@\s\"']+@"), ""),
    (
        re.compile(
            rf"(?i)((?:{SECRET_WORDS})[\w.-]*\"?'?\s*[=:]\s*)(?:\"[^\"]*\"|'[^']*'|[\"']?[^\s\"',;)]+)"
        ),
        r"\1***",
    ),
)
"""User names and passwords of URLs, and values whose names say that they are secret."""
_logged: set[tuple[str, str]] = set()  # texts and addresses


class SecretFileError(NSQError, ValueError):
    """The file of a secret cannot be used. The text has the file and the reason, never the secret."""


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret, or the file that has it; false without either. Can be pickled, and its repr does not show the secret.

    Attributes:
        text: The secret.
        file: The file whose first line is the secret. It is read for each connection, so a new secret is used without a
            restart.

    Raises:
        TypeError: The secret is not a string, or the file is not a path.
        ValueError: Both are given.
    """

    text: str = field(default="", repr=False)
    file: StrPath | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError("auth_secret must be a string")  # the text does not show it
        if not isinstance(self.file, str | PathLike | None):  # open() takes numbers, as descriptors
            raise TypeError(f"auth_secret_file is {self.file!r}; it must be a path")
        if self.text and self.file is not None:
            raise ValueError("auth_secret and auth_secret_file are both given; give one of them")

    def __bool__(self) -> bool:
        return bool(self.text) or self.file is not None

    def read(self) -> str:
        """Return the secret, "" without one. Raises SecretFileError."""
        return self.text if self.file is None else read_secret_file(self.file)

    def headers(self, clear_address: str = "") -> dict[str, str]:
        """Return the headers that authenticate an HTTP request; none without a secret. Raises SecretFileError.

        Args:
            clear_address: The server's `host:port` if the connection is neither encrypted nor a unix socket: if the
                server is not on this machine, a warning is logged.
        """
        secret = self.read()
        if not secret:
            return {}
        if clear_address:
            warn_in_clear(clear_address)
        return {"Authorization": authorization(secret)}


NO_SECRET = Secret()


def read_secret_file(file: StrPath) -> str:
    """Return the first line of a file. Raises SecretFileError."""
    try:
        with open(file, "rb") as stream:
            line = stream.readline(MAX_SECRET_BYTES + 2).rstrip(b"\r\n")
    except OSError as exc:
        raise SecretFileError(f"auth_secret_file {file}: {exc.strerror}") from exc
    if not line or len(line) > MAX_SECRET_BYTES:
        problem = "is empty" if not line else "is too long for a secret"
        raise SecretFileError(f"auth_secret_file {file}: its first line {problem}")
    return decode_secret(line)


def decode_secret(data: bytes) -> str:
    """Decode a secret; `encode_secret` returns the same bytes, also if they are not UTF-8."""
    return data.decode("utf-8", "surrogateescape")


def encode_secret(secret: str) -> bytes:
    """Encode a secret for AUTH. A secret from the command line or a file may have bytes that are not UTF-8."""
    return secret.encode("utf-8", "surrogateescape")


def authorization(secret: str) -> str:
    """Return the value of the Authorization header: `Bearer`; for a secret with other characters than a token, Basic.

    Auth servers may know secrets with blanks, which a bearer token cannot have; with Basic, the secret is the password.
    """
    if _TOKEN_CHARACTERS.issuperset(secret):
        return f"Bearer {secret}"
    return f"Basic {b64encode(b':' + encode_secret(secret)).decode()}"


def warn_in_clear(address: str) -> None:
    """Log a warning, once for each address, before a secret is sent without encryption to another machine.

    Args:
        address: `host:port`.
    """
    if not is_loopback(host_of(address)):
        _log_once(
            logging.WARNING,
            "the secret is sent to %s without encryption, so others in the network can read it: use TLS",
            address,
        )


def note_not_sent(address: str) -> None:
    """Log, once for each address, that a server requires no secret: its operator may think that it does.

    Args:
        address: `host:port`.
    """
    _log_once(
        logging.INFO,
        "%s requires no authentication: every client may do everything there, and the secret was not sent",
        address,
    )


def warn_not_encrypted(address: str) -> None:
    """Log a warning, once for each address: the program has named CAs or a certificate, and does not ask for TLS.

    Args:
        address: `host:port`.
    """
    _log_once(
        logging.WARNING,
        "the connection to %s is not encrypted, although TLS options are given: set tls_v1=True",
        address,
    )


def _log_once(level: int, text: str, address: str) -> None:
    if (text, address) not in _logged:
        _logged.add((text, address))
        logging.getLogger(SECURITY_LOGGER).log(level, text, address)


def redacted(text: str) -> str:
    """Return a text, such as a log, without passwords in URLs and values whose names say that they are secret."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text
