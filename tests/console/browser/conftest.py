"""Fixtures of the tests in a browser: a Chromium, a fleet and a console for each file, visitors for each test.

They end with the file: while Playwright runs, asyncio cannot, which other tests of the same process need.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser

from console.browser.lively_fleet import LivelyFleet, lively_fleet
from console.browser.support import Visitor, running_browser
from interop.peers import RunningConsole, qcli_admin


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    with running_browser() as running:
        yield running


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visitor]]:
    """Returns a new visitor: `visit(site, **settings)`, as `Visitor` takes them.

    The test fails at its end if a page of a visitor did something that pages must not do.
    """
    visitors: list[Visitor] = []

    def visit(site: str, **settings: Any) -> Visitor:
        visitors.append(Visitor(browser, site, **settings))
        return visitors[-1]

    yield visit
    for visitor in visitors:
        visitor.close()
    problems = [problem for visitor in visitors for problem in visitor.problems]
    assert not problems, "\n".join(problems)


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivelyFleet]:
    """Two brokers of ours, a real nsqd, `qcli lookupd` and a real nsqlookupd. No test ends or stops one of them."""
    with lively_fleet(tmp_path_factory.mktemp("lively")) as running:
        yield running


@pytest.fixture(scope="module")
def console(lively: LivelyFleet) -> Iterator[RunningConsole]:
    """A console that knows the discovery services. Every viewer may do everything."""
    with qcli_admin(
        *(f"--lookupd-http-address={each}" for each in lively.fleet.lookupd_addresses)
    ) as running:
        yield running
    assert not [line for line in running.log() if "ERROR" in line or "Traceback" in line]
