"""Sessions of viewers: encrypted cookies, so that the console keeps no list of them. Pure, except for the key's file.

A cookie has the viewer's token. Nothing is stored when a viewer logs in; when it logs out, its session is remembered
as ended until it would have expired.
"""

import hashlib
import hmac
import json
import math
import os
import secrets
from base64 import urlsafe_b64encode
from dataclasses import dataclass
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

from ...protocol.errors import StartupError

MAX_TOKEN_BYTES = 2048
"""Of a token with which a viewer logs in: browsers keep cookies of up to 4096 bytes."""
MAX_ENDED = 10_000
_KEY_BYTES = 32
_MAX_KEY_FILE_BYTES = 200
_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Session:
    """A login.

    Attributes:
        id: Random.
        token: The viewer's token.
        began_at_s, expires_at_s: Unix seconds.
    """

    id: str
    token: str
    began_at_s: float
    expires_at_s: float


class Sessions:
    """Makes and reads cookies.

    Args:
        key: 32 random bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._fernet = Fernet(urlsafe_b64encode(hashlib.sha256(b"sessions" + key).digest()))
        self._csrf_key = hashlib.sha256(b"csrf" + key).digest()
        self._ended: dict[str, float] = {}  # until when, by id
        self._all_ended_at_s = -math.inf

    def begin(self, token: str, now_s: float, expires_at_s: float) -> tuple[Session, str]:
        """Begin a session; returns it with its cookie."""
        session = Session(new_id(), token, now_s, expires_at_s)
        content = {"id": session.id, "token": token, "began": now_s, "expires": expires_at_s}
        return session, self._fernet.encrypt(json.dumps(content).encode()).decode()

    def read(self, cookie: str, now_s: float) -> Session | None:
        """Return the session of a cookie; None if the cookie is not valid, or the session has ended."""
        try:
            content = json.loads(self._fernet.decrypt(cookie.encode()))
            session = Session(content["id"], content["token"], content["began"], content["expires"])
        except (InvalidToken, ValueError, KeyError, TypeError):
            return None
        return None if self.has_ended(session, now_s) else session

    def has_ended(self, session: Session, now_s: float) -> bool:
        """Whether a session has expired, or was ended."""
        return (
            now_s >= session.expires_at_s
            or session.id in self._ended
            or session.began_at_s <= self._all_ended_at_s
        )

    def end(self, session: Session, now_s: float) -> None:
        """End a session. Its cookie is not valid any more."""
        if len(self._ended) >= MAX_ENDED:
            self._ended = {id_: until_s for id_, until_s in self._ended.items() if until_s > now_s}
        if len(self._ended) >= MAX_ENDED:  # then all have to log in again: no ended session becomes valid
            self._ended.clear()
            self._all_ended_at_s = now_s
        self._ended[session.id] = session.expires_at_s

    # ------------------------------------------------------------------- forms

    def form_token(self, id_: str) -> str:
        """Return what forms of a session, or of a visitor, send back. Only this console can make it."""
        return hmac.new(self._csrf_key, b"form" + id_.encode(), "sha256").hexdigest()

    def is_form_token(self, id_: str, given: str) -> bool:
        """Whether a form has the right token."""
        return hmac.compare_digest(self.form_token(id_).encode(), given.encode("utf-8", "replace"))

    def visitor_cookie(self, id_: str) -> str:
        """Return the cookie of a visitor without a session."""
        return f"{id_}.{self._sign(id_)}"

    def visitor(self, cookie: str) -> str:
        """Return the id of a visitor; empty if the cookie is not valid."""
        id_, _, signature = cookie.partition(".")
        return (
            id_ if hmac.compare_digest(self._sign(id_).encode(), signature.encode("utf-8", "replace")) else ""
        )

    def _sign(self, id_: str) -> str:
        return hmac.new(self._csrf_key, b"visitor" + id_.encode("utf-8", "replace"), "sha256").hexdigest()


def new_id() -> str:
    return secrets.token_urlsafe(_ID_BYTES)


def session_key(path: Path | None) -> bytes:
    """Return the key: that of a file, which is created if it is missing; or a new one.

    Raises:
        StartupError: The file cannot be used.
    """
    if path is None:
        return secrets.token_bytes(_KEY_BYTES)
    try:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return _read_key(path)
        with open(fd, "w") as file:
            file.write(secrets.token_hex(_KEY_BYTES) + "\n")
        return _read_key(path)
    except OSError as exc:
        raise StartupError(f"--session-key-file: cannot use {path}: {exc.strerror}") from exc


def _read_key(path: Path) -> bytes:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise StartupError(
                f"--session-key-file: other users may read or write {path}; use chmod 600, and delete it if "
                "they may have read it"
            )
        text = file.read(_MAX_KEY_FILE_BYTES)
    try:
        key = bytes.fromhex(text.decode())
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise StartupError(
            f"--session-key-file: {path} does not have {2 * _KEY_BYTES} hexadecimal digits; delete it, and the console "
            "writes a new one"
        )
    return key
