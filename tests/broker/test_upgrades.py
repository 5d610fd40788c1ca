"""Tests for TLS, snappy and deflate, negotiated by IDENTIFY."""

import json
import socket
import ssl
import zlib
from collections.abc import Callable
from pathlib import Path
from struct import pack
from typing import Any

import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from OpenSSL import SSL
from snappy import StreamCompressor

from broker.certificates import Certificates
from broker.support import PATIENCE_S, connected, identify, mpub, pub, running_broker, settle
from broker.upgrading import compress, negotiate, start_tls, start_tls_and_read, upgrade
from trio_nsq.broker.errors import StartupError
from trio_nsq.broker.session.session import Session
from trio_nsq.protocol.frames import OK_FRAME

COMPRESSIONS = [None, "snappy", "deflate"]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.mark.parametrize("kind", COMPRESSIONS)
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_conversation_over_an_upgraded_connection(
    tmp_path: Path, certificates: Certificates, tls: bool, kind: str | None
) -> None:
    context = certificates.client_context() if tls else None
    big = bytes(range(256)) * 3000
    async with running_broker(tmp_path / "d", **certificates.options) as bound:
        async with connected(bound.tcp_address) as client:
            await upgrade(client, context, kind)
            await client.subscribe("t", "c", ready_count=2500)
            await client.send(mpub("t", *[b"%d" % n for n in range(1000)]) + pub("t", big))
            await client.ok()
            await client.ok()
            messages = [await client.message() for _ in range(1001)]
            assert [m.body for m in messages] == [b"%d" % n for n in range(1000)] + [big]
            await client.send(b"".join(b"FIN %b\n" % m.id for m in messages) + b"FIN 0123456789abcdef\n")
            assert await client.error() == "E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight"
            await client.send(b"NOPE\n")
            assert await client.error() == "E_INVALID invalid command NOPE"
            assert await client.frame() is None


@pytest.mark.parametrize("kind", ["snappy", "deflate"])
async def test_heartbeats_are_compressed_too(tmp_path: Path, kind: str, autojump_clock: object) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await negotiate(client, heartbeat_interval=1000, **{kind: True})
        compress(client, kind)
        await client.ok()
        assert await client.frame() == (0, b"_heartbeat_")


async def test_commands_sent_too_early_are_decoded_as_upgraded_data(tmp_path: Path) -> None:
    """Bytes after IDENTIFY in the same packet count as compressed."""
    packer = StreamCompressor()
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        early = packer.add_chunk(pub("t", b"early"))
        await client.send(identify(feature_negotiation=True, snappy=True) + early)
        assert (await client.frame() or (1,))[0] == 0
        compress(client, "snappy")
        await client.ok()
        await client.ok()


async def test_upgrades_without_negotiation_are_ignored(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.send(identify(tls_v1=True, snappy=True))  # no feature_negotiation
        await client.ok()
        await client.publish("t", b"x")


async def test_connection_is_upgraded_once(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await upgrade(client, None, "snappy")
        assert (await negotiate(client, deflate=True))["deflate"] is False
        await client.publish("t", b"x")


async def test_upgraded_connection_may_repeat_identify(tmp_path: Path, certificates: Certificates) -> None:
    """Commands in separate records, which arrive together, do not cause deep recursion."""
    async with running_broker(tmp_path / "d", **certificates.options) as bound:
        async with connected(bound.tcp_address) as client:
            plain = client.stream
            await upgrade(client, certificates.client_context(), None)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
            for _ in range(1000):
                await client.send(identify())
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
            for _ in range(1000):
                await client.ok()


async def test_invalid_compressed_data_ends_the_connection_silently(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await upgrade(client, None, "snappy")
        await client.stream.stream.send_all(b"PUB t\n\0\0\0\1x")  # type: ignore[attr-defined]
        assert await client.frame() is None


async def test_end_of_the_deflate_stream_ends_the_connection(tmp_path: Path) -> None:
    packer = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await upgrade(client, None, "deflate")
        await client.stream.stream.send_all(packer.compress(pub("t", b"x")) + packer.flush())  # type: ignore[attr-defined]
        await client.ok()
        assert await client.frame() is None


async def test_missing_bytes_of_a_body_do_not_limit_compressed_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would be read byte by byte."""
    reads = 0
    receive = Session.receive_now

    def counted(session: Session) -> bytes:
        nonlocal reads
        reads += 1
        return receive(session)

    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
    command = pub("t", b"x" * 200_000)
    nothing = b"\0\0\0\xff\xff" * 20_000  # empty blocks
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await upgrade(client, None, "deflate")
        monkeypatch.setattr(Session, "receive_now", counted)
        wire = packer.compress(command[:-1]) + packer.flush(zlib.Z_SYNC_FLUSH) + nothing
        wire += packer.compress(command[-1:]) + packer.flush(zlib.Z_SYNC_FLUSH)
        await client.stream.stream.send_all(wire)  # type: ignore[attr-defined]
        await client.ok()
    assert reads < 1000


@pytest.mark.parametrize("early", [False, True], ids=["upgraded", "early"])
async def test_commands_that_expand_greatly_are_executed_in_steps(tmp_path: Path, early: bool) -> None:
    """Answers are sent continuously, and other clients are served."""
    count = 200_000
    packer = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    commands = b"SUB t c\n" + b"FIN 0123456789abcdef\n" * count + pub("last", b"x")
    wire = packer.compress(commands) + packer.flush(zlib.Z_SYNC_FLUSH)
    assert len(wire) < 20_000
    last = tmp_path / "d" / "topics" / "last.topic"
    async with running_broker(tmp_path / "d", sync="interval") as bound:
        async with connected(bound.tcp_address) as client, connected(bound.tcp_address) as other:
            await other.publish("t", b"makes the segment")
            if early:
                await client.send(identify(feature_negotiation=True, deflate=True) + wire)
                await client.frame()
                compress(client, "deflate")
                await client.ok()
            else:
                await upgrade(client, None, "deflate")
                await client.stream.stream.send_all(wire)  # type: ignore[attr-defined]
            await client.ok()
            assert (await client.error()).startswith("E_FIN_FAILED")
            for _ in range(3):
                await other.publish("t", b"x")
            assert not last.exists()
            text = b"E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight"
            expected = (pack(">ii", 4 + len(text), 1) + text) * (count - 1) + OK_FRAME
            received = bytearray(client.take_received())
            with trio.fail_after(PATIENCE_S):
                while len(received) < len(expected):
                    received += await client.stream.receive_some(65536)
            assert received == expected


# ---------------------------------------------------------------------- TLS


async def test_no_data_around_a_handshake_is_lost(tmp_path: Path, certificates: Certificates) -> None:
    """It begins in one packet with IDENTIFY, and ends in one with a command and the session's end."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = certificates.client_context().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with pytest.raises(ssl.SSLWantReadError):
        session.do_handshake()
    async with running_broker(tmp_path / "d", **certificates.options) as bound:
        async with connected(bound.tcp_address) as client:
            await client.send(identify(feature_negotiation=True, tls_v1=True) + outgoing.read())
            await client.frame()
            incoming.write(client.take_received())
            with trio.fail_after(PATIENCE_S):
                done = False
                while not done:
                    try:
                        session.do_handshake()
                        done = True
                    except ssl.SSLWantReadError:
                        incoming.write(await client.stream.receive_some(65536))
                session.write(pub("t", b"early"))
                with pytest.raises(ssl.SSLWantReadError):
                    session.unwrap()
                await client.send(outgoing.read())
                async for part in client.stream:
                    incoming.write(part)
            assert session.read() == OK_FRAME + OK_FRAME


def said(session: SSL.Connection) -> bytes:
    """Return the data that a client's session has to send."""
    try:
        return session.bio_read(65536)
    except SSL.WantReadError:
        return b""


async def test_renegotiation_is_refused_at_once(tmp_path: Path, certificates: Certificates) -> None:
    """Refusals do not accumulate."""
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.set_max_proto_version(SSL.TLS1_2_VERSION)
    session = SSL.Connection(context, None)
    session.set_connect_state()

    async def obtain(operation: Callable[[], Any]) -> Any:
        """Run an operation of a TLS session until it returns or raises, with any number of packets."""
        while True:
            try:
                return operation()
            except SSL.WantReadError:
                await client.send(said(session))
                data = bytes(await client.stream.receive_some(65536))
                assert data, "the broker hung up"
                session.bio_write(data)

    async with running_broker(tmp_path / "d", **certificates.options) as bound:
        async with connected(bound.tcp_address) as client:
            await negotiate(client, tls_v1=True)
            with trio.fail_after(PATIENCE_S):
                await obtain(session.do_handshake)
                assert await obtain(lambda: session.recv(100)) == OK_FRAME
                session.renegotiate()
                with pytest.raises(SSL.Error, match="no renegotiation"):
                    await obtain(session.do_handshake)


async def test_stats_show_the_session(tmp_path: Path, certificates: Certificates) -> None:
    context = certificates.client_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256")
    async with running_broker(tmp_path / "d", **certificates.options) as bound:
        async with connected(bound.tcp_address) as client:
            await upgrade(client, context, None)
            await client.publish("t", b"x")
            assert bound.http_address is not None
            host, _, port = bound.http_address.rpartition(":")
            async with await trio.open_tcp_stream(host, int(port)) as http:
                await http.send_all(b"GET /stats?format=json HTTP/1.0\r\n\r\n")
                answer = b"".join([bytes(part) async for part in http])
            producer = json.loads(answer.partition(b"\r\n\r\n")[2])["producers"][0]
            assert producer["tls"] is True
            assert producer["tls_version"] == "TLS1.2"
            assert producer["tls_cipher_suite"].startswith("TLS_ECDHE_")
            assert producer["tls_cipher_suite"].endswith("_WITH_AES_128_GCM_SHA256")


async def test_client_closes_the_session_cleanly(tmp_path: Path, certificates: Certificates) -> None:
    async with running_broker(tmp_path / "d", **certificates.options) as bound:
        async with connected(bound.tcp_address) as client:
            await upgrade(client, certificates.client_context(), None)
            with trio.fail_after(PATIENCE_S):
                await client.stream.aclose()  # sends close_notify, and waits for the broker's


async def test_broker_closes_the_session_cleanly(tmp_path: Path, certificates: Certificates) -> None:
    async with running_broker(tmp_path / "d", **certificates.options) as bound:
        async with connected(bound.tcp_address) as client:
            await upgrade(client, certificates.client_context(), None)
            await client.send(b"NOPE\n")
            assert await client.error() == "E_INVALID invalid command NOPE"
            assert await client.frame() is None  # an end without close_notify would be an error here


@pytest.mark.parametrize(
    ("sent", "reason"), [(b"GET / HTTP/1.0\r\n\r\n", "http request"), (b"\x16\x03\x01" + bytes(20), "")]
)
async def test_failed_handshake_is_answered_in_plain_text(
    tmp_path: Path, certificates: Certificates, sent: bytes, reason: str
) -> None:
    async with running_broker(tmp_path / "d", **certificates.options) as bound:
        async with connected(bound.tcp_address) as client:
            await negotiate(client, tls_v1=True)
            await client.send(sent)
            data = b""
            with trio.fail_after(PATIENCE_S):
                async for part in client.stream:
                    data += part
            assert b"\x00\x00\x00\x01E_IDENTIFY_FAILED IDENTIFY failed " + reason.encode() in data


async def test_missing_handshake_times_out_after_five_seconds(
    tmp_path: Path, certificates: Certificates, autojump_clock: trio.testing.MockClock
) -> None:
    async with running_broker(tmp_path / "d", **certificates.options) as bound:
        async with connected(bound.tcp_address) as client:
            await negotiate(client, tls_v1=True, heartbeat_interval=1000)
            started = trio.current_time()
            assert await client.error() == "E_IDENTIFY_FAILED IDENTIFY failed no TLS handshake within 5 s"
            assert trio.current_time() - started == pytest.approx(5, abs=0.1)


async def test_tls_needs_a_certificate(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        assert (await negotiate(client, tls_v1=True))["tls_v1"] is False
        await client.publish("t", b"x")


@pytest.mark.parametrize("required", ["true", "tcp-https"])
@pytest.mark.parametrize("command", [b"PUB t\n", b"NOP\n", b"NOPE\n", b"\n", b"SUB t c\n"])
async def test_only_identify_is_allowed_before_required_tls(
    tmp_path: Path, certificates: Certificates, required: str, command: bytes
) -> None:
    verb = command.split()[0].decode() if command.strip() else ""
    async with running_broker(tmp_path / "d", tls_required=required, **certificates.options) as bound:
        async with connected(bound.tcp_address) as client:
            await negotiate(client)
            await client.send(command)
            assert await client.error() == f"E_INVALID cannot {verb} in current state (TLS required)"
        async with connected(bound.tcp_address) as client:
            await upgrade(client, certificates.client_context(), None)
            await client.publish("t", b"x")


CLIENTS = [
    # policy, certificate (None: none), known to the CA, accepted
    ("require", None, True, False),
    ("require", "alice", False, True),
    ("require-verify", None, True, False),
    ("require-verify", "alice", False, False),
    ("require-verify", "alice", True, True),
]


@pytest.mark.parametrize(("policy", "name", "known", "let_in"), CLIENTS)
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
async def test_client_certificates(
    tmp_path: Path,
    certificates: Certificates,
    version: ssl.TLSVersion,
    policy: str,
    name: str | None,
    known: bool,
    let_in: bool,
) -> None:
    context = certificates.client_context(name, known=known)
    context.maximum_version = version
    options: dict[str, Any] = {"tls_client_auth_policy": policy, "tls_root_ca_file": certificates.ca_path}
    async with running_broker(tmp_path / "d", **certificates.options, **options) as bound:
        async with connected(bound.tcp_address) as client:
            await negotiate(client, tls_v1=True)
            if let_in:
                await start_tls(client, context)
                await client.ok()
                await client.publish("t", b"x")
            else:
                with pytest.raises(trio.BrokenResourceError):
                    await start_tls_and_read(client, context)
        async with connected(bound.tcp_address) as client:
            await client.send(pub("t", b"x"))  # the policy implies that TLS is required
            assert await client.error() == "E_INVALID cannot PUB in current state (TLS required)"


@pytest.mark.parametrize(
    ("oldest", "newest", "good"),
    [
        ("tls1.2", ssl.TLSVersion.TLSv1_2, True),
        ("tls1.3", ssl.TLSVersion.TLSv1_2, False),
        ("tls1.3", ssl.TLSVersion.TLSv1_3, True),
    ],
)
async def test_minimum_version(
    tmp_path: Path, certificates: Certificates, oldest: str, newest: ssl.TLSVersion, good: bool
) -> None:
    context = certificates.client_context()
    context.maximum_version = newest
    async with running_broker(tmp_path / "d", tls_min_version=oldest, **certificates.options) as bound:
        async with connected(bound.tcp_address) as client:
            await negotiate(client, tls_v1=True)
            if good:
                await start_tls(client, context)
                await client.ok()
            else:
                with pytest.raises(trio.BrokenResourceError):
                    await start_tls(client, context)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_old_version_can_be_enabled(tmp_path: Path, certificates: Certificates) -> None:
    context = certificates.client_context()
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    async with running_broker(tmp_path / "d", tls_min_version="tls1.0", **certificates.options) as bound:
        async with connected(bound.tcp_address) as client:
            await upgrade(client, context, None)
            await client.publish("t", b"x")


async def test_stop_does_not_wait_for_a_handshake(
    tmp_path: Path, certificates: Certificates, mock_clock: trio.testing.MockClock
) -> None:
    async with running_broker(tmp_path / "d", **certificates.options) as bound:
        async with connected(bound.tcp_address) as client:
            await negotiate(client, tls_v1=True)
            await settle()
            started = trio.current_time()
    assert trio.current_time() == started


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tls_required": "true"}, "no certificate is configured"),
        ({"tls_client_auth_policy": "require"}, "no certificate is configured"),
        ({"tls_cert": Path("/nowhere")}, "go together"),
        ({"tls_cert": Path("/nowhere"), "tls_key": Path("/nowhere")}, "cannot read /nowhere"),
        ({"tls_cert": "key", "tls_key": "key"}, "is not a PEM certificate"),
        ({"tls_cert": "cert", "tls_key": "cert"}, "is not a PEM private key for TLS"),
        ({"tls_cert": "cert", "tls_key": "other key"}, "is not the key of"),
        ({"tls_cert": "cert", "tls_key": "new encrypted"}, "is encrypted"),
        ({"tls_cert": "cert", "tls_key": "old encrypted"}, "is encrypted"),
        (
            {
                "tls_cert": "cert",
                "tls_key": "key",
                "tls_client_auth_policy": "require",
                "tls_root_ca_file": "key",
            },
            "has no PEM certificate",
        ),
    ],
)
async def test_invalid_settings_are_refused_at_the_start(
    tmp_path: Path, certificates: Certificates, options: dict[str, Any], text: str
) -> None:
    key = certificates.options["tls_key"]
    _, other_key = certificates.client_files("somebody")
    files = {"cert": certificates.options["tls_cert"], "key": key, "other key": other_key}
    private = load_pem_private_key(key.read_bytes(), password=None)
    for name, form in (("new", PrivateFormat.PKCS8), ("old", PrivateFormat.TraditionalOpenSSL)):
        files[f"{name} encrypted"] = tmp_path / name
        pem = private.private_bytes(Encoding.PEM, form, BestAvailableEncryption(b"x"))
        files[f"{name} encrypted"].write_bytes(pem)
    options = {name: files.get(value, value) for name, value in options.items()}
    with pytest.raises(BaseExceptionGroup) as caught:
        async with running_broker(tmp_path / "d", **options):
            raise AssertionError("it started")
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, StartupError)
    assert text in str(error)
