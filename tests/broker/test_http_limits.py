"""Tests for limits of requests, which are checked before the body is read, and for connections that continue."""

from pathlib import Path

import pytest

from broker.api import raw_answer, raw_post, raw_post_with_length
from broker.support import connected, running_broker
from trio_nsq.protocol import Limits

LIMITS = Limits(max_msg_size=1000, max_body_size=3000)


def chunked(path: bytes, *chunks: bytes) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return raw_post(path, b"Transfer-Encoding: chunked", body=body)


PUB, MPUB = b"/pub?topic=t", b"/mpub?topic=t"


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (raw_post(PUB, b"Content-Length: 1001"), b"MSG_TOO_BIG"),
        (raw_post(PUB, b"Content-Length: 99999999999999999"), b"MSG_TOO_BIG"),
        (raw_post(b"/pub", b"Content-Length: 1001"), b"MSG_TOO_BIG"),
        (raw_post(MPUB, b"Content-Length: 3001"), b"BODY_TOO_BIG"),
        (raw_post(MPUB + b"&binary=true", b"Content-Length: 3001"), b"BODY_TOO_BIG"),
        (raw_post(b"/config/log_level", b"Content-Length: 1001", method=b"PUT"), b"INVALID_VALUE"),
        (raw_post(PUB, b"Content-Length: 1001", b"Expect: 100-continue"), b"MSG_TOO_BIG"),
        (chunked(PUB, b"x" * 600, b"x" * 401), b"MSG_TOO_BIG"),
        (chunked(PUB, *[b"x"] * 1001), b"MSG_TOO_BIG"),
        (
            chunked(MPUB, b"x" * 900 + b"\n", b"x" * 900 + b"\n", b"x" * 900 + b"\n", b"x" * 300),
            b"BODY_TOO_BIG",
        ),
    ],
)
async def test_too_large_request_is_refused_before_it_arrives(
    tmp_path: Path, request_: bytes, code: bytes
) -> None:
    async with running_broker(tmp_path / "d", limits=LIMITS) as bound:
        assert bound.http_address is not None
        async with connected(bound.http_address, request_) as client:
            assert await raw_answer(client) == (413, b'{"message":"%b"}' % code)
            assert await client.exactly(1) is None


@pytest.mark.parametrize(
    "request_",
    [
        raw_post_with_length(PUB, b"x" * 1000),
        chunked(PUB, b"x" * 600, b"x" * 400, b""),
        raw_post_with_length(MPUB, b"\n".join([b"x" * 999] * 3)),
        chunked(MPUB, *[b"x" * 999 + b"\n"] * 3, b""),
    ],
)
async def test_largest_request_is_accepted_and_the_connection_continues(
    tmp_path: Path, request_: bytes
) -> None:
    async with running_broker(tmp_path / "d", limits=LIMITS) as bound:
        assert bound.http_address is not None
        async with connected(bound.http_address, request_ * 2) as client:
            assert await raw_answer(client) == (200, b"OK")
            assert await raw_answer(client) == (200, b"OK")
            await client.send(request_)
            assert await raw_answer(client) == (200, b"OK")


async def test_refused_requests_do_not_end_the_connection(tmp_path: Path) -> None:
    requests = {
        raw_post_with_length(PUB, b""): (400, b"MSG_EMPTY"),
        raw_post_with_length(b"/pub", b"x"): (400, b"MISSING_ARG_TOPIC"),
        raw_post_with_length(b"/pub?topic=%7C", b"x"): (400, b"INVALID_TOPIC"),
        raw_post_with_length(PUB + b"&defer=x", b"x"): (400, b"INVALID_DEFER"),
        raw_post_with_length(MPUB, b"x" * 1001): (413, b"MSG_TOO_BIG"),
        raw_post_with_length(MPUB + b"&binary=1", b"x"): (413, b"BAD_BODY"),
        raw_post_with_length(b"/nowhere", b"x"): (404, b"NOT_FOUND"),
        raw_post_with_length(b"/info", b"x"): (405, b"METHOD_NOT_ALLOWED"),
        raw_post_with_length(b"/config/nope", b"x", method=b"PUT"): (400, b"INVALID_OPTION"),
    }
    async with running_broker(tmp_path / "d", limits=LIMITS) as bound:
        assert bound.http_address is not None
        async with connected(bound.http_address, b"".join(requests)) as client:
            for status, code in requests.values():
                assert await raw_answer(client) == (status, b'{"message":"%b"}' % code)
            await client.send(raw_post_with_length(PUB, b"x"))
            assert await raw_answer(client) == (200, b"OK")


async def test_body_is_requested_if_the_client_waits(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d", limits=LIMITS) as bound:
        assert bound.http_address is not None
        request = raw_post(PUB, b"Content-Length: 4", b"Expect: 100-continue")
        async with connected(bound.http_address, request) as client:
            assert await client.exactly(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(b"body")
            assert await raw_answer(client) == (200, b"OK")
