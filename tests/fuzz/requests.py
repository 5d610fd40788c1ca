"""Fuzz target for HTTP: `RequestReader`, with routes like the broker's."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

from fuzz.engine import ways
from trio_nsq.http.messages import INTERNAL_ERROR, Request, Response
from trio_nsq.http.parsing import Exchange, RequestReader
from trio_nsq.http.routing import Route, Router

STATUSES = frozenset({200, 301, 307, 400, 403, 404, 405, 413, 431})
"""The statuses of answers without a handler."""
METHODS = (b"GET", b"POST", b"PUT", b"HEAD", b"OPTIONS", b"DELETE", b"CONNECT", b"BREW")
TARGETS = (
    b"/ping",
    b"/pub?topic=t",
    b"/pub?topic=t&defer=1000",
    b"/pub/?topic=t",
    b"//Pub",
    b"/config/log_level",
    b"/nowhere",
    b"*",
    b"http://x/ping?a=b",
    b"/ping?%zz",
    b"/p%69ng?a=%41+b;c",
    b"/" + b"x" * 300,
)
HEADERS = (
    b"Host: localhost",
    b"Connection: close",
    b"Connection: keep-alive",
    b"Content-Type: text/plain",
    b"Accept: */*",
    b"Expect: 100-continue",
    b"Upgrade: h2c\r\nConnection: Upgrade",
    b"Transfer-Encoding: chunked",
    b"Content-Length: 3",
    b"Content-Length: 0",
    b"X: " + b"y" * 200,
    b"X:",
    b"X: \xff",
    b"Cookie: a=b",
)
BODIES = (b"", b"abc", b"abc", b"x" * 64, b"x" * 65)


async def _handler(_request: Request) -> Response:
    raise AssertionError("nothing is answered here")


ROUTER = Router(
    [
        Route("GET", "/ping", _handler, plain=True),
        Route("POST", "/pub", _handler, max_body_bytes=64, too_big="MSG_TOO_BIG"),
        Route("GET", "/config/{opt}", _handler),
        Route("PUT", "/config/{opt}", _handler, max_body_bytes=64),
    ]
)


class _Complaints(logging.Handler):
    """Bugs that the reader turned into an answer."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(self.format(record))


_LOGGER = logging.getLogger("trio_nsq.http")
_complaints = _Complaints()


@contextmanager
def _complaints_noted() -> Iterator[None]:
    """Record them, and only within this block, because all tests share the logger."""
    _complaints.records.clear()
    propagated, _LOGGER.propagate = _LOGGER.propagate, False
    _LOGGER.addHandler(_complaints)
    try:
        yield
    finally:
        _LOGGER.removeHandler(_complaints)
        _LOGGER.propagate = propagated


def request(rng: Random) -> list[bytes]:
    """Return the lines of one request, and its body."""
    body = rng.choice(BODIES)
    version = rng.choice((b"1.1", b"1.1", b"1.1", b"1.0", b"2.0"))
    lines = [rng.choice(METHODS[:3]) if rng.random() < 0.8 else rng.choice(METHODS)]
    lines[0] += b" " + rng.choice(TARGETS) + b" HTTP/" + version + b"\r\n"
    lines.append(b"Host: localhost\r\n")
    lines += [header + b"\r\n" for header in rng.sample(HEADERS, rng.choice((0, 0, 1, 2, 3)))]
    if body and rng.random() < 0.3:
        chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:2], body[2:]) if part]
        return [
            *lines,
            b"Transfer-Encoding: chunked\r\n",
            b"\r\n",
            *chunks,
            b"0\r\n",
            rng.choice((b"", b"X: y\r\n")),
            b"\r\n",
        ]
    if body or rng.random() < 0.3:
        lines.append(b"Content-Length: %d\r\n" % len(body))
    return [*lines, b"\r\n", body]


class Requests:
    """The reader of requests."""

    name = "http"
    # A header line of four bytes becomes two strings of 50 in a dictionary, and its text is stored several
    # times.
    memory_per_byte = 100
    memory_bytes = 50_000

    def valid(self, rng: Random) -> list[bytes]:
        return [piece for _ in range(rng.choice((1, 1, 2, 3))) for piece in request(rng)]

    def check(self, data: bytes, rng: Random) -> None:
        with _complaints_noted():
            whole = read([data])
            assert len(whole) <= len(data) // 10 + 1, "requests out of nothing"
            for pieces in ways(data, rng):
                again = read(pieces)
                assert again == whole, f"in pieces of {[*map(len, pieces)][:9]}: {again}; whole: {whole}"

    def read(self, data: bytes) -> None:
        RequestReader(ROUTER, "").receive_data(data)


def read(pieces: list[bytes]) -> list[object]:
    """Read as a server does, which reads nothing after a request that ends the connection."""
    reader = RequestReader(ROUTER, "127.0.0.1:1")
    found: list[object] = []
    for piece in pieces:
        for exchange in reader.receive_data(piece):
            _check(exchange)
            # How much of a request refused in its head is known depends on how it arrived.
            known = exchange.request if exchange.keep_alive else None
            found.append((known, exchange.answer, exchange.keep_alive, exchange.chunked))
            if not exchange.keep_alive:
                return found
    return found


def _check(exchange: Exchange) -> None:
    if _complaints.records:
        raise AssertionError(_complaints.records.pop())
    answer = exchange.answer
    assert answer != INTERNAL_ERROR
    if isinstance(answer, Response):
        assert answer.status in STATUSES, answer
    else:
        assert len(exchange.request.body) <= answer.max_body_bytes
        assert exchange.request.method == answer.method
