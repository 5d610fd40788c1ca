"""Tests for the parser of requests: whole, byte by byte, and with other requests before and after."""

import logging
import tracemalloc
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.http.messages import Request, Response
from trio_nsq.http.parsing import MAX_HEAD_BYTES, MAX_HEADERS, Exchange, RequestReader
from trio_nsq.http.routing import DEFAULT_MAX_BODY_BYTES, Route, Router

HOST = b"Host: localhost\r\n"


async def handler(request: Request) -> Response:
    return Response()


ROUTER = Router(
    [
        Route("GET", "/ping", handler),
        Route("POST", "/pub", handler, max_body_bytes=10, too_big="MSG_TOO_BIG"),
        Route("POST", "/mpub", handler, max_body_bytes=10**9),
    ]
)
NEXT = b"GET /ping?next HTTP/1.1\r\n" + HOST + b"\r\n"


def post(
    headers: bytes = b"", body: bytes = b"", path: bytes = b"/pub?topic=t", version: bytes = b"1.1"
) -> bytes:
    return b"POST " + path + b" HTTP/" + version + b"\r\n" + HOST + headers + b"\r\n" + body


def get(target: bytes, headers: bytes = HOST, method: bytes = b"GET", version: bytes = b"1.1") -> bytes:
    return method + b" " + target + b" HTTP/" + version + b"\r\n" + headers + b"\r\n"


def read(parts: Iterable[bytes]) -> list[Exchange]:
    reader = RequestReader(ROUTER, "peer:1")
    found: list[Exchange] = []
    for part in parts:
        found += reader.receive_data(part)
        if found and not found[-1].keep_alive:
            break
    return found


def whole(data: bytes) -> list[bytes]:
    return [data]


def byte_by_byte(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


@pytest.fixture(params=[whole, byte_by_byte])
def delivery(request: pytest.FixtureRequest) -> Callable[[bytes], list[bytes]]:
    split: Callable[[bytes], list[bytes]] = request.param
    return split


ACCEPTED = {
    "no body": (get(b"/ping"), Request("GET", "/ping", {}, {"host": "localhost"}, b"", "peer:1", "/ping")),
    "query": (
        get(b"/ping?a=b+c&d=%23&a=2&e"),
        Request(
            "GET",
            "/ping",
            {"a": "b c", "d": "#", "e": ""},
            {"host": "localhost"},
            b"",
            "peer:1",
            "/ping?a=b+c&d=%23&a=2&e",
        ),
    ),
    "absolute form": (
        get(b"http://localhost/ping?a=b"),
        Request(
            "GET", "/ping", {"a": "b"}, {"host": "localhost"}, b"", "peer:1", "http://localhost/ping?a=b"
        ),
    ),
    "HTTP/1.0 without Host": (
        get(b"/ping", headers=b"Connection: keep-alive\r\n", version=b"1.0"),
        Request("GET", "/ping", {}, {"connection": "keep-alive"}, b"", "peer:1", "/ping"),
    ),
    "headers": (
        get(b"/ping", headers=HOST + b"X-Mixed-Case:  a b \t\r\nx-twice: 1\r\nX-Twice: 2\r\nX-Empty:\r\n"),
        Request(
            "GET",
            "/ping",
            {},
            {"host": "localhost", "x-mixed-case": "a b", "x-twice": "1, 2", "x-empty": ""},
            b"",
            "peer:1",
            "/ping",
        ),
    ),
    "body": (
        post(b"Content-Length: 10\r\n", b"0123456789"),
        Request(
            "POST",
            "/pub",
            {"topic": "t"},
            {"host": "localhost", "content-length": "10"},
            b"0123456789",
            "peer:1",
            "/pub?topic=t",
        ),
    ),
    "chunked body, its trailers dropped": (
        post(
            b"Transfer-Encoding: chunked\r\n",
            b"4;x=y\r\n0123\r\n6\r\n456789\r\n0\r\nHost: evil\r\nA: b\r\n\r\n",
        ),
        Request(
            "POST",
            "/pub",
            {"topic": "t"},
            {"host": "localhost", "transfer-encoding": "chunked"},
            b"0123456789",
            "peer:1",
            "/pub?topic=t",
        ),
    ),
    "offer to upgrade": (
        get(b"/ping", headers=HOST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n"),
        Request("GET", "/ping", {}, {"host": "localhost", "connection": "Upgrade"}, b"", "peer:1", "/ping"),
    ),
    "offer to upgrade, with a body": (
        post(b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n", b"abc"),
        Request(
            "POST",
            "/pub",
            {"topic": "t"},
            {"host": "localhost", "connection": "Upgrade", "content-length": "3"},
            b"abc",
            "peer:1",
            "/pub?topic=t",
        ),
    ),
    "offer to upgrade, with a chunked body": (
        post(
            b"Connection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n", b"3\r\nabc\r\n0\r\n\r\n"
        ),
        Request(
            "POST",
            "/pub",
            {"topic": "t"},
            {"host": "localhost", "connection": "Upgrade", "transfer-encoding": "chunked"},
            b"abc",
            "peer:1",
            "/pub?topic=t",
        ),
    ),
    "offer to upgrade from HTTP/1.0": (
        get(b"/ping", headers=b"Connection: keep-alive, Upgrade\r\nUpgrade: h2c\r\n", version=b"1.0"),
        Request("GET", "/ping", {}, {"connection": "keep-alive, Upgrade"}, b"", "peer:1", "/ping"),
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_request_is_parsed(case: str, delivery: Callable[[bytes], list[bytes]]) -> None:
    data, expected = ACCEPTED[case]
    (exchange,) = read(delivery(data))
    assert exchange.request == expected
    assert isinstance(exchange.answer, Route)
    assert exchange.answer.path == expected.path
    assert exchange.keep_alive


@pytest.mark.parametrize("case", ACCEPTED)
def test_pipelined_requests_are_parsed_in_order(case: str, delivery: Callable[[bytes], list[bytes]]) -> None:
    data, expected = ACCEPTED[case]
    before, exchange, after = read(delivery(NEXT + data + NEXT))
    assert exchange.request == expected
    assert [before.request.query, after.request.query] == [{"next": ""}, {"next": ""}]


ANSWERED = {
    "404": (get(b"/nope"), 404, "NOT_FOUND"),
    "404 with a body": (post(b"Content-Length: 3\r\n", b"abc", path=b"/nope"), 404, "NOT_FOUND"),
    "404 and a bad query": (get(b"/nope?%zz"), 404, "NOT_FOUND"),
    "405": (get(b"/pub"), 405, "METHOD_NOT_ALLOWED"),
    "bad query": (get(b"/ping?a=%zz"), 400, "INVALID_REQUEST"),
    "bad query with a body": (
        post(b"Content-Length: 3\r\n", b"abc", path=b"/pub?a;b"),
        400,
        "INVALID_REQUEST",
    ),
    "bad path": (get(b"/p%zz"), 400, "INVALID_REQUEST"),
}


def answer_of(exchange: Exchange) -> tuple[int, str]:
    assert isinstance(exchange.answer, Response)
    assert isinstance(exchange.answer.body, bytes)
    return exchange.answer.status, exchange.answer.body.decode()


@pytest.mark.parametrize("case", ANSWERED)
def test_request_without_a_handler_does_not_end_the_connection(
    case: str, delivery: Callable[[bytes], list[bytes]]
) -> None:
    data, status, code = ANSWERED[case]
    exchange, after = read(delivery(data + NEXT))
    assert answer_of(exchange) == (status, f'{{"message":"{code}"}}')
    assert exchange.keep_alive
    assert after.request.query == {"next": ""}


REFUSED = {
    "no HTTP": (b"\x16\x03\x01\x02\x00\r\n\r\n", 400, "INVALID_REQUEST"),
    "unknown method": (get(b"/ping", method=b"FOO"), 400, "INVALID_REQUEST"),
    "no slash": (get(b"ping"), 400, "INVALID_REQUEST"),
    "blank in the path": (get(b"/ping x"), 400, "INVALID_REQUEST"),
    "control character in the path": (get(b"/pi\x01ng"), 400, "INVALID_REQUEST"),
    "no Host": (get(b"/ping", headers=b""), 400, "INVALID_REQUEST"),
    "HTTP/2": (get(b"/ping", version=b"2.0"), 400, "INVALID_REQUEST"),
    "HTTP/0.9": (get(b"/ping", version=b"0.9"), 400, "INVALID_REQUEST"),
    "blank before a colon": (get(b"/ping", headers=b"Host : x\r\n"), 400, "INVALID_REQUEST"),
    "folded header": (get(b"/ping", headers=HOST + b"X: a\r\n b\r\n"), 400, "INVALID_REQUEST"),
    "NUL in a header": (get(b"/ping", headers=HOST + b"X: a\0b\r\n"), 400, "INVALID_REQUEST"),
    "negative length": (post(b"Content-Length: -1\r\n"), 400, "INVALID_REQUEST"),
    "two lengths": (post(b"Content-Length: 1\r\nContent-Length: 1\r\n", b"a"), 400, "INVALID_REQUEST"),
    "length beside chunks": (
        post(b"Transfer-Encoding: chunked\r\nContent-Length: 1\r\n", b"1\r\na\r\n0\r\n\r\n"),
        400,
        "INVALID_REQUEST",
    ),
    "unknown transfer coding": (
        post(b"Transfer-Encoding: gzip\r\n", b"abc"),
        501,
        "UNSUPPORTED_TRANSFER_ENCODING",
    ),
    "unknown transfer coding in chunks": (
        post(b"Transfer-Encoding: gzip, chunked\r\n", b"4\r\nabcd\r\n0\r\n\r\n"),
        501,
        "UNSUPPORTED_TRANSFER_ENCODING",
    ),
    "unknown transfer coding in another header": (
        post(b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n", b"4\r\nabcd\r\n0\r\n\r\n"),
        501,
        "UNSUPPORTED_TRANSFER_ENCODING",
    ),
    "bad chunk size": (post(b"Transfer-Encoding: chunked\r\n", b"x\r\n"), 400, "INVALID_REQUEST"),
    "length over the limit": (post(b"Content-Length: 11\r\n"), 413, "MSG_TOO_BIG"),
    "length over the limit, with a blank after it": (post(b"Content-Length: 11 \r\n"), 413, "MSG_TOO_BIG"),
    "chunks over the limit": (
        post(b"Transfer-Encoding: chunked\r\n", b"4\r\n0123\r\n7\r\n456789x"),
        413,
        "MSG_TOO_BIG",
    ),
    "length over the limit, with an offer to upgrade": (
        post(b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 11\r\n"),
        413,
        "MSG_TOO_BIG",
    ),
    "404 with a long body": (
        post(b"Content-Length: %d\r\n" % (DEFAULT_MAX_BODY_BYTES + 1), path=b"/nope"),
        404,
        "NOT_FOUND",
    ),
    "CONNECT to a host": (get(b"localhost:80", method=b"CONNECT"), 404, "NOT_FOUND"),
    "CONNECT to a path": (get(b"/ping", method=b"CONNECT"), 405, "METHOD_NOT_ALLOWED"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_request_is_refused_after_the_valid_ones(
    case: str, delivery: Callable[[bytes], list[bytes]]
) -> None:
    data, status, code = REFUSED[case]
    before, refused = read(delivery(NEXT + data))
    assert isinstance(before.answer, Route)
    assert answer_of(refused) == (status, f'{{"message":"{code}"}}')
    assert not refused.keep_alive


@pytest.mark.parametrize("case", REFUSED)
def test_nothing_is_read_after_a_refusal(case: str) -> None:
    data, *_ = REFUSED[case]
    (refused,) = read([data + b"\r\n" + NEXT])
    assert not refused.keep_alive


@pytest.mark.parametrize("target", ["/nope?a=%zz&b", "http://localhost/ping", "/PING/?a=b"])
def test_target_is_unchanged(target: str) -> None:
    (exchange,) = read([get(target.encode())])
    assert exchange.request.target == target


def test_refusal_has_the_known_parts_of_the_request() -> None:
    (refused,) = read([post(b"Content-Length: 11\r\n")])
    assert (refused.request.method, refused.request.path) == ("POST", "/pub")
    _, refused = read([get(b"/ping"), b"\0"])
    assert (refused.request.method, refused.request.path) == ("", "")


@pytest.mark.parametrize(
    ("version", "connection", "keep_alive"),
    [
        (b"1.1", b"", True),
        (b"1.1", b"Connection: close\r\n", False),
        (b"1.1", b"Connection: keep-alive\r\n", True),
        (b"1.0", b"", False),
        (b"1.0", b"Connection: close\r\n", False),
        (b"1.0", b"Connection: Keep-Alive\r\n", True),
    ],
)
def test_keep_alive_and_chunks_by_version(version: bytes, connection: bytes, keep_alive: bool) -> None:
    first, *_ = read([get(b"/ping", headers=HOST + connection, version=version) + NEXT])
    assert (first.keep_alive, first.chunked) == (keep_alive, version == b"1.1")


HEAD_START = b"GET /ping HTTP/1.1\r\n" + HOST + b"X: "


@pytest.mark.parametrize("name", [b"X: \r\n", b"X-%d: \r\n"])
@pytest.mark.parametrize("upgrade", [b"", b"Connection: upgrade\r\nUpgrade: h2c\r\n"])
def test_number_of_headers_is_limited(name: bytes, upgrade: bytes) -> None:
    """Each takes an object, however short it is."""
    whole = HEAD_START + b"a\r\n" + upgrade
    others = MAX_HEADERS - whole.count(b"\r\n") + 1
    lines = [name % number if b"%" in name else name for number in range(others + 1)]
    (found,) = RequestReader(ROUTER, "").receive_data(whole + b"".join(lines[:-1]) + b"\r\n")
    assert found.keep_alive
    (found,) = RequestReader(ROUTER, "").receive_data(whole + b"".join(lines) + b"Y")
    assert answer_of(found) == (431, '{"message":"HEADERS_TOO_BIG"}')
    assert not found.keep_alive


def dribble(reader: RequestReader, piece: bytes, total: int) -> tuple[int, list[Exchange]]:
    """Feed `piece` repeatedly, up to a total; return how many bytes were accepted, and the results."""
    taken = 0
    while taken < total:
        taken += len(piece)
        if found := reader.receive_data(piece):
            return taken, found
    return taken, []


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(b"", id="line breaks before a request"),
        pytest.param(b"GET /", id="path"),
        pytest.param(HEAD_START, id="header"),
        pytest.param(post(b"Transfer-Encoding: chunked\r\n", b"1\r\na\r\n0\r\nX: "), id="trailer"),
        pytest.param(post(b"Transfer-Encoding: chunked\r\n", b"1\r\na\r\n1;x="), id="chunk extension"),
    ],
)
def test_parts_other_than_the_body_are_limited(start: bytes) -> None:
    reader = RequestReader(ROUTER, "")
    assert reader.receive_data(start) == []
    taken, found = dribble(reader, b"\r\n" * 50 if not start else b"x" * 100, 2 * MAX_HEAD_BYTES)
    assert MAX_HEAD_BYTES - len(start) < taken <= MAX_HEAD_BYTES + 100
    assert answer_of(found[0]) == (431, '{"message":"HEADERS_TOO_BIG"}')
    assert not found[0].keep_alive


def test_head_of_exactly_the_limit() -> None:
    reader = RequestReader(ROUTER, "")
    head = HEAD_START + b"x" * (MAX_HEAD_BYTES - len(HEAD_START) - 4) + b"\r\n\r\n"
    _, (exchange,) = dribble(reader, head[:-4], 1), reader.receive_data(head[-4:])
    assert isinstance(exchange.answer, Route)


def test_long_bodies_do_not_count_as_head() -> None:
    reader = RequestReader(ROUTER, "")
    size = 10 * MAX_HEAD_BYTES
    reader.receive_data(post(b"Content-Length: %d\r\n" % size, path=b"/mpub"))
    _, (exchange,) = dribble(reader, b"x" * 1024, size)
    assert len(exchange.request.body) == size


def test_many_small_chunks_do_not_count_as_head() -> None:
    reader = RequestReader(ROUTER, "")
    reader.receive_data(post(b"Transfer-Encoding: chunked\r\n", path=b"/mpub"))
    assert dribble(reader, b"1\r\nx\r\n" * 100, 4 * MAX_HEAD_BYTES)[1] == []
    (exchange,) = reader.receive_data(b"0\r\n\r\n")
    assert isinstance(exchange.answer, Route)


@pytest.mark.parametrize(
    ("header", "size"), [(b"Content-Length: 300000\r\n", 300_000), (b"Transfer-Encoding: chunked\r\n", 10**9)]
)
def test_large_body_announces_what_is_missing_at_most(header: bytes, size: int) -> None:
    chunk = b"x" * 0x1000
    piece, end = (chunk, b"") if b"Length" in header else (b"1000\r\n" + chunk + b"\r\n", b"0\r\n\r\n")
    reader = RequestReader(ROUTER, "")
    reader.receive_data(post(header, path=b"/mpub"))
    for _ in range(16):
        reader.receive_data(piece)
        assert reader.unfinished_bytes == 0  # a small one needs no room
    for number in range(17, 74):
        reader.receive_data(piece)
        assert reader.unfinished_bytes == size - number * 0x1000
    (exchange,) = reader.receive_data(end or b"x" * (300_000 - 73 * 0x1000))
    assert isinstance(exchange.answer, Route)
    assert reader.unfinished_bytes == 0


def test_large_body_is_not_awaited_after_a_refusal() -> None:
    reader = RequestReader(ROUTER, "")
    reader.receive_data(post(b"Transfer-Encoding: chunked\r\n", b"20000\r\n" + b"x" * 0x20000, path=b"/mpub"))
    assert reader.unfinished_bytes
    (exchange,) = reader.receive_data(b"\r\nx\r\n")
    assert answer_of(exchange) == (400, '{"message":"INVALID_REQUEST"}')
    assert reader.unfinished_bytes == 0


def test_body_takes_little_more_memory_than_its_bytes_and_none_afterwards() -> None:
    reader = RequestReader(ROUTER, "")
    tracemalloc.start()
    try:
        reader.receive_data(post(b"Transfer-Encoding: chunked\r\n", path=b"/mpub"))
        for _ in range(250):
            reader.receive_data(b"2\r\nxx\r\n" * 1000)
        assert tracemalloc.get_traced_memory()[0] < 600_000
        (exchange,) = reader.receive_data(b"0\r\n\r\n")
        assert len(exchange.request.body) == 500_000
        del exchange
        assert tracemalloc.get_traced_memory()[0] < 10_000
    finally:
        tracemalloc.stop()


def test_full_buffers_of_pipelined_requests_do_not_count_as_one_head() -> None:
    data = NEXT * 3000
    parts = [data[:MAX_HEAD_BYTES], *byte_by_byte(data[MAX_HEAD_BYTES : MAX_HEAD_BYTES + 20])]
    found = read([*parts, data[MAX_HEAD_BYTES + 20 :]])
    assert len(found) == 3000
    assert all(isinstance(exchange.answer, Route) for exchange in found)


def test_many_upgrade_offers_in_one_read() -> None:
    offer = get(b"/ping", headers=HOST + b"Connection: Upgrade\r\nUpgrade: x\r\n")
    assert len(read([offer * 1500])) == 1500


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (post(b"Content-Length: 3\r\nExpect: 100-continue\r\n"), True),
        (post(b"Content-Length: 3\r\nExpect: 100-Continue\r\n"), True),
        (post(b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n"), True),
        (NEXT + post(b"Content-Length: 3\r\nExpect: 100-continue\r\n"), True),
        (post(b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\nExpect: 100-continue\r\n"), True),
        (post(b"Content-Length: 3\r\n"), False),
        (post(b"Content-Length: 3\r\nExpect: more\r\n"), False),
        (post(b"Content-Length: 11\r\nExpect: 100-continue\r\n"), False),
        (post(b"Content-Length: 3\r\nExpect: 100-continue\r\n", b"a"), False),
        (post(b"Content-Length: 3\r\nExpect: 100-continue\r\n", b"abc"), False),
        (post(b"Content-Length: 0\r\nExpect: 100-continue\r\n"), False),
        (post(b"Content-Length: 3\r\nExpect: 100-continue\r\n", version=b"1.0"), False),
    ],
)
def test_continue_is_expected_only_while_the_body_is_accepted_and_missing(
    data: bytes, expected: bool
) -> None:
    reader = RequestReader(ROUTER, "")
    reader.receive_data(data)
    assert reader.continue_expected is expected


def test_idle_between_requests_only() -> None:
    reader = RequestReader(ROUTER, "")
    data = post(b"Content-Length: 3\r\n", b"ab~")
    assert reader.at_rest
    for part in byte_by_byte(data):
        reader.receive_data(part)
        assert reader.at_rest is (part == b"~")
    reader.receive_data(data + b"P")
    assert not reader.at_rest


class BrokenRouter(Router):
    def __init__(self, error: BaseException) -> None:
        super().__init__([])
        self._error = error

    def resolve(self, method: str, path: str, query: str = "") -> Route | Response:
        raise self._error


def test_exception_of_a_router_is_logged_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    (exchange,) = RequestReader(BrokenRouter(ZeroDivisionError()), "").receive_data(NEXT)
    assert answer_of(exchange) == (500, '{"message":"INTERNAL_ERROR"}')
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("trio_nsq.http", logging.ERROR)
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupts_leave_the_parser(error: type[BaseException]) -> None:
    with pytest.raises(error):
        RequestReader(BrokenRouter(error()), "").receive_data(NEXT)


FRAGMENTS = st.sampled_from(
    [
        NEXT,
        *(data for data, _ in ACCEPTED.values()),
        *(data for data, *_ in REFUSED.values()),
        *(b"\r\n", b"0\r\n\r\n", b"GET ", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"%"),
    ]
)


@given(st.lists(FRAGMENTS | st.binary(max_size=20), max_size=8), st.integers(1, 50))
def test_result_does_not_depend_on_how_the_bytes_are_split(parts: list[bytes], size: int) -> None:
    data = b"".join(parts)
    in_one = read([data])
    in_many = read(data[i : i + size] for i in range(0, len(data), size))
    # Bytes after a request that ends the connection are not parsed.
    ends = next((i + 1 for i, exchange in enumerate(in_one) if not exchange.keep_alive), len(in_one))
    assert in_many == in_one[:ends]
