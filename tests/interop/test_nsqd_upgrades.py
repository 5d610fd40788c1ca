"""Test our client with the real nsqd: TLS, compression and AUTH."""

from pathlib import Path
from typing import Any

import pytest
import trio

from broker.auth_server import threaded_auth_server
from broker.certificates import Certificates
from interop.our_client import PATIENCE_S
from interop.peers import nsqd
from trio_nsq.client import ConnectionFailed, Consumer, Producer, PublishFailed

pytestmark = pytest.mark.interop

BODIES = [b"%d" % number for number in range(3000)] + [bytes(range(256)) * 3000]


async def round_trip(address: str, topic: str, **options: Any) -> None:
    with trio.fail_after(PATIENCE_S):
        async with Consumer(
            topic, "c", max_in_flight=300, nsqd_tcp_addresses=[address], **options
        ) as consumer:
            async with Producer(address, **options) as producer:
                await producer.publish_many(topic, BODIES)
                received: list[bytes] = []
                async for batch in consumer.batches():
                    received += batch.bodies
                    batch.finish()
                    if len(received) == len(BODIES):
                        break
    assert sorted(received) == sorted(BODIES)


async def test_every_combination_of_upgrades(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    cert, key = certificates.client_files("alice")
    flags = [
        f"--tls-cert={certificates.options['tls_cert']}",
        f"--tls-key={certificates.options['tls_key']}",
        f"--tls-root-ca-file={certificates.ca_path}",
        "--tls-client-auth-policy=require-verify",
        "--tls-required=tcp-https",
    ]
    tls: dict[str, Any] = {
        "tls_v1": True,
        "tls_root_ca_file": certificates.ca_path,
        "tls_cert": cert,
        "tls_key": key,
    }
    with threaded_auth_server() as auth:
        with nsqd(tmp_path / "d", *flags, f"--auth-http-address={auth.address}") as broker:
            address = broker.tcp_address
            await round_trip(address, "plain", auth_secret="hush", **tls)
            await round_trip(address, "snappy", auth_secret="hush", snappy=True, **tls)
            await round_trip(address, "deflate", auth_secret="hush", deflate=True, deflate_level=3, **tls)
            assert "common_name=alice" in auth.queries[0]
            assert "secret=hush" in auth.queries[0]
            async with Producer(address, **tls) as producer:  # no secret, only the certificate
                with pytest.raises(PublishFailed, match="E_AUTH_FIRST"):
                    await producer.publish("refused", b"one")
            with pytest.raises(ConnectionFailed, match="not trusted"):
                async with Producer(address, tls_v1=True):
                    pass


async def test_compression_without_tls(tmp_path: Path) -> None:
    with nsqd(tmp_path / "d") as broker:
        await round_trip(broker.tcp_address, "snappy", snappy=True)
        await round_trip(broker.tcp_address, "deflate", deflate=True)
        with pytest.raises(ConnectionFailed, match="does not offer TLS"):
            async with Producer(broker.tcp_address, tls_v1=True):
                pass
