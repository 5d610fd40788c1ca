"""Tests of the library against brokers with an auth file: secrets that are accepted, refused and revoked."""

import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio
from cryptography import x509

import trio_nsq.sync
from broker.certificates import Certificates
from broker.support import running_broker
from client.support.fake_broker import bounded, error, fake_broker, sized
from client.support.lookupds import fake_lookupd
from client.support.tokens import SECRETS, UNKNOWN, AuthFile
from trio_nsq.access.secret import Secret
from trio_nsq.client import (
    AuthRefused,
    BrokerError,
    ConnectionFailed,
    Consumer,
    IdempotentProducer,
    Producer,
    PublishFailed,
    RequestRefused,
    TopicReader,
)
from trio_nsq.client.http.broker_http import BrokerHTTP
from trio_nsq.http.messages import HTTPError, Request, Response
from trio_nsq.http.routing import Route, Router
from trio_nsq.http.serving import serve_connection
from trio_nsq.protocol.frames import OK_FRAME, encode_response


@pytest.fixture
def auth_file(tmp_path: Path) -> AuthFile:
    return AuthFile(tmp_path)


class Addresses(NamedTuple):
    """The addresses of a broker; `https_address` is empty without TLS."""

    tcp_address: str
    http_address: str
    https_address: str


@asynccontextmanager
async def guarded(auth_file: AuthFile, **options: Any) -> AsyncIterator[Addresses]:
    """Run a broker with this auth file."""
    async with running_broker(auth_file.path.parent / "data", auth_file=auth_file.path, **options) as bound:
        yield Addresses(bound.tcp_address, bound.http_address or "", bound.https_address or "")


def secret(role: str) -> dict[str, Any]:
    return {"auth_secret": SECRETS[role]}


@bounded
async def test_all_clients_authenticate(auth_file: AuthFile, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{SECRETS['publish']}\n")
    async with guarded(auth_file) as bound:
        async with Producer(bound.tcp_address, auth_secret_file=path) as producer:
            await producer.publish("clicks", b"one")
        with IdempotentProducer(bound.http_address, "clicks", "p", auth_secret_file=path) as numbered:
            await trio.to_thread.run_sync(numbered.publish, [b"two"], 0)
            await trio.to_thread.run_sync(numbered.forget)  # a producer may end what it has begun
            assert await trio.to_thread.run_sync(numbered.last_number) is None
        reader = TopicReader(bound.http_address, "clicks", **secret("read"))
        async with reader:
            assert reader.end_sequence == 2
            assert await reader.receive()
        async with Consumer(
            "clicks", "c", nsqd_tcp_addresses=[bound.tcp_address], **secret("consume")
        ) as consumer:
            async for message in consumer:
                message.finish()
                if message.body == b"two":
                    break


@bounded
async def test_refused_secrets(auth_file: AuthFile) -> None:
    async with guarded(auth_file) as bound:
        cases: list[tuple[dict[str, Any], str]] = [
            ({}, "set auth_secret"),
            ({"auth_secret": UNKNOWN}, "E_AUTH_FAILED AUTH failed: the token is unknown, expired or revoked"),
        ]
        for options, text in cases:
            with pytest.raises(AuthRefused, match=text) as caught:
                async with Producer(bound.tcp_address, **options):
                    pass
            assert UNKNOWN not in str(caught.value)
            with pytest.raises(AuthRefused, match=text):
                async with Consumer("clicks", "c", nsqd_tcp_addresses=[bound.tcp_address], **options):
                    pass
            with pytest.raises(RequestRefused) as refused:
                async with TopicReader(bound.http_address, "clicks", **options):
                    pass
            assert refused.value.status == 401
        with pytest.raises(AuthRefused, match='E_UNAUTHORIZED AUTH failed for SUB on "clicks" "c"'):
            async with Consumer("clicks", "c", nsqd_tcp_addresses=[bound.tcp_address], **secret("read")):
                pass
        async with Producer(bound.tcp_address, **secret("read")) as producer:
            with pytest.raises(PublishFailed) as failed:
                await producer.publish("clicks", b"one")
        assert isinstance(failed.value.__cause__, BrokerError)
        assert failed.value.__cause__.code == "E_UNAUTHORIZED"
        with pytest.raises(RequestRefused, match="FORBIDDEN: this needs the role read on topic clicks"):
            async with TopicReader(bound.http_address, "clicks", **secret("publish")):
                pass
        with IdempotentProducer(bound.http_address, "clicks", "p", **secret("read")) as numbered:
            with pytest.raises(RequestRefused, match="the role publish on topic clicks"):
                await trio.to_thread.run_sync(numbered.publish, [b"two"], 0)


async def _revoke(auth_file: AuthFile, bound: Addresses, *left: str) -> None:
    """Leave only these tokens in the auth file, and have the broker read it."""
    auth_file.write(left)
    http = BrokerHTTP(bound.http_address, None, Secret(SECRETS["all"]))
    path = str(auth_file.path).encode()
    await trio.to_thread.run_sync(lambda: http.request("PUT", "/config/auth_file", body=path))


@bounded
async def test_consumer_of_a_revoked_token_ends_with_an_error(
    auth_file: AuthFile, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded(auth_file) as bound:
        consumer = Consumer("clicks", "c", nsqd_tcp_addresses=[bound.tcp_address], **secret("consume"))
        async with consumer:
            async with Producer(bound.tcp_address, **secret("publish")) as producer:
                await producer.publish("clicks", b"one")
                message = await anext(consumer)
                message.finish()
            await _revoke(auth_file, bound, "all")
            with pytest.raises(AuthRefused, match="unknown, expired or revoked"):
                await anext(consumer)
            with pytest.raises(AuthRefused):
                await anext(consumer.batches())
            with pytest.raises(AuthRefused):
                await consumer.run(lambda message: trio.lowlevel.checkpoint(), concurrency=1)
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in errors if record.name == "trio_nsq.client"] == [
        f"could not connect to {bound.tcp_address}: it answered E_AUTH_FAILED AUTH failed: the token is unknown, "
        "expired or revoked; the consumer stops"
    ]
    assert SECRETS["consume"] not in caplog.text


@bounded
async def test_one_broker_that_refuses_ends_the_consumer(auth_file: AuthFile, tmp_path: Path) -> None:
    other = AuthFile(tmp_path)
    other.path = tmp_path / "other.toml"
    other.write(["all"])
    async with guarded(auth_file) as one, running_broker(tmp_path / "b", auth_file=other.path) as two:
        addresses = [one.tcp_address, two.tcp_address]
        async with Consumer("t", "c", nsqd_tcp_addresses=addresses, **secret("consume")) as consumer:
            with pytest.raises(AuthRefused, match=two.tcp_address):
                await anext(consumer)


@bounded
async def test_synchronous_consumer_of_a_revoked_token(auth_file: AuthFile) -> None:
    async with guarded(auth_file) as bound:

        def consume() -> None:
            with trio_nsq.sync.Consumer(
                "clicks", "c", nsqd_tcp_addresses=[bound.tcp_address], **secret("consume")
            ) as consumer:
                trio.from_thread.run(_revoke, auth_file, bound, "all")
                next(iter(consumer))

        with pytest.raises(AuthRefused):
            await trio.to_thread.run_sync(consume)


@bounded
async def test_consumer_retries_while_an_auth_server_does_not_answer() -> None:
    async with fake_broker() as broker, trio.open_nursery() as nursery:
        consumer = Consumer(
            "topic",
            "channel",
            nsqd_tcp_addresses=[broker.address],
            auth_secret="hush",
            reconnect_min_s=0.001,
            reconnect_max_s=0.001,
            close_timeout_s=0,
        )

        async def serve() -> None:
            for answer in (encode_response(b"{}"), *3 * [error("E_AUTH_FAILED AUTH failed")]):
                peer = await broker.accept()
                await peer.greet(auth_required=True)
                await peer.expect(b"AUTH\n", sized(b"hush"))
                await peer.send(answer)
                if answer == encode_response(b"{}"):
                    await peer.expect(b"SUB topic channel\n")
                    await peer.send(OK_FRAME)
                    await peer.expect(b"RDY 1\n")
                    peer.hang_up()
            nursery.cancel_scope.cancel()

        nursery.start_soon(serve)
        async with consumer:
            await anext(consumer)


@bounded
async def test_note_that_a_broker_requires_no_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and only if there is a secret."""
    with caplog.at_level(logging.INFO, "trio_nsq.security"):
        async with running_broker(tmp_path / "data") as bound:
            for secret in ("", "hush", "hush"):
                async with Producer(bound.tcp_address, auth_secret=secret) as producer:
                    await producer.publish("t", b"m")
    records = [record for record in caplog.records if record.name == "trio_nsq.security"]
    assert [(record.levelname, record.getMessage()) for record in records] == [
        (
            "INFO",
            f"{bound.tcp_address} requires no authentication: every client may do everything there, and the secret was "
            "not sent",
        )
    ]


@bounded
async def test_warning_that_tls_options_encrypt_nothing_by_themselves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = Certificates(tmp_path)
    async with running_broker(tmp_path / "data", **certificates.options) as bound:
        for encrypts in (True, False, False):
            async with Producer(
                bound.tcp_address, tls_v1=encrypts, tls_root_ca_file=certificates.ca_path
            ) as producer:
                await producer.publish("t", b"m")
    (record,) = (each for each in caplog.records if each.name == "trio_nsq.security")
    assert record.getMessage() == (
        f"the connection to {bound.tcp_address} is not encrypted, although TLS options are given: set tls_v1=True"
    )


@bounded
async def test_secret_is_sent_only_to_a_broker_with_a_trusted_certificate(tmp_path: Path) -> None:
    """The broker has a certificate of a CA that the client does not trust."""
    auth_file = AuthFile(tmp_path)
    ours, foreign = Certificates(tmp_path / "ours"), Certificates(tmp_path / "foreign")
    async with guarded(auth_file, **foreign.options) as bound:
        trusting: Any = {"tls_v1": True, "tls_root_ca_file": ours.ca_path}
        with pytest.raises(ConnectionFailed, match="its certificate is not trusted") as caught:
            async with Producer(bound.tcp_address, auth_secret=UNKNOWN, **trusting):
                pass
        assert not isinstance(caught.value, AuthRefused)  # the broker got no secret that it could refuse
        context = ssl.create_default_context(cafile=ours.ca_path)
        with pytest.raises(ConnectionFailed, match="its certificate is not trusted"):
            async with TopicReader(bound.https_address, "t", tls=context, auth_secret=UNKNOWN):
                pass
        url = f"https://{bound.https_address}"
        with pytest.raises(ConnectionFailed, match="its certificate is not trusted"):  # by the system
            async with TopicReader(url, "t", auth_secret=UNKNOWN):
                pass
        trusted = ssl.create_default_context(cafile=foreign.ca_path)
        with pytest.raises(RequestRefused) as refused:  # this secret arrives
            async with TopicReader(url, "t", tls=trusted, auth_secret=UNKNOWN):
                pass
        assert refused.value.status == 401
        # The user turned verification off.
        with pytest.raises(AuthRefused):
            async with Producer(
                bound.tcp_address, auth_secret=UNKNOWN, tls_v1=True, tls_insecure_skip_verify=True
            ):
                pass


@bounded
async def test_no_secret_without_the_tls_that_was_asked_for() -> None:
    async with fake_broker() as broker, trio.open_nursery() as nursery:

        async def serve() -> None:
            peer = await broker.accept()
            await peer.greet(auth_required=True, tls_v1=False)
            await peer.expect_end()

        nursery.start_soon(serve)
        with pytest.raises(ConnectionFailed, match="does not offer TLS"):
            async with Producer(broker.address, auth_secret="hush", tls_v1=True):
                pass


@bounded
async def test_certificate_instead_of_a_secret(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    cert, key = certificates.client_files("backup")
    subject = x509.load_pem_x509_certificate(cert.read_bytes()).subject.rfc4514_string()
    auth_file = AuthFile(tmp_path)
    auth_file.path.write_text(
        f'[[certificate]]\nname = "backup"\nsubject = "{subject}"\n'
        'grants = [{ roles = ["publish"], topics = ["clicks"] }]\n'
    )
    async with guarded(
        auth_file,
        **certificates.options,
        tls_root_ca_file=certificates.ca_path,
        tls_client_auth_policy="verify-if-given",
    ) as bound:
        files: Any = {"tls_v1": True, "tls_root_ca_file": certificates.ca_path}
        with pytest.raises(AuthRefused):
            async with Producer(bound.tcp_address, **files):
                pass
        async with Producer(bound.tcp_address, tls_cert=cert, tls_key=key, **files) as producer:
            await producer.publish("clicks", b"one")
            with pytest.raises(PublishFailed, match="E_UNAUTHORIZED"):
                await producer.publish("orders", b"one")


@bounded
async def test_only_allowed_brokers_of_a_discovery_service_get_the_secret(
    auth_file: AuthFile, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded(auth_file) as bound, fake_broker() as foreign:
        port = foreign.address.rpartition(":")[2]
        async with fake_lookupd(f"localhost:{port}", bound.tcp_address) as lookupd:
            async with Consumer(
                "topic",
                "channel",
                lookupd_http_addresses=[lookupd.address],
                lookupd_allowed_hosts=["*.example.com", "127.0.0.*"],
                **secret("consume"),
            ) as consumer:
                while not consumer.stats().connections:
                    await trio.sleep(0.001)
                assert consumer.stats().connections == 1
                await foreign.expect_no_connection()
        place = f"nsqlookupd {lookupd.address} returned a broker address"
        assert f"{place} that is not among the allowed hosts: 'localhost'" in caplog.text


@bounded
async def test_reader_waits_for_the_auth_servers_of_a_broker() -> None:
    requests = 0
    gone = trio.Event()

    async def read(request: Request) -> Response:
        nonlocal requests
        requests += 1
        if requests == 2:
            raise HTTPError(503, "AUTH_UNAVAILABLE")
        if requests == 3:
            gone.set()
            raise HTTPError(401, "INVALID_TOKEN")
        headers = {f"X-NSQ-{name}-Sequence": "0" for name in ("First", "Start", "End")}
        return Response(200, b"", headers=headers)

    async def serve(stream: trio.SocketStream) -> None:
        await serve_connection(stream, Router([Route("GET", "/topic/read", read)]))

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(
            lambda task_status: trio.serve_tcp(serve, 0, host="127.0.0.1", task_status=task_status)
        )
        address = "127.0.0.1:%d" % listener.socket.getsockname()[1]
        reader = TopicReader(
            address, "t", follow=True, auth_secret="hush", reconnect_min_s=0.001, reconnect_max_s=0.001
        )
        async with reader:
            with pytest.raises(RequestRefused, match="INVALID_TOKEN") as refused:
                await reader.receive()
        assert refused.value.is_about_secret
        assert gone.is_set()
        nursery.cancel_scope.cancel()
