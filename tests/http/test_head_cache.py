"""Requests whose heads were seen before: they mean what they meant the first time, wherever their bytes are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.access.access import Access
from trio_nsq.http.guard import Guard
from trio_nsq.http.head_cache import HeadCache, repeatable_head
from trio_nsq.http.messages import Request, Response
from trio_nsq.http.parsing import Exchange, RequestReader
from trio_nsq.http.routing import Route, Router
from trio_nsq.http.web_pages import HostNames


async def handler(request: Request) -> Response:
    return Response()


ROUTER = Router(
    [
        Route("GET", "/ping", handler),
        Route("POST", "/pub", handler, max_body_bytes=100, too_big="MSG_TOO_BIG"),
        Route("POST", "/other", handler, max_body_bytes=100),
    ]
)
HOST = b"Host: localhost\r\n"


def post(body: bytes, headers: bytes = HOST, path: bytes = b"/pub?topic=t", version: bytes = b"1.1") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body)
    return b"POST " + path + b" HTTP/" + version + b"\r\n" + headers + length + b"\r\n" + body


def read(*parts: bytes, router: Router = ROUTER, guard: Guard | None = None) -> list[Exchange]:
    """Read parts that arrive one after the other, until a request ends the connection."""
    reader = RequestReader(router, "peer:1", guard)
    found: list[Exchange] = []
    for part in parts:
        for exchange in reader.receive_data(part):
            found.append(exchange)
            if not exchange.keep_alive:
                return found
    return found


def unremembered(data: bytes) -> list[Exchange]:
    """Read byte by byte: no head is seen as a whole."""
    return read(*(data[i : i + 1] for i in range(len(data))))


REQUESTS = st.sampled_from(
    [
        post(b"hello"),
        post(b"howdy"),
        post(b"x" * 7),
        post(b""),
        post(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"),  # a body that looks like a request
        post(b"\r\n\r\n"),
        post(b"hello", path=b"/other?%74opic=t"),
        post(b"hello", path=b"/missing"),
        post(b"hello", HOST + b"Connection: keep-alive\r\n", version=b"1.0"),
        post(b"hello", HOST + b"Connection: close\r\n"),
        post(b"hello", HOST + b"Expect: 100-continue\r\n"),
        post(b"hello", HOST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n"),
        post(b"hello", HOST + b"Authorization: Bearer x\r\n"),
        post(b"hello", HOST + b"X-Twice: 1\r\nx-twice: 2\r\n"),
        post(b"hello", HOST + b"X-Bare: 1\n"),
        post(b"hello", b""),  # without Host
        post(b"x" * 101),
        b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"HEAD /ping HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /pub HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"\r\n",
    ]
)


@given(st.lists(REQUESTS, max_size=8), st.integers(1, 3))
def test_repeated_heads_mean_the_same(requests: list[bytes], repeated: int) -> None:
    parts = [request for request in requests for _ in range(repeated)]
    expected = unremembered(b"".join(parts))
    assert read(*parts) == expected
    assert read(b"".join(parts)) == expected


@given(st.lists(REQUESTS, max_size=5), st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_repeated_heads_mean_the_same_wherever_they_are_cut(requests: list[bytes], sizes: list[int]) -> None:
    for request in requests:
        read(*[request] * 3)
    data = b"".join(requests)
    parts: list[bytes] = []
    start = 0
    while start < len(data):
        size = sizes[len(parts) % len(sizes)]
        parts.append(data[start : start + size])
        start += size
    assert read(*parts) == unremembered(data)


def test_request_with_a_known_head_is_cut_anywhere() -> None:
    request, following = post(b"hello"), b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
    data = request + following
    known, expected = [request] * 3 + [following] * 3, unremembered(data)
    for cut in range(len(data) + 1):
        assert read(*known, data[:cut], data[cut:])[len(known) :] == expected


def test_each_request_has_its_own_body_and_identity() -> None:
    requests = [exchange.request for exchange in read(*[post(b"one"), post(b"two")] * 3)]
    assert [request.body for request in requests] == [b"one", b"two"] * 3
    assert len({id(request) for request in requests}) == 6


def test_known_head_is_routed_and_limited_by_each_router() -> None:
    request = post(b"hello")
    read(*[request] * 3)
    small = Router([Route("POST", "/pub", handler, max_body_bytes=4, too_big="MSG_TOO_BIG")])
    assert statuses(read(*[request] * 2, router=small)) == [413]
    assert statuses(read(*[request] * 2, router=Router([]))) == [404, 404]


def test_known_head_is_checked_by_each_guard() -> None:
    request = post(b"hello")
    closed = Guard(Access(), HostNames(), read_only=True)
    assert statuses(read(*[request] * 3, guard=Guard(Access(), HostNames()))) == [0, 0, 0]
    assert statuses(read(*[request] * 3, guard=closed)) == [403]


def statuses(exchanges: list[Exchange]) -> list[int]:
    """Return the status of each answer; 0 for a route."""
    answers = [exchange.answer for exchange in exchanges]
    return [answer.status if isinstance(answer, Response) else 0 for answer in answers]


@pytest.mark.parametrize(
    "header",
    [
        b"Authorization: Basic eA==",
        b"Cookie: a=b",
        b"Expect: x",
        b"Upgrade: h2c",
        b"Traceparent: 00-1-2-01",
        b"X: " + b"x" * 1024,
    ],
)
def test_secrets_and_special_heads_are_not_kept(header: bytes) -> None:
    for extra, kept in ((header + b"\r\n", False), (b"", True)):
        data = post(b"", HOST + extra)
        (exchange,) = unremembered(data)
        assert repeatable_head(data, exchange.request) == (data if kept else b"")


@pytest.mark.parametrize("header", [b"Authorization: Bearer x", b"X: " + b"x" * 1024])
def test_idle_connection_keeps_no_copy_of_a_secret_or_large_head(header: bytes) -> None:
    reader = RequestReader(ROUTER, "peer:1", None)
    data = post(b"hello", HOST + header + b"\r\n")
    assert len(reader.receive_data(data)) == 1
    kept = [value for value in vars(reader).values() if isinstance(value, bytes)]
    assert [value for value in kept if header in value] == []


def test_number_of_heads_is_bounded() -> None:
    heads = HeadCache()
    requests = [post(b"", b"Host: h%d\r\n" % number) for number in range(1000)]
    for data in requests:
        (exchange,) = unremembered(data)
        heads.add(data, exchange.request, chunked=True)
    known = [heads.find(data, 0) is not None for data in requests]
    assert known[-1]
    assert sum(known) <= 256
