"""The page of clusters in a browser, with members that run: its look, and another member leads."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from console.browser.support import PHONE, Visitor, accessibility_faults, confirm, done, overflow_px
from coordination.conftest import etcd_member  # noqa: F401 - a fixture
from coordination.etcd_server import Member
from fleet.support import wait_until
from interop.peers import Broker, RunningConsole, qcli_admin, qcli_serve
from soak import in_soak

pytestmark = pytest.mark.interop

CLUSTER = "seen-in-a-browser"


def states(broker: Broker) -> list[str]:
    """Return the states of all members, sorted."""
    members: list[dict[str, Any]] = json.loads(broker.http("GET", "/cluster"))["members"]
    return sorted(each["state"] for each in members)


@pytest.fixture(scope="module")
def members(
    tmp_path_factory: pytest.TempPathFactory,
    etcd_member: Member,  # noqa: F811 - the fixture
) -> Iterator[list[Broker]]:
    """Two members of a cluster, one of which leads."""
    folder = tmp_path_factory.mktemp("members")
    flags = [f"--cluster={CLUSTER}", f"--coordinator=etcd://127.0.0.1:{etcd_member.port}"]
    with qcli_serve(folder / "one", *flags) as one, qcli_serve(folder / "two", *flags) as two:
        wait_until(lambda: states(one) == ["in sync", "leading"], "both are in sync")
        yield [one, two]


@pytest.fixture(scope="module")
def console(members: list[Broker]) -> Iterator[RunningConsole]:
    """A console that knows both members."""
    with qcli_admin(*(f"--nsqd-http-address={each.http_address}" for each in members)) as running:
        yield running


def test_page(console: RunningConsole, visit: Callable[..., Visitor]) -> None:
    """In both colours, and on a phone."""
    page = visit(console.origin).open("/")
    page.get_by_role("link", name="Cluster", exact=True).click()
    expect(page.locator("h1")).to_have_text("Cluster")
    expect(page.locator("main")).to_contain_text(CLUSTER)
    expect(page.get_by_role("row")).to_have_count(3)
    assert accessibility_faults(page) == []
    page.emulate_media(color_scheme="dark")
    assert accessibility_faults(page, rule="color-contrast") == []
    page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    assert overflow_px(page) == 0


@pytest.mark.parametrize("javascript", [True, *in_soak(False)])
def test_another_member_leads(
    console: RunningConsole, members: list[Broker], visit: Callable[..., Visitor], javascript: bool
) -> None:
    wait_until(lambda: states(members[0]) == ["in sync", "leading"], "both are in sync")
    visitor = visit(console.origin, javascript=javascript, size=PHONE)
    found = json.loads(members[0].http("GET", "/cluster"))["members"]
    (member,) = [each["id"] for each in found if each["state"] == "in sync"]
    page = visitor.page
    row = page.get_by_role("row").filter(has_text=member).filter(has_text="in sync")

    def is_shown() -> bool:
        """Open the page again, because without JavaScript it keeps what the console knew when it was opened."""
        visitor.open("/clusters")
        return row.count() == 1

    wait_until(is_shown, "the console knows who is in sync")
    row.get_by_role("link", name="Let this member lead").click()
    assert overflow_px(page) == 0
    confirm(page, "Let this member lead", member)
    done(page)
    expect(page.locator("#notice")).to_contain_text(f"{member} leads, with epoch")
    assert json.loads(members[0].http("GET", "/cluster"))["leader"] == member
