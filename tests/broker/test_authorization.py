"""Tests for queries to auth servers over real sockets, and for the meaning of their answers."""

import json
import logging
import re
import ssl
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme

from broker.auth_server import (
    EVERYTHING,
    answer,
    authorization,
    running_auth_server,
    threaded_auth_server,
)
from broker.support import PATIENCE_S, until
from interop.peers import nsqd
from trio_nsq.access.access import AuthError
from trio_nsq.access.policy import Identity
from trio_nsq.broker import BrokerOptions, StartupError
from trio_nsq.broker.session.auth_service import (
    MAX_ANSWER_BYTES,
    Answer,
    AuthClient,
    encode_query,
    parse_answer,
)
from trio_nsq.broker.session.authorizer import auth_reply
from trio_nsq.http.messages import Request, Response

# ------------------------------------------------------------------------------------------------ the answer


def allows(identity: Identity, topic: str, channel: str | None) -> bool:
    """Return whether an identity may subscribe to a channel, or without one, publish to a topic."""
    return identity.allows("publish" if channel is None else "consume", topic, channel)


def allowing(**fields: Any) -> Identity:
    line = {"topic": ".*", "channels": [".*"], "permissions": ["subscribe", "publish"]} | fields
    return parse_answer(json.dumps({"ttl": 1, "authorizations": [line]}).encode(), 0).identity


def test_fields_of_an_answer() -> None:
    body = b'{"ttl":60,"identity":"i","identity_url":"u","authorizations":[{},{}]}'
    parsed = parse_answer(body, now=1000.5)
    identity = parsed.identity
    assert (identity.name, identity.url, len(identity.grants)) == ("i", "u", 2)
    assert parsed.valid_until_s == 1060.5


@pytest.mark.parametrize(
    ("pattern", "allowed", "refused"),
    [
        (".*", ["logs", "a"], []),
        ("logs", ["logs"], ["catalogs-secret", "logs2", "log"]),
        ("logs|audit", ["logs", "audit"], ["logs2", "my-audit"]),  # the whole name, on either side of a |
        ("^logs.*$", ["logs", "logs.eu"], ["my-logs"]),
        ("logs\\..*", ["logs.eu"], ["logs", "logs-eu"]),
        ("(?i)LOGS", ["logs", "Logs"], []),
        # Character classes of RE2 that `re` reads differently.
        ("[[:lower:]]+", ["logs"], ["Logs", "[:lower"]),
        ("\\pL+\\z", ["logs"], ["logs1"]),
        ("", [], ["logs"]),
    ],
)
def test_patterns_match_whole_names(pattern: str, allowed: list[str], refused: list[str]) -> None:
    topics = allowing(topic=pattern)
    channels = allowing(channels=["never", pattern])
    for name in allowed:
        assert allows(topics, name, "c")
        assert allows(topics, name, None)
        assert allows(channels, "t", name)
    for name in refused:
        assert not allows(topics, name, "c")
        assert not allows(topics, name, None)
        assert not allows(channels, "t", name)


def test_permissions_are_separate() -> None:
    assert allows(allowing(permissions=["subscribe"]), "t", "c")
    assert not allows(allowing(permissions=["subscribe"]), "t", None)
    assert allows(allowing(permissions=["publish"]), "t", None)
    assert not allows(allowing(permissions=["publish"]), "t", "c")


@pytest.mark.parametrize(
    ("channels", "allowed"),
    [(["c"], False), ([], False), ([".+"], False), ([".*"], True), ([""], True), (["c", "d?"], True)],
)
def test_publish_is_checked_with_channels_as_in_nsqd(channels: list[str], allowed: bool) -> None:
    assert allows(allowing(channels=channels), "t", None) is allowed


def test_one_authorization_is_enough_and_they_do_not_combine() -> None:
    lines = [
        {"topic": "a", "channels": ["c"], "permissions": ["subscribe"]},
        {"topic": "b", "channels": [".*"], "permissions": ["publish"]},
    ]
    both = parse_answer(json.dumps({"ttl": 1, "authorizations": lines}).encode(), 0).identity
    assert allows(both, "a", "c")
    assert allows(both, "b", None)
    assert not allows(both, "b", "c")
    assert not allows(both, "a", None)


def test_patterns_take_linear_time() -> None:
    """A client chooses the name: `re` could keep the whole broker busy for centuries."""
    assert not allows(allowing(topic="(a+)+!"), "a" * 64, None)


@pytest.mark.parametrize(
    "body",
    [
        b'{"ttl":5,"authorizations":null,"identity":null}',
        b'{"TTL":5}',
        b'{"ttl":1,"ttl":5,"ttl":null,"more":{"NaN":[1e400]}}',
        b'{"ttl":5,"authorizations":[]} \n',
        b'{"ttl":5,"authorizations":[null,{"topic":null,"channels":[null],"permissions":[]}]}',
    ],
)
def test_answers_that_go_accepts(body: bytes) -> None:
    parsed = parse_answer(body, 0)
    assert parsed.valid_until_s == 5
    assert not allows(parsed.identity, "t", "c")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "the answer is not valid"),
        (b"null", "invalid TTL 0"),
        (b"{}", "invalid TTL 0"),
        (b'{"ttl":0}', "invalid TTL 0"),
        (b'{"ttl":-1}', "invalid TTL -1"),
        (b'{"ttl":5.0}', "ttl is of the wrong type"),
        (b'{"ttl":5e3}', "ttl is of the wrong type"),
        (b'{"ttl":true}', "ttl is of the wrong type"),
        (b'{"ttl":"5"}', "ttl is of the wrong type"),
        (b'{"ttl":"5","ttl":5}', "ttl is of the wrong type"),
        (b'{"ttl":9223372036854775808}', "ttl is of the wrong type"),
        (b'{"ttl":%s}' % (b"9" * 5000), "ttl is of the wrong type"),
        (b'{"ttl":NaN}', "NaN is not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"ttl":5} {}', "Extra data"),
        (b'\xef\xbb\xbf{"ttl":5}', "not valid"),
        ('{"ttl":5}'.encode("utf-16"), "not valid"),
        (b'{"ttl":5,"identity":1}', "identity is of the wrong type"),
        (b'{"ttl":5,"authorizations":{}}', "authorizations is of the wrong type"),
        (b'{"ttl":5,"authorizations":[[]]}', "authorizations is of the wrong type"),
        (b'{"ttl":5,"authorizations":[{"channels":"c"}]}', "channels is of the wrong type"),
        (b'{"ttl":5,"authorizations":[{"channels":[1]}]}', "channels is of the wrong type"),
        (b'{"ttl":5,"authorizations":[{"permissions":["root"]}]}', "unknown permission root"),
        (b'{"ttl":5,"authorizations":[{"permissions":[null]}]}', "unknown permission"),
        (b'{"ttl":5,"authorizations":[{"topic":"("}]}', "unable to compile topic '('"),
        (
            b'{"ttl":5,"authorizations":[{"topic":"a"},{"channels":["a","(?=b)"]}]}',
            "unable to compile channel",
        ),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_invalid_answers(body: bytes, reason: str) -> None:
    with pytest.raises(AuthError, match=re.escape(reason)):
        parse_answer(body, 0)


def test_invalid_pattern_is_reported_once(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AuthError):
        parse_answer(b'{"ttl":5,"authorizations":[{"topic":"("}]}', 0)
    assert capfd.readouterr() == ("", "")  # the library itself would write to stderr


def test_reply_to_the_client() -> None:
    body = '{"ttl":5,"identity":"<é&\\u2028\\ud800>","identity_url":"a\\"b\\n","authorizations":[{}]}'
    assert (
        auth_reply(parse_answer(body.encode(), 0).identity)
        == (
            '{"identity":"\\u003cé\\u0026\\u2028\ufffd\\u003e","identity_url":"a\\"b\\n","permission_count":1}'
        ).encode()
    )


# ------------------------------------------------------------------------------------------------ queries

ASKED = {"remote_ip": "127.0.0.1", "tls": False, "common_name": ""}
SECRET = bytes(range(256)) + b"a b+~"
ENCODED_SECRET = "".join(
    chr(byte)
    if (chr(byte).isalnum() and byte < 128) or byte in b"-_.~"
    else "+"
    if byte == 32
    else f"%{byte:02X}"
    for byte in SECRET
)


def options(*addresses: str, **more: Any) -> BrokerOptions:
    return BrokerOptions(data_path=Path("unused"), auth_http_addresses=addresses, **more)


async def ask(settings: BrokerOptions, first: int = 0, secret: bytes = b"s") -> Answer:
    client = AuthClient(settings, pick=lambda count: first % count)
    try:
        with trio.fail_after(PATIENCE_S):
            return await client.query(remote_ip="127.0.0.1", tls=False, common_name="", secret=secret)
    finally:
        await client.aclose()


def test_query_string() -> None:
    query = encode_query(remote_ip="::1", tls=True, common_name="Jané & Co", secret=SECRET)
    assert query == f"common_name=Jan%C3%A9+%26+Co&remote_ip=%3A%3A1&secret={ENCODED_SECRET}&tls=true"
    not_utf8 = encode_query(remote_ip="", tls=False, common_name="\udcff", secret=b"")
    assert not_utf8 == "common_name=%FF&remote_ip=&secret=&tls=false"


async def test_server_is_queried() -> None:
    async with running_auth_server() as server:
        before = trio.current_time()
        answered = await ask(options(server.address), secret=SECRET)
        assert answered.identity.name == "tester"
        assert allows(answered.identity, "t", "c")
        assert before + 3600 <= answered.valid_until_s <= trio.current_time() + 3600
        assert server.queries == [f"common_name=&remote_ip=127.0.0.1&secret={ENCODED_SECRET}&tls=false"]
        assert server.headers[0]["accept"] == "application/vnd.nsq; version=1.0"
        assert server.headers[0]["accept-encoding"] == "identity"


async def test_proxies_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    async with running_auth_server() as server:
        assert (await ask(options(server.address))).identity.name == "tester"


async def test_url_is_used_unchanged() -> None:
    async with running_auth_server() as server:
        host = server.address
        with pytest.raises(AuthError, match="got response 404"):
            await ask(options(f"http://{host}/elsewhere"))
        await ask(options(f"http://user:pass@{host}/auth"))
        assert server.queries == ["common_name=&remote_ip=127.0.0.1&secret=s&tls=false"] * 2
        assert server.headers[0]["authorization"] == "Basic dXNlcjpwYXNz"


async def test_servers_are_tried_in_turn() -> None:
    async with running_auth_server() as good, running_auth_server(Response.text("no", 500)) as bad:
        settings = options(bad.address, good.address, bad.address)
        assert (await ask(settings, first=2)).identity.name == "tester"
        assert (len(bad.queries), len(good.queries)) == (2, 1)
        assert (await ask(settings, first=1)).identity.name == "tester"
        assert (len(bad.queries), len(good.queries)) == (2, 2)


async def test_if_all_fail_all_reasons_are_given_without_passwords() -> None:
    async with (
        running_auth_server(answer(ttl=0)) as server,
        running_auth_server(Response.text("", 403)) as other,
    ):
        settings = options(f"http://user:hidden@{server.address}/auth", other.address, "127.0.0.1:1")
        with pytest.raises(AuthError) as caught:
            await ask(settings, secret=b"hush")
        text = str(caught.value)
        assert text.startswith(
            f"failed to auth against http://xxxxx@{server.address}/auth - invalid TTL 0 (must be >0)"
        )
        assert f"; failed to auth against http://{other.address}/auth - got response 403; failed" in text
        assert "http://127.0.0.1:1/auth - Connection refused" in text
        assert "hidden" not in text
        assert "hush" not in text


async def test_secret_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with running_auth_server() as server:
        await ask(options(server.address), secret=b"hush")
    assert "hush" not in caplog.text


@pytest.mark.parametrize("response", [Response.empty(204), Response(301, headers={"Location": "/auth"})])
async def test_only_status_200_is_accepted(response: Response) -> None:
    async with running_auth_server(response) as server:
        with pytest.raises(AuthError, match=f"got response {response.status}"):
            await ask(options(server.address))
        assert len(server.queries) == 1


async def test_answer_size_is_limited() -> None:
    padded = answer(identity="x" * MAX_ANSWER_BYTES)
    async with running_auth_server(padded) as server:
        with pytest.raises(AuthError, match="longer than"):
            await ask(options(server.address))


async def test_secret_too_long_for_a_url_is_refused() -> None:
    async with running_auth_server() as server:
        with pytest.raises(AuthError, match="URL too long"):
            await ask(options(server.address), secret=b"x" * 70_000)


async def test_silent_server() -> None:
    async with running_auth_server() as silent, running_auth_server() as good:
        silent.gate = trio.Event()
        settings = options(silent.address, good.address, http_client_request_timeout_ms=50)
        assert (await ask(settings)).identity.name == "tester"
        with pytest.raises(AuthError, match=r"no answer within 0\.05 s"):
            await ask(options(silent.address, http_client_request_timeout_ms=50))


async def test_concurrent_queries_do_not_wait_for_each_other() -> None:
    count = 150  # more than usual connection pools allow
    async with running_auth_server() as server:
        server.gate = trio.Event()
        client = AuthClient(options(server.address))
        answers: list[Answer] = []

        async def one(number: int) -> None:
            answers.append(await client.query(**ASKED, secret=str(number).encode()))  # type: ignore[arg-type]

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for number in range(count):
                    nursery.start_soon(one, number)
                await until(lambda: len(server.headers) == count)
                server.gate.set()
        assert len(answers) == len(set(server.queries)) == count
        await client.aclose()


async def test_cancelled_query_leaves_nothing_behind() -> None:
    async with running_auth_server() as server:
        server.gate = trio.Event()
        client = AuthClient(options(server.address))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: client.query(**ASKED, secret=b"s"))  # type: ignore[arg-type]
            await until(lambda: bool(server.headers))
            nursery.cancel_scope.cancel()
        server.gate.set()
        with trio.fail_after(PATIENCE_S):
            assert (await client.query(**ASKED, secret=b"s")).identity.name == "tester"  # type: ignore[arg-type]
        await client.aclose()


# ------------------------------------------------------------------------------------------------ https


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def root_ca_file(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("auth") / "ca.pem"
    authority.cert_pem.write_to_path(path)
    return path


def certified(authority: trustme.CA, name: str = "127.0.0.1") -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(name).configure_cert(context)
    return context


async def test_https(authority: trustme.CA, root_ca_file: Path) -> None:
    async with running_auth_server(tls=certified(authority)) as server:
        address = f"https://{server.address}/auth"
        for version in ("tls1.2", "tls1.3"):
            found = await ask(options(address, tls_root_ca_file=root_ca_file, tls_min_version=version))
            assert found.identity.name == "tester"
        with pytest.raises(AuthError, match="its certificate is not trusted"):
            await ask(options(address))


async def test_https_to_a_server_with_another_name(authority: trustme.CA, root_ca_file: Path) -> None:
    async with running_auth_server(tls=certified(authority, "elsewhere.example")) as server:
        with pytest.raises(AuthError, match="its certificate is not trusted"):
            await ask(options(f"https://{server.address}/auth", tls_root_ca_file=root_ca_file))


async def test_server_that_requires_https(authority: trustme.CA, root_ca_file: Path) -> None:
    async with running_auth_server(tls=certified(authority)) as secure:
        port = int(secure.address.rpartition(":")[2])
        forbidden = Response.json({"message": "TLS_REQUIRED", "https_port": port}, 403)
        async with running_auth_server(forbidden) as plain:
            found = await ask(options(plain.address, tls_root_ca_file=root_ca_file))
            assert found.identity.name == "tester"
            assert plain.queries == secure.queries
            secure.response = forbidden
            with pytest.raises(AuthError, match="got response 403"):  # one message is enough
                await ask(options(plain.address, tls_root_ca_file=root_ca_file))
            del secure.queries[:]
            with pytest.raises(AuthError, match="got response 403"):
                await ask(options(f"https://{secure.address}/auth", tls_root_ca_file=root_ca_file))
            assert len(secure.queries) == 1


async def test_server_without_a_tls_handshake() -> None:
    (listener,) = await trio.open_tcp_listeners(
        0, host="127.0.0.1"
    )  # connections are accepted, without any data
    async with listener:
        host, port = listener.socket.getsockname()
        with pytest.raises(AuthError, match=r"no connection within 0\.05 s"):
            await ask(options(f"https://{host}:{port}/auth", http_client_connect_timeout_ms=50))


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"https_port":"1"}', b'{"https_port":65536}', b'{"https_port":-1}']
)
async def test_status_403_without_a_port(body: bytes) -> None:
    async with running_auth_server(Response(403, body)) as server:
        with pytest.raises(AuthError, match="got response 403"):
            await ask(options(server.address))


# ------------------------------------------------------------------------------------------------ start


@pytest.mark.parametrize(
    "url", ["ftp://user:hidden@host/", "http://user:hid/den@host:1/", "http://hidden@:port"]
)
def test_invalid_address_is_reported_without_its_password(url: str) -> None:
    with pytest.raises(StartupError, match=r"--auth-http-address: \w+://xxxxx@") as caught:
        AuthClient(options(url))
    assert not re.search("user|hid|den", str(caught.value))


@pytest.mark.parametrize("address", ["ftp://127.0.0.1/auth", "http://", "127.0.0.1:port", "", "a b", "://x"])
def test_invalid_addresses(address: str) -> None:
    with pytest.raises(StartupError, match=re.escape(f"--auth-http-address: {address}")):
        AuthClient(options(address))


def test_invalid_ca_file(tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    with pytest.raises(StartupError, match="No such file"):
        AuthClient(options("127.0.0.1:1", tls_root_ca_file=missing))
    missing.write_text("nothing of the kind")
    with pytest.raises(StartupError, match="not a PEM file of certificates"):
        AuthClient(options("127.0.0.1:1", tls_root_ca_file=missing))


def test_missing_package_for_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "re2", None)
    with pytest.raises(StartupError, match="pip install google-re2"):
        AuthClient(options("127.0.0.1:1"))


# ------------------------------------------------------------------------------------------------ nsqd


@pytest.mark.interop
def test_query_equals_that_of_nsqd(tmp_path: Path) -> None:
    """The query of a real nsqd for this secret, byte for byte, and the same reply to the client."""
    import socket
    from struct import pack, unpack

    refused = answer(authorization(), identity="<é&\u2028>\ttester", identity_url="http://x/?a=b&c")
    with threaded_auth_server(refused) as server:
        with nsqd(tmp_path, f"--auth-http-address={server.address}") as broker:
            host, _, port = broker.tcp_address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
                client.sendall(b"  V2AUTH\n" + pack(">i", len(SECRET)) + SECRET)
                with client.makefile("rb") as replies:
                    (size,) = unpack(">i", replies.read(4))
                    reply = replies.read(size)[4:]
            asked = encode_query(remote_ip="127.0.0.1", tls=False, common_name="", secret=SECRET)
            assert server.queries == [asked]
            assert server.headers[0]["accept"] == "application/vnd.nsq; version=1.0"
            assert isinstance(refused.body, bytes)
            assert reply == auth_reply(parse_answer(refused.body, 0).identity)


def test_server_allows_everything_by_default() -> None:
    assert isinstance(EVERYTHING.body, bytes)
    assert allows(parse_answer(EVERYTHING.body, 0).identity, "t", None)


async def test_response_may_depend_on_the_request() -> None:
    def respond(request: Request) -> Response:
        return EVERYTHING if request.query["secret"] == "good" else answer()

    async with running_auth_server(respond) as server:
        assert (await ask(options(server.address), secret=b"good")).identity.grants
        assert not (await ask(options(server.address), secret=b"bad")).identity.grants
