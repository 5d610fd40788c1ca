"""OpenID Connect providers for the tests: a real one, and one whose tokens the test makes.

`real_provider` runs oidc-provider, which is certified. `scripted_provider` is a peer of ours that signs whatever the
test says, for tokens and answers that no real provider sends.
"""

import json
import os
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, Key, KeySet

from broker.support import running_broker
from console.access_support import Browser, Site, running_console
from interop import build
from interop.peers import Child, free_ports
from trio_nsq.access.secret import Secret
from trio_nsq.console.oidc.options import OIDCOptions, parse_group_grant

CLIENT = "console"
SECRET = "s3cret:%/"
_DEADLINE_S = 60.0
_FORM = re.compile(r'action="([^"]+)"')


def options(issuer: str, *roles: str, **more: Any) -> OIDCOptions:
    """Options of a console for a provider of this module."""
    grants = tuple(map(parse_group_grant, roles or ("ops=read+publish+consume+manage+admin",)))
    return OIDCOptions(issuer, CLIENT, **{"client_secret": Secret(SECRET), "grants": grants, **more})


@contextmanager
def real_provider(
    users: Mapping[str, Mapping[str, Any]],
    console: str,
    *,
    port: int = 0,
    seed: str = "first",
    public: bool = False,
) -> Iterator[str]:
    """Run oidc-provider until the block exits, and return its issuer.

    Args:
        users: The claims of each login name.
        console: The URL of the console, without a slash at the end.
        port: The provider's; 0: a free one.
        seed: Another one gives another key.
        public: Whether the console has no secret.
    """
    try:
        script = build.oidc_provider()
    except build.PeerUnavailable as reason:
        if os.environ.get("CI") == "true":
            pytest.fail(f"a peer is missing: {reason}", pytrace=False)
        pytest.skip(str(reason))
    [port] = [port] if port else free_ports(1)
    client: dict[str, Any] = {
        "client_id": CLIENT,
        "redirect_uris": [f"{console}/oidc/callback"],
        "post_logout_redirect_uris": [f"{console}/login"],
    }
    client |= {"token_endpoint_auth_method": "none"} if public else {"client_secret": SECRET}
    settings = {"port": port, "clients": [client], "users": users, "seed": seed}
    server = Child([str(shutil.which("node")), script, json.dumps(settings)])
    try:
        line = server.stdout.next(time.monotonic() + _DEADLINE_S)
        if line != "listening":
            server.fail("it does not listen")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.close()


async def authorize(browser: Browser, user: str, path: str = "/oidc/login") -> str:
    """Log in at the real provider; return the path and query with which it sends the browser back."""
    answer = await browser.get(path)
    assert answer.status_code == 303, answer.text
    for _ in range(10):
        url = answer.headers["location"]
        if "/oidc/callback?" in url:
            parts = urlsplit(url)
            return f"{parts.path}?{parts.query}"
        answer = await browser.client.get(httpx.URL(str(answer.url)).join(url))
        if answer.status_code == 200:
            form = _FORM.search(answer.text)
            assert form, answer.text
            data = {"prompt": "login", "login": user, "password": "any"}
            answer = await browser.client.post(httpx.URL(str(answer.url)).join(form[1]), data=data)
    raise AssertionError(f"the provider does not send the browser back: {answer.url}")


@dataclass
class ScriptedProvider:
    """A provider of ours.

    Attributes:
        issuer: Its URL.
        metadata: The discovery document; more keys may be added, and others replaced.
        key: Signs, with the algorithm ES256.
        listed: The keys that it lists.
        claims: Of the next ID token, besides those that every one has; None leaves one out.
        header: Of the next ID token.
        id_token: The next ID token itself, made of the claims; None: it is signed.
        token_answer: The status and answer of the token endpoint instead.
        userinfo: The answer of the userinfo endpoint.
        requests: Method, path and form of all requests, and the Authorization header.
    """

    issuer: str
    metadata: dict[str, Any] = field(default_factory=dict)
    key: Key = field(default_factory=lambda: ECKey.generate_key("P-256", {"use": "sig"}, auto_kid=True))
    listed: list[Key] = field(default_factory=list)
    claims: dict[str, Any] = field(default_factory=dict)
    header: dict[str, Any] = field(default_factory=dict)
    id_token: Callable[[dict[str, Any]], str] | None = None
    token_answer: tuple[int, bytes] | None = None
    userinfo: tuple[int, Any] = (200, {"sub": "u1"})
    nonce: str = ""
    requests: list[tuple[str, str, dict[str, str], str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listed.append(self.key)
        self.metadata |= {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/auth",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/jwks",
            "id_token_signing_alg_values_supported": ["ES256", "RS256", "HS256", "none"],
        }

    def all_claims(self) -> dict[str, Any]:
        """The claims of the next ID token."""
        now_s = int(time.time())
        valid = {
            "iss": self.issuer,
            "sub": "u1",
            "aud": CLIENT,
            "exp": now_s + 300,
            "iat": now_s,
            "nonce": self.nonce,
        }
        given = {**valid, "groups": ["ops"], "email": "ann@example.com", **self.claims}
        return {name: value for name, value in given.items() if value is not None}

    def sign(self, claims: dict[str, Any]) -> str:
        """A token of the provider."""
        return jwt.encode({"alg": "ES256", "kid": self.key.kid, **self.header}, claims, self.key)

    def answer(self, method: str, path: str, form: dict[str, str], authorization: str) -> tuple[int, Any]:
        """The answer to a request."""
        self.requests.append((method, path, form, authorization))
        if path == "/.well-known/openid-configuration":
            return 200, self.metadata
        if path == "/jwks":
            return 200, KeySet(self.listed).as_dict(private=False)
        if path == "/userinfo":
            return self.userinfo
        if path == "/token":
            token = (self.id_token or self.sign)(self.all_claims())
            return self.token_answer or (
                200,
                {"access_token": "at", "token_type": "Bearer", "id_token": token},
            )
        return 404, {}


@contextmanager
def scripted_provider() -> Iterator[ScriptedProvider]:
    """Run a provider of ours until the block exits."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            form = dict(parse_qsl(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()))
            path, authorization = urlsplit(self.path).path, self.headers.get("Authorization", "")
            status, answer = provider.answer(self.command, path, form, authorization)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    provider = ScriptedProvider(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Login:
    """A login that a browser has begun: the parameters that the provider got."""

    query: dict[str, str]

    def back(self, **more: str) -> str:
        """The path and query with which a provider sends the browser back."""
        return f"/oidc/callback?{httpx.QueryParams({'code': 'c0de', 'state': self.query['state'], **more})}"


async def begin(browser: Browser, provider: ScriptedProvider, path: str = "/oidc/login") -> Login:
    """Begin a login at a scripted provider, which learns the nonce."""
    answer = await browser.get(path)
    assert answer.status_code == 303, answer.text
    parts = urlsplit(answer.headers["location"])
    assert f"{parts.scheme}://{parts.netloc}{parts.path}" == provider.metadata["authorization_endpoint"]
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    provider.nonce = query["nonce"]
    return Login(query)


async def log_in(browser: Browser, provider: ScriptedProvider, path: str = "/oidc/login") -> httpx.Response:
    """Log in at a scripted provider; return the console's last answer."""
    return await browser.get((await begin(browser, provider, path)).back())


async def shown_user(browser: Browser) -> str:
    """Whom the pages show as the viewer; empty: nobody."""
    page = await browser.get("/login")
    found = re.search(r"You are logged in as <strong>(.*?)</strong>", page.text)
    return found[1] if found else ""


@asynccontextmanager
async def site_of(
    folder: Path, provider: ScriptedProvider, *roles: str, oidc: Mapping[str, Any] | None = None, **more: Any
) -> AsyncIterator[Site]:
    """A console of a broker without authentication, for a scripted provider."""
    settings = replace(options(provider.issuer, *roles), **(oidc or {}))
    async with running_broker(folder / "d") as broker:
        async with running_console(folder, broker, oidc=settings, secret=Secret(), **more) as site:
            yield site
