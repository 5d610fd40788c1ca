"""Logins between the redirection to the provider and the way back: an encrypted cookie each. Pure.

The cookie binds the login to the browser that began it, so that nobody can have another person's browser finish a
login: it has the state and the nonce of the request, and the verifier of PKCE.
"""

import json
import secrets
from base64 import urlsafe_b64encode
from dataclasses import asdict, dataclass
from hashlib import sha256
from hmac import compare_digest

from cryptography.fernet import Fernet, InvalidToken

from ..access.ended import Ended
from ..access.sessions import cipher

LIFETIME_S = 600
"""For the login at the provider. Then the user has to begin again."""
_RANDOM_BYTES = 32


@dataclass(frozen=True, slots=True)
class PendingLogin:
    """A login that was begun.

    Attributes:
        state: The provider returns it.
        nonce: The provider puts it into the ID token.
        verifier: Proves to the provider that the client that exchanges the code has begun the login (PKCE).
        redirect_url: Where the provider sends the browser back.
        next_path: The page that is shown after the login, below the base path.
        began_at_s: Unix seconds.
    """

    state: str
    nonce: str
    verifier: str
    redirect_url: str
    next_path: str
    began_at_s: float

    @property
    def challenge(self) -> str:
        """The challenge of PKCE, method S256."""
        return urlsafe_b64encode(sha256(self.verifier.encode()).digest()).rstrip(b"=").decode()


class PendingLogins:
    """Makes and reads the cookies. A login can be finished once.

    Args:
        key: 32 random bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._fernet: Fernet = cipher(key, b"oidc")
        self._used = Ended()

    def begin(self, redirect_url: str, next_path: str, now_s: float) -> tuple[PendingLogin, str]:
        """Begin a login; returns it with its cookie."""
        state, nonce, verifier = (secrets.token_urlsafe(_RANDOM_BYTES) for _ in range(3))
        login = PendingLogin(state, nonce, verifier, redirect_url, next_path, now_s)
        return login, self._fernet.encrypt(json.dumps(asdict(login)).encode()).decode()

    def take(self, cookie: str, state: str, now_s: float) -> PendingLogin | None:
        """Return the login of a cookie, once. None: it is another one's, was taken before, or is too old."""
        try:
            login = PendingLogin(**json.loads(self._fernet.decrypt(cookie.encode())))
        except (InvalidToken, ValueError, TypeError):
            return None
        if not compare_digest(login.state.encode(), state.encode("utf-8", "replace")):
            return None
        is_old = not login.began_at_s <= now_s < login.began_at_s + LIFETIME_S
        if is_old or self._used.has(login.state, login.began_at_s):
            return None
        self._used.add(login.state, login.began_at_s + LIFETIME_S, now_s)
        return login
