"""Any bytes in the head of a request: it is answered or refused, and never let in without a role."""

from hypothesis import given, settings
from hypothesis import strategies as st

from access.support import ALL_ROLES, AuthFile, Given, everything
from soak import examples
from trio_nsq.access.access import Access
from trio_nsq.access.auth_file import parse_auth_file
from trio_nsq.access.policy import Rule
from trio_nsq.http.guard import Guard
from trio_nsq.http.messages import Request, Response
from trio_nsq.http.parsing import Exchange, RequestReader
from trio_nsq.http.routing import Route, Router
from trio_nsq.http.web_pages import HostNames


async def handle(request: Request) -> Response:
    """A handler that is not called here."""
    raise AssertionError


ROUTER = Router(
    [
        Route("GET", "/open", handle, rule=Rule(open=True)),
        Route("GET", "/any", handle, rule=Rule()),
        Route("POST", "/pub", handle, rule=Rule("publish", "topic")),
        Route("POST", "/channel", handle, rule=Rule("manage", "channel")),
        Route("GET", "/all", handle, rule=Rule("admin")),
        Route("GET", "/no-rule", handle),
    ]
)


def guard() -> Guard:
    """A guard with two tokens."""
    file = AuthFile(None)  # type: ignore[arg-type]  # it is not written
    file.add_token("all", everything(*ALL_ROLES))
    file.add_token("mine", Given(["publish"], ["mine"]))
    access = Access(parse_auth_file("\n".join(file.entries.values())))
    return Guard(access, HostNames(), clock_s=lambda: 0.0)


TARGETS = st.sampled_from(
    [
        "/open",
        "/any",
        "/pub",
        "/pub?topic=mine",
        "/pub?topic=other",
        "/channel?topic=mine&channel=c",
        "/all",
        "/no-rule",
        "/pub?topic=mine;topic=other",
        "/pub?%74opic=mine",
        "/PUB?topic=mine",
        "//pub?topic=mine",
        "*",
        "/x",
        "/pub?topic=%",
    ]
)
VALUES = st.sampled_from(
    [
        b"localhost",
        b"evil.example",
        b"Bearer all-secret",
        b"Bearer mine-secret",
        b"Bearer x",
        b"Basic OmFsbC1zZWNyZXQ=",
        b"null",
        b"http://localhost",
        b"http://evil.example",
        b"cross-site",
        b"none",
        b"",
        b"h2c",
        b"upgrade",
        b"100-continue",
    ]
) | st.binary(max_size=12).map(lambda value: value.translate(None, b"\r\n\0"))
NAMES = st.sampled_from(
    [b"Host", b"host", b"Authorization", b"authorization", b"Origin", b"Referer", b"Sec-Fetch-Site"]
) | (st.sampled_from([b"Upgrade", b"Connection", b"Expect", b"Content-Length", b"Transfer-Encoding", b"X"]))


def may(exchange: Exchange) -> bool:
    """Whether the request of an exchange may be handled, by its own identity and query."""
    route, request = exchange.answer, exchange.request
    if not isinstance(route, Route):
        return True
    if route.rule is None or (request.identity is None and not route.rule.open):
        return False
    return route.rule.open or (
        request.identity is not None and route.rule.allows(request.identity, request.query)
    )


@settings(max_examples=examples(250))
@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"GET", b"POST", b"PUT", b"OPTIONS", b"HEAD"]),
            TARGETS,
            st.sampled_from([b"1.1", b"1.0"]),
            st.lists(st.tuples(NAMES, VALUES), max_size=5),
        ),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.integers(1, 40), max_size=20),
)
def test_no_request_is_let_in_without_its_role(
    requests: list[tuple[bytes, str, bytes, list[tuple[bytes, bytes]]]], cuts: list[int]
) -> None:
    data = b"".join(
        b"%b %b HTTP/%b\r\n%b\r\n"
        % (method, target.encode(), version, b"".join(b"%b: %b\r\n" % header for header in headers))
        for method, target, version, headers in requests
    )
    reader = RequestReader(ROUTER, "127.0.0.1:1", guard())
    for cut in [*cuts, len(data)]:
        piece, data = data[:cut], data[cut:]
        exchanges = reader.receive_data(piece) if piece else []
        for exchange in exchanges:
            assert may(exchange), exchange
            assert not exchange.undecided
            if not exchange.keep_alive:
                return


def test_the_fuzzed_requests_are_also_let_in() -> None:
    """Otherwise the test above would show nothing."""
    reader = RequestReader(ROUTER, "127.0.0.1:1", guard())
    head = b"POST /pub?topic=mine HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer mine-secret\r\n"
    head += b"Content-Length: 1\r\n\r\nx"
    (exchange,) = reader.receive_data(head)
    assert isinstance(exchange.answer, Route)
    assert exchange.request.body == b"x"
    assert exchange.request.identity is not None
    assert exchange.request.identity.name == "mine"
    (refused,) = reader.receive_data(head.replace(b"topic=mine", b"topic=other"))
    assert isinstance(refused.answer, Response)
    assert refused.answer.status == 403
