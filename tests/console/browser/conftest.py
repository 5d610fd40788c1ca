"""Fixtures of the tests in a real browser: one Chromium for all of them, and visitors for each."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser

from console.browser.support import Visitor, running_browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Headless Chromium, started once for each process of the test run."""
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
