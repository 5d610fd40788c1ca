"""Tests for TLS, compression and AUTH between client and `qcli serve`; tests/interop tests them with nsqd."""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from broker.auth_server import running_auth_server
from broker.certificates import Certificates
from broker.support import running_broker
from client.support.fake_broker import FakeBroker
from trio_nsq.client import ConnectionFailed, ConnectionSettings, Consumer, Producer
from trio_nsq.client.connection.connection import Connection, connect
from trio_nsq.integrations.kombu.broker_socket import BrokerSocket
from trio_nsq.protocol.address import parse_address
from trio_nsq.protocol.compression import Snappy
from trio_nsq.protocol.frames import OK_FRAME, encode_error, encode_response

COMPRESSIONS: list[dict[str, Any]] = [{}, {"snappy": True}, {"deflate": True, "deflate_level": 1}]
PATIENCE_S = 60


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@asynccontextmanager
async def broker_and_tls(
    folder: Path, certificates: Certificates, **options: Any
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """The address of a broker with TLS, and the client's options for it."""
    with trio.fail_after(PATIENCE_S):
        async with running_broker(folder, **certificates.options, **options) as bound:
            yield bound.tcp_address, {"tls_v1": True, "tls_root_ca_file": certificates.ca_path}


async def round_trip(address: str, count: int = 2000, **options: Any) -> None:
    """Publish and consume whole batches and single messages, some of them large."""
    bodies = [b"%d" % n for n in range(count)] + [bytes(range(256)) * 2000]
    async with Producer(address, **options) as producer:
        await producer.publish_many("t", bodies)
    async with Consumer("t", "c", max_in_flight=500, nsqd_tcp_addresses=[address], **options) as consumer:
        got: list[bytes] = []
        async for batch in consumer.batches():
            got += batch.bodies
            batch.finish()
            if len(got) == len(bodies):
                break
    assert got == bodies


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=["uncompressed", "snappy", "deflate"])
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
async def test_round_trip_with_upgrades(
    tmp_path: Path, certificates: Certificates, encrypted: bool, compression: dict[str, Any]
) -> None:
    async with broker_and_tls(tmp_path / "d", certificates) as (address, tls):
        await round_trip(address, **(tls if encrypted else {}), **compression)


async def test_finished_messages_are_finished_when_the_consumer_is_closed(
    tmp_path: Path, certificates: Certificates
) -> None:
    """The last commands arrive before the end of the session."""
    async with broker_and_tls(tmp_path / "d", certificates) as (address, tls):
        options = {**tls, "snappy": True}
        await round_trip(address, **options)
        async with Producer(address, **options) as producer:
            await producer.publish("t", b"last")
        async with Consumer("t", "c", nsqd_tcp_addresses=[address], **options) as consumer:
            async for message in consumer:
                assert (message.body, message.attempts) == (b"last", 1)
                message.finish()
                break


async def test_untrusted_certificate_is_refused(tmp_path: Path, certificates: Certificates) -> None:
    async with broker_and_tls(tmp_path / "d", certificates) as (address, _):
        with pytest.raises(ConnectionFailed, match="its certificate is not trusted: "):
            async with Producer(address, tls_v1=True):
                pass
        await round_trip(address, 3, tls_v1=True, tls_insecure_skip_verify=True)


async def test_own_tls_context(tmp_path: Path, certificates: Certificates) -> None:
    async with broker_and_tls(tmp_path / "d", certificates) as (address, _):
        await round_trip(address, 3, tls_v1=True, tls_context=certificates.client_context())


async def test_client_certificate(tmp_path: Path, certificates: Certificates) -> None:
    cert, key = certificates.client_files("alice")
    policy = {"tls_client_auth_policy": "require-verify", "tls_root_ca_file": certificates.ca_path}
    async with broker_and_tls(tmp_path / "d", certificates, **policy) as (address, tls):
        await round_trip(address, 3, **tls, tls_cert=cert, tls_key=key)
        with pytest.raises(ConnectionFailed, match=r"IDENTIFY failed|certificate required|handshake"):
            async with Producer(address, **tls):
                pass
        with pytest.raises(ConnectionFailed, match=r"TLS required.*set tls_v1=True"):
            async with Consumer("t", "c", nsqd_tcp_addresses=[address]):
                pass


async def test_nothing_is_sent_in_plain_text_if_tls_is_required(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound:
        with pytest.raises(ConnectionFailed, match="does not offer TLS"):
            async with Producer(bound.tcp_address, tls_v1=True):
                pass


async def test_file_missing_at_a_reconnection(tmp_path: Path, certificates: Certificates) -> None:
    """The consumer retries later, and does not end."""
    ca_path = tmp_path / "ca.pem"
    ca_path.write_bytes(certificates.ca_path.read_bytes())
    async with broker_and_tls(tmp_path / "d", certificates) as (address, _):
        settings = ConnectionSettings(tls_v1=True, tls_root_ca_file=ca_path)
        ca_path.unlink()
        with pytest.raises(ConnectionFailed, match=r"ca\.pem: No such file"):
            await connect(address, settings)
        ca_path.write_bytes(certificates.ca_path.read_bytes())
        await (await connect(address, settings)).close_now()


SNAPPY_REPLY = encode_response(b'{"snappy":true}')
MISBEHAVIOUR = [
    *(
        (encode_response(b'{"%s":%s}' % (name, value)), "is this an NSQ broker")
        for name in (b"max_rdy_count", b"msg_timeout", b"max_msg_timeout")
        for value in (b"1e999", b"null", b"true", b'"7"', b"-1", b"9223372036854775808", b"1" + b"0" * 400)
    ),
    (encode_response(b'{"max_rdy_count":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "is this an NSQ broker"),
    (encode_response(b'{"tls_v1":true}') + OK_FRAME, "TLS"),
    (SNAPPY_REPLY + OK_FRAME, "snappy"),
    (SNAPPY_REPLY + Snappy().encode(encode_response(b"WELL")), "answered an upgrade with b'WELL'"),
    (SNAPPY_REPLY + Snappy().encode(encode_error(b"E_NO sorry")), "it answered E_NO sorry"),
    (SNAPPY_REPLY, "the broker closed the connection"),
    (encode_response(b'{"deflate":true}') + b"\xff\xff\xff\xff", "deflate"),
]


async def introduce(address: str, settings: ConnectionSettings) -> None:
    connection = Connection(await trio.open_tcp_stream(*parse_address(address)), address, settings)
    try:
        await connection.introduce()
    finally:
        assert connection.ended.is_set()


async def introduce_without_event_loop(address: str, settings: ConnectionSettings) -> None:
    await trio.to_thread.run_sync(BrokerSocket, address, settings)


@pytest.mark.parametrize("introduce", [introduce, introduce_without_event_loop])
@pytest.mark.parametrize(("said", "reason"), MISBEHAVIOUR)
async def test_broker_that_violates_the_protocol(
    broker: FakeBroker,
    said: bytes,
    reason: str,
    introduce: Callable[[str, ConnectionSettings], Awaitable[None]],
) -> None:
    """The connection is closed, and the error names the violation."""
    settings = ConnectionSettings(tls_v1=b"tls_v1" in said, tls_insecure_skip_verify=True)

    async def misbehave() -> None:
        peer = await broker.accept()
        await peer.expect_identify()
        await peer.send(said)
        if said == SNAPPY_REPLY:
            peer.hang_up()

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(misbehave)
            with pytest.raises(ConnectionFailed, match=reason):
                await introduce(broker.address, settings)


async def test_tls_sessions_start_and_end_cleanly(certificates: Certificates, broker: FakeBroker) -> None:
    """The first OK arrives together with the end of the handshake. Either side may end the session first."""
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Here the server sends the last message of the handshake.
    server_context.maximum_version = ssl.TLSVersion.TLSv1_2
    server_context.load_cert_chain(certificates.options["tls_cert"], certificates.options["tls_key"])
    settings = ConnectionSettings(tls_v1=True, tls_context=certificates.client_context())

    async def connect_to(client_ends_first: bool) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        session = server_context.wrap_bio(incoming, outgoing, server_side=True)
        connection = Connection(
            await trio.open_tcp_stream("127.0.0.1", broker.port), broker.address, settings
        )
        peer = await broker.accept()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.introduce)
            await peer.expect_identify()
            await peer.send(encode_response(b'{"tls_v1":true}'))
            done = False
            while not done:
                incoming.write(await peer.receive())
                try:
                    session.do_handshake()
                    done = True
                    session.write(OK_FRAME)
                except ssl.SSLWantReadError:
                    pass
                await peer.send(outgoing.read())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.run, lambda _event: None)
            if client_ends_first:
                connection.write(b"NOP\n")
                connection.write_eof()
                incoming.write(await peer.receive())
                assert session.read() == b"NOP\n"
                while not session_ended(session):
                    incoming.write(await peer.receive())
                peer.hang_up()
            else:
                with pytest.raises(ssl.SSLWantReadError):
                    session.unwrap()
                await peer.send(outgoing.read())
        assert connection.ended.is_set()

    with trio.fail_after(PATIENCE_S):
        await connect_to(client_ends_first=True)
        await connect_to(client_ends_first=False)


def session_ended(session: ssl.SSLObject) -> bool:
    """Whether the peer has ended the session."""
    try:
        return session.read() == b""
    except ssl.SSLZeroReturnError:
        return True
    except ssl.SSLWantReadError:
        return False


async def test_broker_without_compression(tmp_path: Path) -> None:
    from trio_nsq.protocol import Limits

    async with running_broker(tmp_path / "d", limits=Limits(snappy=False)) as bound:
        await round_trip(bound.tcp_address, 3, snappy=True)


async def test_auth_secret(tmp_path: Path) -> None:
    async with running_auth_server() as server:
        async with running_broker(tmp_path / "d", auth_http_addresses=(server.address,)) as bound:
            await round_trip(bound.tcp_address, 3, auth_secret="hush", deflate=True)
            assert "secret=hush" in server.queries[0]
            # As the command line passes bytes that are not UTF-8.
            await round_trip(bound.tcp_address, 3, auth_secret="h\udcffsh")
            assert "secret=h%FFsh" in server.queries[-1]
            with pytest.raises(ConnectionFailed, match="set auth_secret"):
                async with Producer(bound.tcp_address):
                    pass


async def test_max_in_flight_can_change_while_it_runs(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound:
        address = bound.tcp_address
        async with (
            Producer(address) as producer,
            Consumer("t", "c", max_in_flight=2, nsqd_tcp_addresses=[address]) as consumer,
        ):
            await producer.publish_many("t", [b"%d" % n for n in range(10)])
            messages = [await anext(aiter(consumer)) for _ in range(2)]
            consumer.max_in_flight = 0
            for message in messages:
                message.finish()
            with trio.move_on_after(0.2) as nothing:
                await anext(aiter(consumer))
            assert nothing.cancelled_caught
            consumer.max_in_flight = 5
            assert [(await anext(aiter(consumer))).body for _ in range(5)] == [b"2", b"3", b"4", b"5", b"6"]
            with pytest.raises(ValueError, match="at least 0"):
                consumer.max_in_flight = -1
