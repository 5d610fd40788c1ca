"""Sessions of viewers: encrypted cookies, so that the console keeps no list of them. Pure, except for the key's file.

A cookie has the viewer's token, or the user that an OpenID Connect provider has named. Nothing is stored when a viewer
logs in; when it logs out, its session is remembered as ended until it would have expired.
"""

import hashlib
import hmac
import json
import os
import secrets
from base64 import urlsafe_b64encode
from dataclasses import astuple, dataclass
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

from ...protocol.errors import StartupError
from ...server.startup_checks import check_written_file
from .ended import Ended

MAX_TOKEN_BYTES = 2048
"""Of a token with which a viewer logs in: browsers keep cookies of up to 4096 bytes."""
_KEY_BYTES = 32
_MAX_KEY_FILE_BYTES = 200
_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class User:
    """A user of an OpenID Connect provider.

    Attributes:
        name: For people: the e-mail address unless the provider says that it is unverified, or another name.
        subject: The id of the user at the provider, which never changes.
        provider: Stands for the provider and the console's client there.
        groups: Stands for those of the user's groups that have roles: a user may be in thousands of others.
    """

    name: str
    subject: str
    provider: str
    groups: str


@dataclass(frozen=True, slots=True)
class Session:
    """A login.

    Attributes:
        id: Random.
        token: The viewer's token; empty if a provider has named the viewer.
        began_at_s, expires_at_s: Unix seconds.
        user: Whom the provider has named; None: the session has a token.
    """

    id: str
    token: str
    began_at_s: float
    expires_at_s: float
    user: User | None = None


class Sessions:
    """Makes and reads cookies.

    Args:
        key: 32 random bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._fernet = cipher(key, b"sessions")
        self._csrf_key = hashlib.sha256(b"csrf" + key).digest()
        self._ended = Ended()

    def begin(self, token: str | User, now_s: float, expires_at_s: float) -> tuple[Session, str]:
        """Begin a session with a token, or of a user; returns it with its cookie."""
        user = token if isinstance(token, User) else None
        session = Session(new_id(), "" if isinstance(token, User) else token, now_s, expires_at_s, user)
        content = {"id": session.id, "token": session.token, "began": now_s, "expires": expires_at_s}
        if user is not None:
            content["user"] = astuple(user)
        text = json.dumps(content, ensure_ascii=False)
        return session, self._fernet.encrypt(text.encode()).decode()

    def read(self, cookie: str, now_s: float) -> Session | None:
        """Return the session of a cookie; None if the cookie is not valid, or the session has ended."""
        try:
            content = json.loads(self._fernet.decrypt(cookie.encode()))
            user = User(*content["user"]) if "user" in content else None
            session = Session(content["id"], content["token"], content["began"], content["expires"], user)
        except (InvalidToken, ValueError, KeyError, TypeError):
            return None
        return None if self.has_ended(session, now_s) else session

    def has_ended(self, session: Session, now_s: float) -> bool:
        """Whether a session has expired, or was ended."""
        return now_s >= session.expires_at_s or self._ended.has(session.id, session.began_at_s)

    def end(self, session: Session, now_s: float) -> None:
        """End a session. Its cookie is not valid any more."""
        self._ended.add(session.id, session.expires_at_s, now_s)

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


def cipher(key: bytes, purpose: bytes) -> Fernet:
    """Return what encrypts the cookies of one purpose, so that none can be taken for one of another."""
    return Fernet(urlsafe_b64encode(hashlib.sha256(purpose + key).digest()))


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


def check_session_key(path: Path | None) -> None:
    """Raises StartupError: `session_key` would. Nothing is created."""
    if path is not None and path.exists():
        session_key(path)
    else:
        check_written_file("--session-key-file", path)


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
