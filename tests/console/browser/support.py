"""Visit a site in headless Chromium, as Playwright drives it, and report everything that its pages must not do.

- `running_browser` starts Chromium; one serves all tests of a process.
- `Visitor` is a visitor of one site: a browser context (cookies, colours, window size) with its pages. It collects
  `problems`: errors on the browser's console, uncaught exceptions, violations of the content security policy, requests
  to other origins, dialogs, and answers with status 500 or above.
- `Visitor.expects` lets a block cause the problems that it names, and fails if it does not.
- `accessibility_faults` checks a page with axe-core.
- `confirm` and `done` are the last two steps of an action of the console.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Dialog,
    Error,
    Page,
    Request,
    Response,
    expect,
    sync_playwright,
)

from interop.peers import headless_program

DEADLINE_MS = 30_000
"""Far above the time of any step: only what never happens reaches it."""

Scheme = Literal["light", "dark"]
DESKTOP = (1280, 900)
PHONE = (360, 740)

AXE_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
"""The rules of WCAG 2.2 A and AA, and those that axe-core recommends besides."""
_AXE = Axe().axe_script


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Run headless Chromium until the block exits."""
    program = headless_program()
    expect.set_options(timeout=DEADLINE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program,
            # The sandbox does not work for root, and /dev/shm is small in containers.
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
        )
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    """A visitor of one site. The caller must close it.

    Args:
        browser: The running browser.
        site: The site's origin, such as ``http://127.0.0.1:4171``.
        javascript: Whether scripts run.
        scheme: The colours that the visitor prefers.
        size: Width and height of the window.
        headers: Sent with each request.
    """

    def __init__(
        self,
        browser: Browser,
        site: str,
        *,
        javascript: bool = True,
        scheme: Scheme = "light",
        size: tuple[int, int] = DESKTOP,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.site = site
        self.problems: list[str] = []
        self._context = browser.new_context(
            java_script_enabled=javascript,
            color_scheme=scheme,
            viewport={"width": size[0], "height": size[1]},
            base_url=site,
            extra_http_headers=headers,
            permissions=["clipboard-read", "clipboard-write"],
        )
        self._context.set_default_timeout(DEADLINE_MS)
        self._context.on("page", self._watch)
        self._context.on("request", self._see_request)
        self._context.on("response", self._see_response)
        self.page = self._context.new_page()

    def open(self, path: str) -> Page:
        """Open a page of the site, and return it when it has loaded."""
        self.page.goto(path)
        return self.page

    def another_page(self) -> Page:
        """Open a second window of the same visitor."""
        return self._context.new_page()

    @contextmanager
    def expects(self, *patterns: str) -> Iterator[None]:
        """Let the block cause problems that match these regular expressions. It must cause each at least once."""
        before = len(self.problems)
        yield
        caused = self.problems[before:]
        missing = [each for each in patterns if not any(re.search(each, problem) for problem in caused)]
        assert not missing, f"the pages did not cause {missing}, but {caused}"
        self.problems[before:] = [
            problem for problem in caused if not any(re.search(each, problem) for each in patterns)
        ]

    def close(self) -> None:
        """Close all pages of this visitor."""
        self._context.close()

    def _watch(self, page: Page) -> None:
        page.on("console", self._see_console)
        page.on("pageerror", self._see_exception)
        page.on("dialog", self._see_dialog)

    def _see_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            where = message.location
            self.problems.append(f"{message.type}: {message.text} ({where['url']}:{where['lineNumber']})")

    def _see_exception(self, exception: Error) -> None:
        self.problems.append(f"uncaught: {exception}")

    def _see_dialog(self, dialog: Dialog) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _see_request(self, request: Request) -> None:
        url = urlsplit(request.url)
        if f"{url.scheme}://{url.netloc}" != self.site:
            self.problems.append(f"request to another origin: {request.url[:200]}")

    def _see_response(self, response: Response) -> None:
        if response.status >= 500:
            self.problems.append(f"status {response.status}: {response.url}")


def accessibility_faults(page: Page, rule: str = "") -> list[str]:
    """Return what axe-core finds on a page: the rule, its title, and the elements that violate it.

    Args:
        rule: Check this rule only.
    """
    rules = {"type": "rule", "values": [rule]} if rule else {"type": "tag", "values": AXE_TAGS}
    options: dict[str, Any] = {"runOnly": rules, "resultTypes": ["violations"]}
    if not page.evaluate("'axe' in window"):  # its 570 KB are read once for each document
        page.evaluate(_AXE)
    found = page.evaluate("async (options) => (await axe.run(options)).violations", options)
    return [
        f"{each['id']} ({each['help']}): {node['target']} {node['html'][:160]} {_messages(node)}"
        for each in found
        for node in each["nodes"][:5]
    ]


def _messages(node: dict[str, Any]) -> list[str]:
    return [each["message"] for kind in ("any", "all", "none") for each in node[kind]]


def overflow_px(page: Page) -> int:
    """Return how many pixels of a page are beyond the right edge of the window, so that it scrolls sideways."""
    width: int = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return width


def small_targets(page: Page) -> list[str]:
    """Return the visible buttons, fields and links that are less than 44 px high, for a thumb on a phone.

    A link within a text, and a box with a label, are as high as their line.
    """
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll("a, button, input, select, textarea, summary")].filter((each) => {
            const box = each.getBoundingClientRect();
            const inText = each.closest("p, dd, dt, .notice, .json, .empty, .hint, figure, .skip, caption")
                || each.matches("[type=checkbox], [type=radio]");
            return each.checkVisibility() && box.width && box.height < 43.5 && !inText;
        }).map((each) => `${each.getBoundingClientRect().height} ${each.outerHTML.slice(0, 120)}`)"""
    )
    return found


def cut_off(page: Page) -> list[str]:
    """Return the tables and the rows of tabs that are wider than their place, so that their end is out of sight."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll(".table-wrap, .tabs")]
            .filter((each) => each.checkVisibility() && each.scrollWidth > each.clientWidth + 1)
            .map((each) => `${each.scrollWidth - each.clientWidth} px of ${each.outerHTML.slice(0, 120)}`)"""
    )
    return found


def confirm(page: Page, button: str, name: str = "") -> None:
    """Check a page that asks for confirmation, type the name if it wants it, and confirm."""
    expect(page.locator("main")).to_contain_text("The same from the command line")
    expect(page.locator("main code", has_text="qcli ")).not_to_have_count(0)
    if name:
        page.get_by_label(f"Type {name} to confirm").fill(name)
    page.get_by_role("button", name=button, exact=True).click()


def done(page: Page) -> None:
    """Wait for the notice that an action succeeded on all servers."""
    expect(page.locator("#notice.ok")).to_be_visible()
