"""Take pictures of the web console, in two minutes: real pages of a fleet with consumers and dead letters."""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from playwright.sync_api import Page

from cli.support import Cli, fail_messages
from console.browser.support import Visitor, running_browser
from fleet.support import Fleet, running_fleet
from interop.peers import Broker, qcli_admin, qcli_serve

PICTURES = Path(__file__).parent / "pictures"
SIZE = (1280, 760)
LIVE_S = 90.0
"""The charts show the rates of this time."""
PATHS = ("/checkout", "/cart", "/search", "/login", "/products/17", "/products/4")


def make_pages(folder: Path) -> None:
    """Take all pictures into a folder."""
    with tempfile.TemporaryDirectory() as scratch, running_fleet(Path(scratch), ours=2) as fleet:
        _prepare(fleet)
        with (
            qcli_admin(*(f"--lookupd-http-address={each}" for each in fleet.lookupd_addresses)) as console,
            _traffic(fleet),
            running_browser() as browser,
        ):
            visitor = Visitor(browser, console.origin, size=SIZE)
            visitor.open("/")
            time.sleep(LIVE_S)
            _take(visitor, folder, "topics", "/")
            _take(visitor, folder, "topic", "/topics/clicks")
            _take(visitor, folder, "channel", "/topics/clicks/archive")
            _take(visitor, folder, "nodes", "/nodes")
            _take(visitor, folder, "messages", "/topics/clicks/messages?q=checkout")
            _take(visitor, folder, "dead-letters", "/dead-letters/payments.dead")
            visitor.open("/topics/clicks/archive/seek")
            visitor.page.get_by_label("Duration").fill("1m")
            visitor.page.get_by_role("button", name="Show what would happen").click()
            _save(visitor.page, folder, "seek")
            visitor.close()
            if visitor.problems:
                raise RuntimeError("\n".join(visitor.problems))


def make_cluster_page(folder: Path) -> None:
    """Take the picture of a cluster with a leader and two followers, one of which has ended."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:

        def start(name: str, coordinator: str) -> Broker:
            flags = ["--cluster=prod", f"--coordinator={coordinator}"]
            return stack.enter_context(qcli_serve(Path(scratch) / name, *flags))

        leader = start("a", "static:")
        leader.post("/cluster/promote", b"")
        peers = f"static:{leader.http_address}"
        start("b", peers)
        with qcli_serve(Path(scratch) / "c", "--cluster=prod", f"--coordinator={peers}"):
            _await_states(leader, ["in sync", "in sync", "leading"])
        _await_states(leader, ["disconnected", "in sync", "leading"])
        with (
            qcli_admin(f"--nsqd-http-address={leader.http_address}") as console,
            running_browser() as browser,
        ):
            visitor = Visitor(browser, console.origin, size=SIZE)
            _take(visitor, folder, "cluster", "/clusters")
            visitor.close()


def _await_states(leader: Broker, states: list[str]) -> None:
    while sorted(each["state"] for each in json.loads(leader.http("GET", "/cluster"))["members"]) != states:
        time.sleep(0.1)


def _take(visitor: Visitor, folder: Path, name: str, path: str) -> None:
    _save(visitor.open(path), folder, name)


def _save(page: Page, folder: Path, name: str) -> None:
    page.locator("h1").wait_for()
    if page.locator("#live-state").count():
        page.get_by_text("Live", exact=True).wait_for()
    page.screenshot(path=folder / f"console-{name}.png", animations="disabled")


def _click(number: int) -> bytes:
    path = PATHS[number * number % len(PATHS)]
    return json.dumps({"user": f"u{number % 97}", "path": path, "ms": 3 + number * 7 % 40}).encode()


def _prepare(fleet: Fleet) -> None:
    """Topics with a backlog, dead letters and deferred messages."""
    fleet.create("clicks", "archive", "mail", "metrics")
    fleet.create("orders", "billing", "shipping")
    fleet.create("payments", "charge")
    fleet.create("signups", "crm")
    for broker in fleet.brokers:
        cli = Cli("", broker.http_address)
        cli.publish("clicks", [_click(number) for number in range(3000)])
        cli.publish("orders", [b'{"order": %d, "total": %d.50}' % (each, each % 80) for each in range(400)])
        for minutes in range(5, 60, 5):
            broker.post("/pub", b'{"remind": "order"}', topic="orders", defer=minutes * 60_000)
    for broker, count in zip(fleet.ours, (9, 4), strict=True):
        broker.put(
            "/channel/settings",
            b'{"max_attempts": 2, "dead_letter_topic": "payments.dead"}',
            topic="payments",
            channel="charge",
        )
        for each in range(count):
            broker.post("/pub", b'{"payment": %d, "card": "declined"}' % each, topic="payments")
        fail_messages(broker.tcp_address, "payments", "charge", 2 * count)


@contextmanager
def _traffic(fleet: Fleet) -> Iterator[None]:
    """Publish and consume until the block exits."""
    over = threading.Event()

    def publish(broker: Broker, weight: int) -> None:
        cli, number = Cli("", broker.http_address), 0
        while not over.wait(0.25):
            wave = 1 + (number // 24 + weight) % 5
            cli.publish("clicks", [_click(number + each) for each in range(20 * wave * weight)])
            cli.publish("signups", [b'{"signup": %d}' % number] * wave)
            number += 1

    def consume(channel: str) -> None:
        addresses = ",".join(broker.tcp_address for broker in fleet.brokers)
        with Cli(addresses, "").running("tail", channel, stdout=subprocess.DEVNULL):
            over.wait()

    threads = [
        threading.Thread(target=publish, args=each) for each in zip(fleet.brokers, (3, 2, 1), strict=True)
    ]
    threads += [
        threading.Thread(target=consume, args=(each,))
        for each in ("clicks/archive", "clicks/metrics", "signups/crm", "orders/shipping")
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=PICTURES, help="where they go")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    make_pages(folder)
    make_cluster_page(folder)


if __name__ == "__main__":
    main()
