"""What a login with a provider refuses: tokens of others or for other logins, other browsers, other answers."""

import hmac
import json
import re
from base64 import urlsafe_b64encode
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from joserfc import jwt
from joserfc.jwk import ECKey, KeySet, OctKey, RSAKey

from console.access_support import open_site
from console.oidc_support import (
    CLIENT,
    begin,
    log_in,
    scripted_provider,
    shown_user,
    site_of,
)
from soak import examples
from trio_nsq.console.oidc.id_token import InvalidIDToken, parse_keys, read_id_token
from trio_nsq.console.oidc.pending import LIFETIME_S, PendingLogins

ISSUER = "https://login.example.com"
NOW_S = 1_800_000_000.0
KEY = ECKey.generate_key("P-256", {"use": "sig", "kid": "k1"})
OTHER_KEY = ECKey.generate_key("P-256", {"use": "sig", "kid": "k1"})
RSA = RSAKey.generate_key(2048, {"use": "sig", "kid": "r1"})
KEYS = KeySet([KEY, RSA]).as_dict(private=False)
VALID = {
    "iss": ISSUER,
    "sub": "u1",
    "aud": CLIENT,
    "exp": int(NOW_S) + 300,
    "iat": int(NOW_S),
    "nonce": "n1",
    "groups": ["ops"],
}


def signed(claims: dict[str, Any], key: Any = KEY, **header: Any) -> str:
    return jwt.encode(
        {"alg": "ES256", "kid": "k1", **header}, claims, key, algorithms=["ES256", "HS256", "RS256"]
    )


def read(token: str, keys: Any = KEYS, now_s: float = NOW_S) -> dict[str, Any]:
    return read_id_token(
        token,
        parse_keys(keys),
        issuer=ISSUER,
        client_id=CLIENT,
        nonce="n1",
        algorithms=("ES256", "RS256"),
        now_s=now_s,
    )


def unsigned(header: dict[str, Any], claims: dict[str, Any], signature: str = "") -> str:
    """A token without a signature of a key."""
    parts = (urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in (header, claims))
    return ".".join((*parts, signature))


# --------------------------------------------------------------------------------- ID tokens


@pytest.mark.parametrize(
    "claims",
    [
        {},
        {"aud": [CLIENT]},
        {"aud": [CLIENT, "other"], "azp": CLIENT},
        {"azp": CLIENT},
        {"exp": NOW_S - 30},
        {"iat": NOW_S + 30, "nbf": NOW_S + 30},
        {"exp": NOW_S + 1.5, "sub": "a" * 255},
        {"groups": [f"group {n}" for n in range(10_000)]},
    ],
)
def test_valid_tokens_are_accepted(claims: dict[str, Any]) -> None:
    assert read(signed({**VALID, **claims})) == {**VALID, **claims}


@pytest.mark.parametrize(
    "claims",
    [
        {"iss": None},
        {"iss": ISSUER + "/"},
        {"iss": "https://evil.example"},
        {"iss": [ISSUER]},
        {"aud": None},
        {"aud": "other"},
        {"aud": []},
        {"aud": [["console"]]},
        {"aud": [CLIENT, "other"]},
        {"azp": "other"},
        {"azp": ["console"]},
        {"aud": [CLIENT, "other"], "azp": "other"},
        {"exp": None},
        {"exp": NOW_S - 61},
        {"exp": str(int(NOW_S) + 300)},
        {"exp": True},
        {"exp": float("nan")},
        {"exp": float("inf")},
        {"iat": None},
        {"iat": NOW_S + 90},
        {"nbf": NOW_S + 90},
        {"nonce": None},
        {"nonce": "n2"},
        {"nonce": ""},
        {"nonce": ["n1"]},
        {"sub": None},
        {"sub": ""},
        {"sub": 7},
        {"sub": ["u1"]},
        {"sub": "a" * 256},
        {"sub": "ünï"},
        {"sub": "a\nb"},
    ],
    ids=repr,
)
def test_tokens_with_other_claims_are_refused(claims: dict[str, Any]) -> None:
    given = {name: value for name, value in {**VALID, **claims}.items() if value is not None}
    with pytest.raises(InvalidIDToken):
        read(signed(given))


def hmac_with_a_public_key() -> str:
    """The attack on libraries that take a public key for the secret of an HMAC."""
    content, _, _ = unsigned({"alg": "HS256", "kid": "r1"}, VALID).rpartition(".")
    signature = hmac.digest(RSA.as_pem(private=False), content.encode(), "sha256")
    return f"{content}.{urlsafe_b64encode(signature).rstrip(b'=').decode()}"


@pytest.mark.parametrize(
    "forged",
    [
        lambda: unsigned({"alg": "none"}, VALID),
        lambda: unsigned({"alg": "None", "kid": "k1"}, VALID),
        lambda: unsigned({"alg": "none", "kid": "k1"}, VALID, signed(VALID).rpartition(".")[2]),
        lambda: unsigned({"alg": "ES256", "kid": "k1"}, VALID),
        lambda: unsigned({"alg": "RS256", "kid": "k1"}, VALID, signed(VALID).rpartition(".")[2]),
        lambda: unsigned({"kid": "k1"}, VALID, signed(VALID).rpartition(".")[2]),
        lambda: unsigned({"alg": ["ES256"], "kid": "k1"}, VALID, "AA"),
        lambda: unsigned({"alg": "ES256", "kid": {"a": 1}}, VALID, "AA"),
        lambda: unsigned({"alg": "ES256", "kid": "k1", "crit": ["exp"], "exp": 1}, VALID, "AA"),
        lambda: signed(VALID, OTHER_KEY),
        lambda: signed(VALID, OTHER_KEY, jwk=OTHER_KEY.as_dict(private=False)),
        lambda: signed(VALID, OTHER_KEY, kid="k2"),
        lambda: signed(VALID, OTHER_KEY, kid="k2", jku="https://evil.example/jwks"),
        lambda: signed(VALID, RSA, alg="RS256"),
        hmac_with_a_public_key,
        lambda: signed(VALID, OctKey.import_key("secret-of-the-client-with-32-bytes!!"), alg="HS256"),
        lambda: "",
        lambda: "a.b.c",
        lambda: "é.é.é",
        lambda: signed(VALID) + ".x.y",
        lambda: "." * 100_000,
        lambda: unsigned({"alg": "ES256", "kid": "k1", "x": "x" * 10_000}, VALID, "AA"),
        lambda: "[" * 8000,
    ],
)
def test_tokens_without_a_signature_of_the_provider_are_refused(forged: Callable[[], str]) -> None:
    with pytest.raises(InvalidIDToken):
        read(forged())


def test_a_token_without_a_key_id_is_accepted_with_one_key_only() -> None:
    token = jwt.encode({"alg": "ES256"}, VALID, KEY)
    assert read(token, KeySet([KEY]).as_dict(private=False)) == VALID
    with pytest.raises(InvalidIDToken):
        read(token)


@given(st.binary(max_size=4000), st.integers(0, 1000))
def test_whatever_is_changed_in_a_token_is_refused(data: bytes, at: int) -> None:
    token = signed(VALID)
    for forged in (
        data.decode("latin-1"),
        token[: at % len(token)] + data.decode("latin-1") + token[at % len(token) :],
    ):
        try:
            assert read(forged) == VALID
            assert forged.encode() == token.encode()
        except InvalidIDToken:
            pass


@pytest.mark.parametrize(
    "keys",
    [
        [],
        {},
        {"keys": {}},
        {"keys": []},
        {"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "k1"}]},
        {"keys": [{**KEYS["keys"][0], "use": "enc"}]},
        {
            "keys": [
                7,
                None,
                {"kty": "RSA"},
                {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"},
                {"kty": "new"},
            ]
        },
    ],
)
def test_key_sets_without_a_public_key_for_signatures_are_refused(keys: Any) -> None:
    with pytest.raises(ValueError, match="key set"):
        parse_keys(keys)


def test_unknown_keys_do_not_spoil_the_others() -> None:
    assert (
        read(signed(VALID), {"keys": [{"kty": "new"}, 7, *KEYS["keys"], {"kty": "RSA", "n": "!"}]}) == VALID
    )


# -------------------------------------------------------------------------- logins that are not finished


@settings(max_examples=examples(40))
@given(st.text(max_size=200), st.integers(0, 500), st.binary(min_size=1, max_size=3))
def test_a_changed_cookie_or_state_is_refused(state: str, at: int, data: bytes) -> None:
    pending = PendingLogins(bytes(32))
    login, cookie = pending.begin("https://c/oidc/callback", "/", NOW_S)
    assert pending.take(cookie, state, NOW_S) is None
    at %= len(cookie)
    forged = cookie[:at] + data.decode("latin-1") + cookie[at + len(data) :]
    if forged.rstrip("=") != cookie.rstrip("="):
        assert pending.take(forged, login.state, NOW_S) is None
    assert PendingLogins(bytes(31) + b"x").take(cookie, login.state, NOW_S) is None
    assert pending.take(cookie, login.state, NOW_S) == login
    assert pending.take(cookie, login.state, NOW_S) is None


def test_a_login_has_to_be_finished_in_time() -> None:
    pending = PendingLogins(bytes(32))
    for after_s, is_in_time in ((LIFETIME_S - 1, True), (LIFETIME_S, False), (-1, False)):
        login, cookie = pending.begin("https://c/oidc/callback", "/", NOW_S)
        assert (pending.take(cookie, login.state, NOW_S + after_s) is not None) is is_in_time


# ------------------------------------------------------------------------------------------ the whole login


async def test_forged_tokens_begin_no_session(tmp_path: Path) -> None:
    with scripted_provider() as provider:
        async with site_of(tmp_path, provider) as site:
            for claims in (
                {"nonce": "other"},
                {"aud": "other"},
                {"exp": 1},
                {"iss": ISSUER},
                {"azp": "other"},
            ):
                async with site.browser() as browser:
                    provider.claims = claims
                    answer = await log_in(browser, provider)
                    assert (answer.status_code, "The login failed" in answer.text) == (403, True), claims
                    assert await shown_user(browser) == ""
            provider.claims = {}
            async with site.browser() as browser:
                assert (await log_in(browser, provider)).status_code == 200
                assert await shown_user(browser) == "ann@example.com"
            failed = [line for line in site.audited() if line["event"] == "login_failed"]
            assert {line["error"] for line in failed} == {"LOGIN_REFUSED"}
            assert "c0de" not in site.audit.read_text()


async def test_the_request_has_pkce_and_the_code_is_exchanged_with_it(tmp_path: Path) -> None:
    with scripted_provider() as provider:
        async with site_of(tmp_path, provider) as site, site.browser() as browser:
            login = await begin(browser, provider)
            assert login.query["code_challenge_method"] == "S256"
            assert (await browser.get(login.back())).status_code == 200
            [form] = [form for _, path, form, _ in provider.requests if path == "/token"]
            assert form["redirect_uri"] == login.query["redirect_uri"] == f"{site.root}/oidc/callback"
            challenge = (
                urlsafe_b64encode(sha256(form["code_verifier"].encode()).digest()).rstrip(b"=").decode()
            )
            assert challenge == login.query["code_challenge"]
            second = (await begin(browser, provider)).query
            for name in ("state", "nonce", "code_challenge"):
                assert second[name] != login.query[name]


async def test_another_browser_cannot_finish_a_login(tmp_path: Path) -> None:
    with scripted_provider() as provider:
        async with site_of(tmp_path, provider) as site, site.browser() as victim, site.browser() as attacker:
            login = await begin(attacker, provider)
            for browser in (victim, attacker):
                await begin(browser, provider)  # it has a cookie of its own
                answer = await browser.get(login.back())
                assert (answer.status_code, "Log in again" in answer.text) == (403, True)
                assert await shown_user(browser) == ""
            assert not [path for _, path, _, _ in provider.requests if path == "/token"]


async def test_texts_of_a_link_are_not_shown_without_a_login(tmp_path: Path) -> None:
    with scripted_provider() as provider:
        async with site_of(tmp_path, provider) as site, site.browser() as browser:
            query = "error=call_555&error_description=call_555_now"
            page = (await browser.get(f"/oidc/callback?{query}")).text
            assert "call_555" not in page[page.index("<main") : page.index("</main>")]
            login = await begin(browser, provider)
            answer = await browser.get(login.back(error="bad<b>", error_description="call &\u202e me"))
            assert answer.status_code == 403
            assert "bad&lt;b&gt;" in answer.text
            assert "\u202e" not in answer.text


async def test_an_answer_of_another_provider_is_refused(tmp_path: Path) -> None:
    with scripted_provider() as provider:
        provider.metadata["authorization_response_iss_parameter_supported"] = True
        async with site_of(tmp_path, provider) as site, site.browser() as browser:
            for more in ({}, {"iss": "https://evil.example"}, {"iss": ""}):
                login = await begin(browser, provider)
                assert (await browser.get(login.back(**more))).status_code == 403, more
            assert not [path for _, path, _, _ in provider.requests if path == "/token"]
            login = await begin(browser, provider)
            assert (await browser.get(login.back(iss=provider.issuer))).status_code == 200


async def test_only_pages_of_the_console_are_shown_after_a_login(tmp_path: Path) -> None:
    with scripted_provider() as provider:
        async with site_of(tmp_path, provider) as site:
            for target in (
                "//evil.example",
                "/\\evil.example",
                "\\\\evil.example",
                "https://evil.example",
                "javascript:alert(1)",
                "/\t/evil.example",
                "/%0a//evil",
                '/x"><script>',
                "/a?b=1&c='2'",
            ):
                async with site.browser() as browser:
                    answer = await log_in(browser, provider, f"/oidc/login?{urlencode({'next': target})}")
                    assert answer.status_code == 200
                    found = re.search(r'content="0; url=([^"]*)"', answer.text)
                    assert found
                    assert re.match(r"/(?![/\\])", found[1]), target
                    assert "<script" not in answer.text


async def test_a_session_is_new_at_each_login(tmp_path: Path) -> None:
    with scripted_provider() as provider:
        async with site_of(tmp_path, provider) as site, site.browser() as browser:
            await log_in(browser, provider)
            first = dict(browser.client.cookies)
            await log_in(browser, provider)
            second = dict(browser.client.cookies)
            name = next(name for name in first if "session" in name)
            assert first[name] != second[name]
            browser.client.cookies.set(name, first[name])
            assert await shown_user(browser) == ""  # the second login has ended the first session


async def test_cookies_are_limited_and_bound_to_the_site(tmp_path: Path) -> None:
    """A user may be in thousands of groups, with roles for 200 of them, and the cookie still fits."""
    groups = [f"cn=a rather long name of a group {n},ou=groups,dc=example,dc=com ü" for n in range(5000)]
    with scripted_provider() as provider:
        provider.claims = {"groups": groups, "email": "é" * 64, "sub": "s" * 255}
        roles = [f"{group}=read" for group in groups[:200]]
        async with site_of(tmp_path, provider, *roles) as site, site.browser() as browser:
            login = await begin(browser, provider)
            answer = await browser.get(login.back())
            assert answer.status_code == 200
            cookies = answer.headers.get_list("set-cookie")
            assert max(len(each.encode()) for each in cookies) < 4096
            session = next(each for each in cookies if "_session_" in each)
            assert "HttpOnly; SameSite=Strict" in session
            assert await shown_user(browser) == "é" * 64
            long = "/topics?filter=" + "x" * 1900
            begun = await browser.get(f"/oidc/login?next={long}")
            pending = begun.headers["set-cookie"]
            assert "HttpOnly; SameSite=Lax" in pending
            assert len(pending) < 4096


async def test_the_cookie_needs_https_behind_a_proxy_with_https(tmp_path: Path) -> None:
    with scripted_provider() as provider:
        more: dict[str, Any] = {"base_path": "/nsq", "http_allowed_hosts": ("nsq.example.com",)}
        async with site_of(tmp_path, provider, **more) as site, site.browser() as browser:
            headers = {"X-Forwarded-Proto": "https", "X-Forwarded-Host": "nsq.example.com"}
            answer = await browser.get("/oidc/login", headers)
            assert (
                "redirect_uri=https%3A%2F%2Fnsq.example.com%2Fnsq%2Foidc%2Fcallback"
                in answer.headers["location"]
            )
            assert "Path=/nsq; HttpOnly; SameSite=Lax; Secure" in answer.headers["set-cookie"]
            for wrong in (
                "evil.example",
                "nsq.example.com@evil.example",
                "evil.example/nsq.example.com",
                "a, b",
            ):
                answer = await browser.get("/oidc/login", {"X-Forwarded-Host": wrong})
                assert (answer.status_code, "--oidc-redirect-url" in answer.text) == (403, True), wrong


@pytest.mark.parametrize(
    "groups", [None, [], ["other"], "other", {"ops": 1}, 7, [7, None, ["ops"]], ["OPS", "ops "]]
)
async def test_users_without_a_group_with_roles_are_refused(tmp_path: Path, groups: Any) -> None:
    with scripted_provider() as provider:
        provider.claims = {"groups": groups}
        async with site_of(tmp_path, provider) as site, site.browser() as browser:
            assert (await log_in(browser, provider)).status_code == 403
            assert await shown_user(browser) == ""


@pytest.mark.parametrize(("verified", "status"), [(True, 200), (False, 403), (None, 403), ("true", 403)])
async def test_an_address_that_is_not_verified_is_no_group(
    tmp_path: Path, verified: Any, status: int
) -> None:
    with scripted_provider() as provider:
        provider.claims = {"email_verified": verified, "groups": None}
        oidc = {"groups_claim": "email"}
        async with (
            site_of(tmp_path, provider, "ann@example.com=all", oidc=oidc) as site,
            site.browser() as browser,
        ):
            assert (await log_in(browser, provider)).status_code == status


async def test_groups_of_the_userinfo_endpoint_are_those_of_the_same_user(tmp_path: Path) -> None:
    with scripted_provider() as provider:
        provider.metadata["userinfo_endpoint"] = f"{provider.issuer}/userinfo"
        provider.claims = {"groups": None}
        async with site_of(tmp_path, provider) as site:
            for answer, status in (
                ((200, {"sub": "u1", "groups": ["ops"], "iss": "x", "email": "other@example.com"}), 200),
                ((200, {"sub": "u2", "groups": ["ops"]}), 503),
                ((200, {"groups": ["ops"]}), 503),
                ((200, b"[]"), 503),
                ((401, {}), 503),
            ):
                provider.userinfo = answer
                async with site.browser() as browser:
                    assert (await log_in(browser, provider)).status_code == status
                    assert await shown_user(browser) == ("ann@example.com" if status == 200 else "")


async def test_a_role_that_the_options_do_not_have_any_more_does_not_count(tmp_path: Path) -> None:
    key = bytes(32)
    with scripted_provider() as provider:
        async with site_of(
            tmp_path, provider, "ops=read", session_key=key, http_address="127.0.0.1:0"
        ) as site:
            async with site.browser() as browser:
                await log_in(browser, provider)
                cookies = dict(browser.client.cookies)
        for role, oidc, name in (
            ("ops=manage", {}, "ann@example.com"),
            ("devs=read", {}, ""),
            ("ops=read", {"issuer": f"{provider.issuer}/other"}, ""),
        ):
            async with site_of(tmp_path, provider, role, oidc=oidc, session_key=key) as site:
                async with site.browser() as browser:
                    port = site.root.rpartition(":")[2]
                    for cookie, value in cookies.items():
                        browser.client.cookies.set(f"{cookie.rpartition('_')[0]}_{port}", value)
                    assert await shown_user(browser) == name


async def test_the_provider_is_not_asked_for_keys_again_and_again(tmp_path: Path) -> None:
    """Tokens with unknown keys have them fetched again, but not more often than every ten seconds."""
    with scripted_provider() as provider:
        async with site_of(tmp_path, provider) as site, site.browser() as browser:
            provider.header = {"kid": "unknown"}
            for _ in range(3):
                assert (await log_in(browser, provider)).status_code == 403
            assert len([path for _, path, _, _ in provider.requests if path == "/jwks"]) <= 2


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        ((400, b'{"error": "invalid_grant"}'), 403, "invalid_grant"),
        ((401, b'{"error": "invalid_client"}'), 503, "--oidc-client-secret-file"),
        ((500, b"<html>"), 503, "status 500"),
        ((200, b"[" * 100_000), 503, "not a JSON object"),
        ((200, b"{}"), 503, "no ID token"),
        ((200, b'{"id_token": 7}'), 503, "no ID token"),
        ((200, b" " * (2 << 20)), 503, "longer than"),
    ],
)
async def test_answers_of_the_token_endpoint_that_cannot_be_used(
    tmp_path: Path, answer: tuple[int, bytes], status: int, text: str
) -> None:
    with scripted_provider() as provider:
        async with site_of(tmp_path, provider) as site, site.browser() as browser:
            provider.token_answer = answer
            found = await log_in(browser, provider)
            assert (found.status_code, text in found.text) == (status, True), found.text


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"issuer": "https://evil.example"}, "--oidc-issuer must be the same"),
        ({"token_endpoint": "http://evil.example/token"}, "token_endpoint"),
        ({"jwks_uri": None}, "no jwks_uri"),
        ({"authorization_endpoint": "javascript:alert(1)"}, "authorization_endpoint"),
        ({"id_token_signing_alg_values_supported": ["HS256", "none"]}, "signs with HS256, none"),
    ],
)
async def test_a_provider_whose_document_cannot_be_used(
    tmp_path: Path, metadata: dict[str, Any], text: str
) -> None:
    with scripted_provider() as provider:
        provider.metadata |= metadata
        async with site_of(tmp_path, provider) as site, site.browser() as browser:
            answer = await browser.get("/oidc/login")
            assert (answer.status_code, text in answer.text) == (503, True), answer.text


async def test_a_console_without_a_provider_has_no_such_pages(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site, site.browser() as browser:
        for path in ("/oidc/login", "/oidc/callback?code=a&state=b"):
            answer = await browser.get(path)
            assert (answer.status_code, "--oidc-issuer" in answer.text) == (404, True)
