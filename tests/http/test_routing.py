"""Tests for the routes of methods and paths."""

import pytest

from trio_nsq.http.messages import Request, Response
from trio_nsq.http.routing import Route, Router


async def handler(request: Request) -> Response:
    return Response()


PING = Route("GET", "/ping", handler, plain=True)
PUB = Route("POST", "/pub", handler)
CREATE = Route("POST", "/topic/create", handler)
GET_CONFIG = Route("GET", "/config/{opt}", handler)
PUT_CONFIG = Route("PUT", "/config/{opt}", handler)
ROUTER = Router([PING, PUB, CREATE, GET_CONFIG, PUT_CONFIG])


@pytest.mark.parametrize(
    ("method", "path", "route"),
    [
        ("GET", "/ping", PING),
        ("POST", "/pub", PUB),
        ("POST", "/topic/create", CREATE),
        ("GET", "/config/log_level", GET_CONFIG),
        ("PUT", "/config/Log_Level", PUT_CONFIG),
    ],
)
def test_route_is_found(method: str, path: str, route: Route) -> None:
    assert ROUTER.resolve(method, path) is route


def test_literal_segment_takes_precedence_over_braces() -> None:
    literal = Route("GET", "/config/all", handler)
    router = Router([GET_CONFIG, literal])
    assert router.resolve("GET", "/config/all") is literal
    assert router.resolve("GET", "/config/other") is GET_CONFIG


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "//"),
        ("GET", "/nope"),
        ("HEAD", "/nope"),
        ("OPTIONS", "/nope"),
        ("GET", "/ping/x"),
        ("GET", "/topic"),
        ("GET", "/config"),
        ("GET", "/config/"),
        ("GET", "/config/a/b"),
        ("CONNECT", "host:80"),
        # nsqd redirects only methods that it has
        ("GET", "/PUB"),
        ("HEAD", "/PING"),
        ("OPTIONS", "/PING"),
        ("POST", "/PING/"),
    ],
)
def test_unknown_path_is_404(method: str, path: str) -> None:
    answer = ROUTER.resolve(method, path)
    assert isinstance(answer, Response)
    assert (answer.status, answer.body) == (404, b'{"message":"NOT_FOUND"}')


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/ping", "GET, OPTIONS"),
        ("HEAD", "/ping", "GET, OPTIONS"),
        ("TRACE", "/ping", "GET, OPTIONS"),
        ("GET", "/pub", "OPTIONS, POST"),
        ("POST", "/config/x", "GET, OPTIONS, PUT"),
        ("GET", "*", "GET, OPTIONS, POST, PUT"),
    ],
)
def test_wrong_method_is_405_with_allow(method: str, path: str, allow: str) -> None:
    answer = ROUTER.resolve(method, path)
    assert isinstance(answer, Response)
    assert (answer.status, answer.body) == (405, b'{"message":"METHOD_NOT_ALLOWED"}')
    assert answer.headers == {"Allow": allow}


@pytest.mark.parametrize(
    ("path", "allow"),
    [("/ping", "GET, OPTIONS"), ("/config/x", "GET, OPTIONS, PUT"), ("*", "GET, OPTIONS, POST, PUT")],
)
def test_options_is_200_with_allow(path: str, allow: str) -> None:
    answer = ROUTER.resolve("OPTIONS", path)
    assert answer == Response(200, b"", None, {"Allow": allow})


@pytest.mark.parametrize(
    ("method", "path", "query", "status", "location"),
    [
        ("GET", "/ping/", "", 301, "/ping"),
        ("GET", "//ping", "", 301, "/ping"),
        ("GET", "///ping//", "", 301, "/ping"),
        ("GET", "/./ping", "", 301, "/ping"),
        ("GET", "/PING", "a=b%20c", 301, "/ping?a=b%20c"),
        ("POST", "/Pub/", "topic=x", 307, "/pub?topic=x"),
        ("POST", "/topic//create", "topic=x", 307, "/topic/create?topic=x"),
        ("GET", "/CONFIG/Log_Level", "", 301, "/config/Log_Level"),
        ("GET", "/config//a", "", 301, "/config/a"),
        ("PUT", "/config/a/", "", 307, "/config/a"),
        ("GET", "/config/a\r\nEvil: b/", "", 301, "/config/a%0D%0AEvil%3A%20b"),
        ("GET", "//evil.example/ping/..", "", 404, None),
    ],
)
def test_slashes_and_letter_case_are_corrected(
    method: str, path: str, query: str, status: int, location: str | None
) -> None:
    answer = ROUTER.resolve(method, path, query)
    assert isinstance(answer, Response)
    assert (answer.status, answer.headers.get("Location")) == (status, location)


@pytest.mark.parametrize(
    "path", ["ping", "/ping/", "//ping", "/Ping", "/{a}/b", "/x{a}", "/a}", "/{a}{b}", "*", ""]
)
def test_path_in_another_form_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="not a path"):
        Router([Route("GET", path, handler)])


@pytest.mark.parametrize("path", ["/", "/{name}"])
def test_path_at_the_root(path: str) -> None:
    route = Route("GET", path, handler)
    assert Router([route]).resolve("GET", path.strip("{}").replace("{", "")) is route


def test_same_route_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="two routes for GET /ping"):
        Router([PING, Route("GET", "/ping", handler)])


def test_routes_that_differ_only_in_names_in_braces_are_refused() -> None:
    with pytest.raises(ValueError, match="two routes for GET /config/"):
        Router([GET_CONFIG, Route("GET", "/config/{name}", handler)])
