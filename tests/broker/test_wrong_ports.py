"""Clients that speak another protocol than that of the port."""

from pathlib import Path

import pytest

from broker.support import connected, running_broker
from trio_nsq.broker.session.wrong_ports import EVERY_S, MAX_CLIENTS, WrongPorts

GET = b"GET /stats HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /pub?topic=t HTTP/1.1\r\n\r\n"
TLS = bytes.fromhex("160301 00c8 0100 00c4 0303") + bytes(100)
NSQ = b"  V2IDENTIFY\n\0\0\0\2{}"
GARBAGE = b"\x80\0garbage"


@pytest.mark.parametrize(
    ("port", "sent", "told"),
    [
        ("tcp", GET, "speaks HTTP, and this is the TCP port. HTTP is at {http}."),
        ("tcp", POST, "speaks HTTP, and this is the TCP port. HTTP is at {http}."),
        (
            "tcp",
            TLS,
            "speaks TLS, and this is the TCP port. NSQ clients begin TLS after IDENTIFY (tls_v1). "
            "There is no port for HTTPS.",
        ),
        ("tcp", GARBAGE, None),
        ("http", TLS, "speaks TLS, and this is the port for plain HTTP. There is no port for HTTPS."),
        ("http", NSQ, "speaks the NSQ protocol, and this is the port for plain HTTP. The TCP port is {tcp}."),
        ("http", GARBAGE, None),
        ("http", GET, None),
        ("http", b"GET / HTTP/1.1\r\n  V2\r\n\r\n", None),
    ],
)
async def test_the_log_names_the_right_port(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, port: str, sent: bytes, told: str | None
) -> None:
    caplog.set_level("INFO")
    async with running_broker(tmp_path / "d") as bound:
        tcp, http = bound.tcp_address, bound.http_address
        assert http is not None
        for _ in range(3):
            async with connected(tcp if port == "tcp" else http, b"") as client:
                await client.send(sent)
                await client.stream.send_eof()
                while await client.exactly(1):
                    pass
    lines = [record.getMessage() for record in caplog.records]
    found = [line.partition(" - the client ")[2] for line in lines if "the client speaks" in line]
    assert found == ([] if told is None else [told.format(tcp=tcp, http=http)])  # for three connections
    bare = [line for line in lines if "E_BAD_PROTOCOL" in line or line.startswith("400 - -")]
    assert len(bare) == (3 if told is None and sent is not GET else 0)


def test_each_client_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    ports = WrongPorts(lambda: now_s)
    for step_s, logged in ((0.0, 1), (EVERY_S - 1, 0), (2.0, 1)):
        now_s += step_s
        caplog.clear()
        for port in (1, 2):
            ports.report(f"10.0.0.1:{port}", "HTTP", "NSQ")
        assert len(caplog.records) == logged
    for number in range(MAX_CLIENTS):
        ports.report(f"host{number}:1", "HTTP", "NSQ")
    caplog.clear()
    ports.report(f"host{MAX_CLIENTS - 1}:1", "HTTP", "NSQ")
    ports.report("10.0.0.1:1", "HTTP", "NSQ")  # was replaced by the others
    assert [record.getMessage()[:10] for record in caplog.records] == ["[10.0.0.1:"]
