"""Charts by Graphite: the same questions as nsqadmin, and what pages may show of it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from cli.support import Cli, run_in_process
from console.support import ask, qcli_admin
from interop.peers import Broker, nsqadmin, qcli_serve
from trio_nsq.console.graphite import Graphite
from trio_nsq.console.options import ConsoleOptions

RATES = {
    "five": '[{"target": "x", "datapoints": [[300.0, 1700000000], [7, 1700000060]]}]',
    "nothing": '[{"target": "x", "datapoints": [[0, 1700000000]]}]',
    "negative": '[{"target": "x", "datapoints": [[-1, 1700000000]]}]',
    "null": '[{"target": "x", "datapoints": [[null, 1700000000]]}]',
    "empty": "[]",
    "text": "no JSON",
}


@dataclass
class Stub:
    """A server in place of Graphite, which answers by the target."""

    url: str = ""
    paths: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    found = Stub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.paths.append(self.path)
            target = parse_qs(urlsplit(self.path).query).get("target", [""])[0]
            kind, body = {"page": ("text/html", "<script>"), "fail": ("text/plain", "no")}.get(
                target, ("application/json", RATES[target]) if target in RATES else ("image/png", "PNG")
            )
            self.send_response(500 if target == "fail" else 200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with qcli_serve(tmp_path_factory.mktemp("broker") / "data") as running:
        running.create("clicks", "archive")
        yield running


@contextmanager
def console(folder: Path, broker: Broker, *flags: str) -> Iterator[str]:
    """Run a console of the broker; yields its address."""
    with qcli_admin(folder, f"--nsqd-http-address={broker.http_address}", *flags) as site:
        yield site.address


@pytest.mark.interop
def test_rates_as_nsqadmin(tmp_path: Path, broker: Broker, stub: Stub) -> None:
    flags = [f"--graphite-url={stub.url}", "--statsd-interval=60s"]
    with (
        nsqadmin([], f"--nsqd-http-address={broker.http_address}", *flags) as theirs,
        console(tmp_path, broker, *flags) as ours,
    ):
        for target in ("five", "nothing", "negative"):
            stub.paths.clear()
            path = f"/api/graphite?metric=rate&target={target}"
            answers = [ask(address, "GET", path) for address in (theirs, ours)]
            assert answers[0].json() == answers[1].json(), target
            their_url, our_url = map(urlsplit, stub.paths)
            assert (their_url.path, parse_qs(their_url.query)) == (our_url.path, parse_qs(our_url.query))
        for target in ("null", "empty"):
            path = f"/api/graphite?metric=rate&target={target}"
            assert ask(ours, "GET", path).json() == {"rate": "N/A"}
            assert ask(theirs, "GET", path).status == 500
        for target in ("text", "fail"):
            answer = ask(ours, "GET", f"/api/graphite?metric=rate&target={target}")
            assert (answer.status, answer.json()["message"].partition(":")[0]) == (502, "UPSTREAM_ERROR")


def test_pages_show_the_charts(tmp_path: Path, broker: Broker, stub: Stub) -> None:
    with console(tmp_path, broker, f"--graphite-url={stub.url}/") as address:
        for path, count in (("/topics/clicks", 2), ("/topics/clicks/archive", 7), ("/counter", 1)):
            answer = ask(address, "GET", path)
            assert answer.body.count(f'<img src="{stub.url}/render?'.encode()) == count, path
            assert f"img-src 'self' {stub.url};" in answer.headers["content-security-policy"]
        page = ask(address, "GET", f"/nodes/{broker.http_address}").body.decode()
        assert page.count("<img") == 4
        assert f"nsq.{broker.http_address.replace('.', '_').replace(':', '_')}.mem.heap_objects" in page
        assert ask(address, "GET", "/render?target=x").status == 404


def test_without_graphite_pages_load_no_pictures(tmp_path: Path, broker: Broker) -> None:
    with console(tmp_path, broker) as address:
        answer = ask(address, "GET", "/topics/clicks")
        assert b"<img" not in answer.body
        assert "img-src 'self';" in answer.headers["content-security-policy"]


def test_pictures_through_the_console(tmp_path: Path, broker: Broker, stub: Stub) -> None:
    flags = [f"--graphite-url={stub.url}", "--proxy-graphite", "--base-path=/nsq"]
    with console(tmp_path, broker, *flags) as address:
        answer = ask(address, "GET", "/nsq/topics/clicks")
        assert b'<img src="/nsq/render?' in answer.body
        assert stub.url.encode() not in answer.body
        assert "img-src 'self';" in answer.headers["content-security-policy"]
        stub.paths.clear()
        answer = ask(address, "GET", "/nsq/render?target=a%26b&width=3")
        assert (answer.status, answer.body, answer.headers["content-type"]) == (200, b"PNG", "image/png")
        assert stub.paths == ["/render?target=a%26b&width=3"]
        assert "sandbox" in answer.headers["content-security-policy"]
        answer = ask(address, "GET", "/nsq/render?target=page")
        assert (answer.status, b"script" in answer.body) == (502, False)
        assert ask(address, "GET", "/nsq/render?target=fail").status == 502


def graphite(**options: object) -> Graphite:
    return Graphite(ConsoleOptions(graphite_url="http://name:secret@graphite:8080/", **options))  # type: ignore[arg-type]


def test_names_of_figures() -> None:
    (figure,) = parse_qs(urlsplit(graphite().topic("a b/c#ephemeral")[1].small).query)["target"]
    assert "sumSeries(stats.counters.nsq.*.topic.a_b-cephemeral.message_count.count)" in figure
    odd = graphite(statsd_prefix="my.%s.", statsd_gauge_format="", statsd_counter_format="%s")
    (depth, _) = odd.topic("t", "10.0.0.1:4151")
    assert parse_qs(urlsplit(depth.small).query)["target"] == [
        'summarize(sumSeries(my.10_0_0_1_4151.topic.t.depth),"60sec","avg")'
    ]


def test_charts_of_counters_show_rates() -> None:
    chart = graphite(statsd_interval_ms=10_000).counter()[0]
    figure = "sumSeries(stats.counters.nsq.*.topic.*.channel.*.message_count.count)"
    assert parse_qs(urlsplit(chart.large).query)["target"] == [
        f'summarize(scale({figure},0.1),"10sec","avg")'
    ]


def test_secrets_of_the_url_stay_in_the_console() -> None:
    assert graphite().origin == "http://graphite:8080"
    for chart in [*graphite().channel("t", "c"), *graphite().node("n:1")]:
        assert "secret" not in chart.small + chart.large
    assert graphite().rate_url("x").startswith("http://name:secret@graphite:8080/render?")


@pytest.mark.parametrize(
    "url", ["graphite:8080", "ftp://graphite", "http://", "http://a b", "http://a;x", "javascript:1"]
)
def test_a_wrong_url_is_refused(url: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    result = run_in_process(capfdbinary, Cli("", ""), "admin", "--graphite-url", url, "--check-config")
    assert result.code == 2
    assert "is not a URL" in result.err
