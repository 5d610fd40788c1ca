"""Tests for responses and their heads."""

from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from trio_nsq.http.messages import HTTPError, Response, encode_head


async def pieces() -> AsyncGenerator[bytes, None]:
    yield b"piece"


def head(
    response: Response, *, plain: bool = False, connection: bytes = b"", chunked: bool = True
) -> list[str]:
    lines = encode_head(response, plain=plain, about=connection, chunked=chunked).decode().split("\r\n")
    assert lines[-2:] == ["", ""]
    return lines[:-2]


def test_text() -> None:
    assert Response.text("é", 500) == Response(500, "é".encode(), "text/plain; charset=utf-8")


def test_json_has_no_spaces() -> None:
    expected = Response(200, b'{"a":[1,"\xc3\xa9"]}', "application/json; charset=utf-8")
    assert Response.json({"a": [1, "é"]}) == expected


def test_empty() -> None:
    assert Response.empty() == Response(200, b"", None)


def test_error_is_a_json_message() -> None:
    expected = Response(400, b'{"message":"INVALID_TOPIC"}', "application/json; charset=utf-8")
    assert HTTPError(400, "INVALID_TOPIC").response() == expected


def test_head_in_full() -> None:
    response = replace(Response.text("OK"), headers={"Allow": "GET", "X-More": "1"})
    assert head(response, connection=b"Connection: close\r\n") == [
        "HTTP/1.1 200 OK",
        "X-NSQ-Content-Type: nsq; version=1.0",
        "Content-Type: text/plain; charset=utf-8",
        "Content-Length: 2",
        "Connection: close",
        "Allow: GET",
        "X-More: 1",
    ]


def test_head_of_a_plain_route_lacks_the_header_of_nsq() -> None:
    assert head(Response.empty(404), plain=True) == ["HTTP/1.1 404 Not Found", "Content-Length: 0"]


def test_generated_body_is_chunked_if_the_client_supports_it() -> None:
    response = Response(200, pieces(), None)
    assert head(response, plain=True) == ["HTTP/1.1 200 OK", "Transfer-Encoding: chunked"]
    assert head(response, plain=True, chunked=False) == ["HTTP/1.1 200 OK"]


@pytest.mark.parametrize(
    "response",
    [
        Response(299),
        Response(content_type="text/plain\r\nEvil: 1"),
        Response(headers={"Location": "/a\nEvil: 1"}),
        Response(headers={"Location\r\nEvil": "1"}),
        Response(headers={"Location": "/\N{SNOWMAN}"}),
    ],
)
def test_invalid_responses_are_refused(response: Response) -> None:
    with pytest.raises(ValueError):
        head(response)
