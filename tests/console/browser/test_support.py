"""The harness itself: it reports what pages must not do."""

import http.server
import threading
from collections.abc import Callable, Iterator

import pytest
import trio
from playwright.sync_api import Browser, expect

from console.browser.support import PHONE, Visitor, accessibility_faults, overflow_px

pytestmark = pytest.mark.interop

POLICY = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src *"
PAGES = {
    "/good": "<h1>Fine</h1><p>Nothing happens.</p>",
    "/inline": "<h1>Inline</h1><script>document.title = 'ran'</script>",
    "/style": "<h1>Style</h1><p style='color: red'>Red</p>",
    "/throws": "<h1>Throws</h1><script src=/throw.js></script>",
    "/throw.js": "throw new Error('on purpose')",
    "/asks": "<h1>Asks</h1><script src=/ask.js></script>",
    "/ask.js": "alert('Sure?')",
    "/calls": "<h1>Calls</h1><script src=/call.js></script>",
    "/call.js": "fetch('http://localhost:1/', {mode: 'no-cors'}).catch(() => 0)",
    "/missing-image": "<h1>Image</h1><img src=/nothing.png alt=x>",
    "/pale": "<h1>Pale</h1><p class=pale>Hard to read</p><link rel=stylesheet href=/pale.css>",
    "/pale.css": ".pale { color: #ccc; background: #fff }",
    "/wide": "<h1>Wide</h1><pre>" + "x" * 2000 + "</pre>",
}
TYPES = {"js": "text/javascript", "css": "text/css"}


class _Pages(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        found = PAGES.get(self.path)
        kind = TYPES.get(self.path.rpartition(".")[2])
        body = found or "nothing"
        if found and not kind:
            body = f"<!doctype html><html lang=en><title>{self.path}</title><main>{found}</main>"
        data = body.encode()
        self.send_response(200 if found else 500 if self.path == "/broken" else 404)
        self.send_header("Content-Type", f"{kind or 'text/html'}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        self.wfile.write(data)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The origin of a site with good and bad pages."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Pages) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def visitor(browser: Browser, site: str) -> Iterator[Visitor]:
    """A visitor whose problems do not fail the test."""
    visitor = Visitor(browser, site)
    yield visitor
    visitor.close()


def test_good_page_has_no_problems(visitor: Visitor) -> None:
    page = visitor.open("/good")
    expect(page.locator("h1")).to_have_text("Fine")
    assert accessibility_faults(page) == []
    assert overflow_px(page) == 0
    assert visitor.problems == []


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/inline", "Content Security Policy"),
        ("/style", "Content Security Policy"),
        ("/throws", "uncaught: on purpose"),
        ("/asks", "dialog: Sure?"),
        ("/calls", "request to another origin: http://localhost:1/"),
        ("/missing-image", "error: "),
        ("/broken", "status 500: "),
        ("/missing", "404"),
    ],
)
def test_bad_page_has_a_problem(visitor: Visitor, path: str, problem: str) -> None:
    page = visitor.open(path)
    page.wait_for_load_state("networkidle")
    assert problem in "\n".join(visitor.problems)


def test_policy_is_watched_without_scripts(browser: Browser, site: str) -> None:
    visitor = Visitor(browser, site, javascript=False)
    visitor.open("/style").wait_for_load_state("networkidle")
    visitor.close()
    assert "Content Security Policy" in "\n".join(visitor.problems)


def test_expected_problems(visitor: Visitor) -> None:
    with visitor.expects("404"):
        visitor.open("/missing")
    assert visitor.problems == []
    with pytest.raises(AssertionError, match="did not cause"), visitor.expects("404"):
        visitor.open("/good")


def test_page_that_is_hard_to_read(visitor: Visitor) -> None:
    (fault,) = accessibility_faults(visitor.open("/pale"))
    assert fault.startswith("color-contrast")


def test_page_that_scrolls_sideways(visit: Callable[..., Visitor], site: str) -> None:
    visitor = visit(site, size=PHONE)
    assert overflow_px(visitor.open("/good")) == 0
    assert overflow_px(visitor.open("/wide")) > 1000


async def test_trio_runs_beside_the_browser(visitor: Visitor) -> None:
    """Playwright's loop exists in this thread; tests of other files still run theirs."""
    await trio.sleep(0)
