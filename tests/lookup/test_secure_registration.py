"""Tests for brokers that register over TLS and with a token: refusals, revocation, new files, and lost connections."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme
from trio.testing import MockClock

from broker.certificates import Certificates
from broker.support import connected, refusal, running_broker
from lookup.support import Lookupd, grant, ours, producer, real, token_of, watched_log, write_auth_file
from trio_nsq.access.secret import Secret
from trio_nsq.broker import BrokerOptions, serve
from trio_nsq.lookup.protocol import PeerInfo
from trio_nsq.lookup.query import LookupFailed, lookup_nodes, lookup_topic
from trio_nsq.lookup.registration import LookupRegistration

INFO = PeerInfo("127.0.0.1", "here", 4151, 4150, "0.1")
GRANTS = {"broker": grant("register"), "reader": grant("consume")}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def clock() -> MockClock:
    """A clock that jumps over the delays between attempts, but not while data is between sockets."""
    return MockClock(autojump_threshold=0.05)


@pytest.fixture
def auth_file(tmp_path: Path) -> Path:
    return write_auth_file(tmp_path / "auth.toml", GRANTS)


@dataclass(eq=False)
class Topic:
    channels: dict[str, object] = field(default_factory=dict)


@asynccontextmanager
async def registration(
    lookupd: Lookupd, *topics: str, host: str = "127.0.0.1", **options: Any
) -> AsyncIterator[Any]:
    """Run the registration of a broker with these topics."""
    address = f"{host}:{lookupd.tcp_address.rpartition(':')[2]}"
    known = {topic: Topic() for topic in topics or ("t",)}
    timeouts: dict[str, Any] = {"connect_timeout_s": 2, "request_timeout_s": 5}
    lookup = LookupRegistration(known, INFO, [address], **timeouts, **options)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lookup.run)
        yield lookup
        nursery.cancel_scope.cancel()


def secret_of(name: str) -> Secret:
    return Secret(token_of(name).decode())


async def test_a_broker_registers_over_tls_with_a_token(
    tmp_path: Path, auth_file: Path, certificates: Certificates
) -> None:
    token_file = tmp_path / "token"
    token_file.write_bytes(token_of("broker") + b"\n")
    tls = certificates.client_context()
    secure: dict[str, Any] = {
        "tls_required": True,
        "auth_file": auth_file,
        "http_allowed_hosts": ("localhost",),
    }
    async with ours(**secure, **certificates.options) as lookupd:
        options: dict[str, Any] = {
            "nsqlookupd_tcp_addresses": (lookupd.tcp_address,),
            "lookupd_tls": True,
            "lookupd_auth_secret_file": token_file,
            "tls_root_ca_file": certificates.ca_path,
            "broadcast_address": "127.0.0.1",
        }
        with watched_log() as log:
            async with producer(lookupd, token=token_of("broker"), tls=tls) as other:
                await other.register("REGISTER t c")
                async with (
                    running_broker(tmp_path / "d", **options) as broker,
                    connected(broker.tcp_address) as client,
                ):
                    await client.publish("t", b"1")
                    await log.until("REGISTER t c", after=await log.until(": querying nsqlookupd https://"))
                    token = token_of("reader").decode()
                    url = f"https://{lookupd.http_address}"
                    found = await lookup_topic(url, "t", timeout_s=5, tls=tls, token=token)
                    assert {each.broadcast_address for each in found} == {"b", "127.0.0.1"}
                    with pytest.raises(LookupFailed, match="INVALID_TOKEN"):
                        await lookup_topic(url, "t", timeout_s=5, tls=tls, token="wrong")
                    with pytest.raises(LookupFailed, match="AUTH_REQUIRED"):
                        await lookup_topic(url, "t", timeout_s=5, tls=tls)


async def test_the_configured_name_counts_for_tcp_and_http(tmp_path: Path) -> None:
    """The service announces an address that its certificate does not have."""
    authority = trustme.CA()
    leaf = authority.issue_cert("localhost")
    cert, key, ca = tmp_path / "c.pem", tmp_path / "c.key", tmp_path / "ca.pem"
    leaf.cert_chain_pems[0].write_to_path(cert)
    leaf.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    tls = ssl.create_default_context(cafile=ca)
    with watched_log() as log:
        async with ours(tls_cert=cert, tls_key=key) as lookupd, producer(lookupd) as other:
            await other.register("REGISTER t c")
            async with registration(lookupd, "u", host="localhost", tls=tls) as lookup:
                await log.until("REGISTER u")
                assert await lookup.channels("t") == ["c"]
            async with registration(lookupd, "v", tls=tls):
                await log.until("its certificate is not valid: IP address mismatch")


@pytest.mark.parametrize(
    ("service", "broker", "reason"),
    [
        ({"auth": True}, {}, "AUTH required before IDENTIFY' (give --lookupd-auth-secret-file)"),
        ({"auth": True}, {"secret": "wrong"}, "AUTH failed: the token is unknown, expired or revoked"),
        ({"auth": True}, {"secret": "reader"}, "IDENTIFY needs the role register"),
        ({"tls_required": True}, {}, "E_INVALID TLS required' (give --lookupd-tls)"),
        (
            {"tls_required": True},
            {"secret": "broker"},
            "PING - 'E_INVALID TLS required' (give --lookupd-tls)",
        ),
        ({"tls_required": True}, {"ca": "other"}, "its certificate is not valid: "),
        ({"tls": False}, {"ca": "its"}, "TLS failed: wrong version number (does it offer TLS?"),
        (
            {"tls_client_auth_policy": "require-verify"},
            {"ca": "its"},
            "TLS failed: tlsv13 alert certificate required",
        ),
    ],
)
async def test_refusals_are_logged_and_tried_again(
    service: dict[str, Any],
    broker: dict[str, Any],
    reason: str,
    auth_file: Path,
    certificates: Certificates,
    tmp_path: Path,
    clock: MockClock,
) -> None:
    settings: dict[str, Any] = dict(service)
    if settings.pop("auth", False):
        settings["auth_file"] = auth_file
    if settings.pop("tls", True):
        settings |= certificates.options
    if "tls_client_auth_policy" in settings:
        settings["tls_root_ca_file"] = certificates.ca_path
    options: dict[str, Any] = {}
    if "secret" in broker:
        options["secret"] = secret_of(broker["secret"])
    if "ca" in broker:
        trusted = certificates if broker["ca"] == "its" else Certificates(tmp_path / "other")
        options["tls"] = trusted.client_context()
    with watched_log() as log:
        async with ours(**settings) as lookupd, registration(lookupd, **options):
            first = await log.until(reason)
            second = await log.until(reason, after=first)
            await log.until("LOOKUP connecting to", after=second)


async def test_a_secret_file_is_read_again(auth_file: Path, tmp_path: Path, clock: MockClock) -> None:
    file = tmp_path / "token"
    file.write_text("wrong\n")
    with watched_log() as log:
        async with ours(auth_file=auth_file) as lookupd, registration(lookupd, secret=Secret(file=file)):
            await log.until("AUTH failed")
            file.unlink()
            await log.until("No such file")
            file.write_bytes(token_of("broker") + b"\n")
            await log.until("DB: client(")


async def test_new_cas_are_used_for_the_next_connection(
    tmp_path: Path, certificates: Certificates, clock: MockClock
) -> None:
    other = Certificates(tmp_path / "other").client_context()
    with watched_log() as log:
        async with ours(**certificates.options) as lookupd, registration(lookupd, tls=other) as lookup:
            await log.until("its certificate is not valid")
            lookup.use_tls(certificates.client_context())
            await log.until("DB: client(")
            assert await lookup.channels("t") == []


async def test_revoked_while_connected(auth_file: Path, tmp_path: Path, clock: MockClock) -> None:
    file = tmp_path / "token"
    file.write_bytes(token_of("broker"))
    with watched_log() as log:
        async with ours(auth_file=auth_file) as lookupd, registration(lookupd, secret=Secret(file=file)):
            seen = await log.until("REGISTER t", after=await log.until("IDENTIFY Address"))
            write_auth_file(auth_file, {"new": grant("register"), "reader": grant("consume")})
            assert lookupd.reload is not None
            await lookupd.reload()
            gone = await log.until("revoked or has expired", after=seen)
            refused = await log.until("AUTH failed", after=gone)
            assert (
                await lookup_topic(lookupd.http_address, "t", timeout_s=5, token=token_of("reader").decode())
                == []
            )
            file.write_bytes(token_of("new"))
            await log.until("DB: client(", after=await log.until("IDENTIFY Address", after=refused))


async def test_drain_mode_is_told_over_tls_with_a_token(auth_file: Path, certificates: Certificates) -> None:
    tls = certificates.client_context()
    async with ours(auth_file=auth_file, tls_required=True, **certificates.options) as lookupd:
        with watched_log() as log:
            async with registration(lookupd, tls=tls, secret=secret_of("broker")) as lookup:
                seen = await log.until("REGISTER t")
                for draining in (True, False):
                    lookup.set_draining(draining)
                    seen = await log.until("REGISTER t", after=await log.until("disconnected, ", after=seen))
                    url, token = f"https://{lookupd.http_address}", token_of("reader").decode()
                    (node,) = await lookup_nodes(url, timeout_s=5, tls=tls, token=token)
                    assert node.draining is draining
        assert not [line for line in log.lines if "error" in line.lower()]


async def test_reconnect_after_a_restart(
    auth_file: Path, certificates: Certificates, clock: MockClock
) -> None:
    options: dict[str, Any] = {"auth_file": auth_file, **certificates.options}
    async with ours(**options) as lookupd:
        with watched_log() as log:
            secure: dict[str, Any] = {"tls": certificates.client_context(), "secret": secret_of("broker")}
            async with registration(lookupd, **secure):
                seen = await log.until("DB: client(")
                lookupd.end()
                await log.until("LOOKUP connecting to", after=seen)
                async with ours(lookupd.tcp_address, lookupd.http_address, **options):
                    await log.until("DB: client(", after=await log.until("TCP: listening on", after=seen))


async def test_a_topic_that_is_not_allowed_leaves_the_others(tmp_path: Path, clock: MockClock) -> None:
    file = write_auth_file(tmp_path / "auth.toml", {"broker": grant("register", topics="clicks")})
    with watched_log() as log:
        async with ours(auth_file=file) as lookupd:
            async with registration(lookupd, "orders", "clicks", secret=secret_of("broker")):
                await log.until(
                    "REGISTER orders - 'E_UNAUTHORIZED REGISTER needs the role register on topic orders'"
                )
                await log.until("REGISTER clicks")
                found = await lookup_topic(
                    lookupd.http_address, "clicks", timeout_s=5, token=token_of("broker").decode()
                )
                assert len(found) == 1


@pytest.mark.interop
async def test_nsqlookupd_has_no_authentication(clock: MockClock) -> None:
    with watched_log() as log:
        async with real() as lookupd, registration(lookupd, secret=secret_of("broker")):
            await log.until("it has no authentication: remove --lookupd-auth-secret-file")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lookupd_auth_secret_file": Path("missing")}, "--lookupd-auth-secret-file: missing: No such file"),
        (
            {"lookupd_tls": True, "tls_root_ca_file": Path("missing")},
            "--tls-root-ca-file: missing: No such file",
        ),
    ],
)
async def test_files_that_cannot_be_used(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    assert reason in await refusal(tmp_path / "d", **options)


async def test_a_broker_reads_its_cas_again(
    tmp_path: Path, certificates: Certificates, clock: MockClock
) -> None:
    ca_file = tmp_path / "ca.pem"
    ca_file.write_bytes(Certificates(tmp_path / "other").ca_path.read_bytes())
    reload, reloads = trio.open_memory_channel[None](0)
    with watched_log() as log:
        async with ours(**certificates.options) as lookupd, trio.open_nursery() as nursery:
            options = BrokerOptions(
                tmp_path / "d",
                tcp_address="127.0.0.1:0",
                http_address="127.0.0.1:0",
                nsqlookupd_tcp_addresses=(lookupd.tcp_address,),
                lookupd_tls=True,
                tls_root_ca_file=ca_file,
            )
            await nursery.start(partial(serve, options, reloads=reloads))
            await log.until("its certificate is not valid")
            ca_file.write_text("no certificate")
            await reload.send(None)
            await log.until("the previous files stay in use")
            ca_file.write_bytes(certificates.ca_path.read_bytes())
            await reload.send(None)
            await log.until(
                "CLIENT(127.0.0.1:", after=await log.until("CAs and the certificate for discovery")
            )
            nursery.cancel_scope.cancel()


async def test_a_token_expires_while_its_broker_is_connected(tmp_path: Path) -> None:
    """By the real clock: expiry is a time of day."""
    soon = datetime.now(UTC) + timedelta(seconds=1)
    lines = f"expires = {soon.isoformat()}\n{grant('register')}"
    file = write_auth_file(tmp_path / "auth.toml", {"broker": lines, "reader": grant("consume")})
    with watched_log() as log:
        async with ours(auth_file=file) as lookupd, registration(lookupd, secret=secret_of("broker")):
            expired = await log.until("revoked or has expired", after=await log.until("DB: client("))
            await log.until("AUTH failed", after=expired)
            token = token_of("reader").decode()
            assert await lookup_topic(lookupd.http_address, "t", timeout_s=5, token=token) == []
