"""Repeat public bug reports of NSQ's family with nsqd and with this broker: the outcomes are those that the page shows.

Rows of docs/reference/bug-reports.md that name no script here name the test that shows them.
"""

import json
import os
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from interop.peers import Broker, nsqd, nsqlookupd, qcli_lookupd, qcli_serve
from recipes.support import wait_until
from trio_nsq.sync import Consumer, Producer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "bug-reports.md"
_ROW = re.compile(r"^\| (\[.+\) ?) \| (.+) \| (.+) \| (.+) \| `([\w/.:-]+)` \|$", re.MULTILINE)
"""Reports, what was reported, outcomes of nsqd or the client and of this project, the script or test."""


class Node:
    """A broker of one kind that can be started again with its data.

    Attributes:
        broker: The running process.
    """

    def __init__(self, kind: str, folder: Path, *flags: str) -> None:
        self._run = {"nsqd": nsqd, "here": qcli_serve}[kind]
        self._folder = folder
        self._flags = flags
        self._stack = ExitStack()
        self.broker: Broker
        self.start()

    def start(self) -> None:
        self.broker = self._stack.enter_context(self._run(self._folder, *self._flags))

    def stop(self) -> None:
        self.broker.process.terminate()
        self.broker.process.wait()
        self._stack.close()

    def kill(self) -> None:
        self.broker.process.kill()
        self.broker.process.wait()
        self._stack.close()

    def close(self) -> None:
        self._stack.close()

    def request(self, method: str, path: str, content: bytes = b"", **params: str | int) -> httpx.Response:
        url = f"http://{self.broker.http_address}{path}"
        return httpx.request(method, url, params=params, content=content, timeout=60)

    def publish(self, topic: str, *bodies: bytes) -> None:
        with Producer(self.broker.tcp_address) as producer:
            producer.publish_many(topic, bodies)

    def consumer(self, **options: Any) -> Consumer:
        return Consumer("t", "c", nsqd_tcp_addresses=self.broker.tcp_address, **options)

    def channel(self) -> dict[str, Any]:
        return self.broker.channel_stats("t", "c")

    def channels(self, topic: str) -> list[str]:
        topics = json.loads(self.broker.http("GET", "/stats", format="json", topic=topic))["topics"]
        return [channel["channel_name"] for found in topics or () for channel in found["channels"] or ()]

    def has_in_channel(self, count: int) -> bool:
        """Whether so many messages wait: nsqd moves them to channels after it has accepted them."""
        found = self.channel()
        return bool(sum(found[name] for name in ("depth", "in_flight_count", "deferred_count")) >= count)


class Family:
    """Makes nodes and discovery services of one kind, which end with the test."""

    def __init__(self, kind: str, folder: Path, stack: ExitStack) -> None:
        self._kind = kind
        self._folder = folder
        self._stack = stack
        self._count = 0

    def node(self, *flags: str) -> Node:
        self._count += 1
        node = Node(self._kind, self._folder / f"data{self._count}", *flags)
        self._stack.callback(node.close)
        return node

    def lookupd(self) -> Broker:
        return self._stack.enter_context({"nsqd": nsqlookupd, "here": qcli_lookupd}[self._kind]())


def lookup_of(lookupd: Broker, topic: str) -> list[Any]:
    """Return the brokers that a discovery service has for a topic."""
    answer = httpx.get(f"http://{lookupd.http_address}/lookup", params={"topic": topic}, timeout=60)
    found: list[Any] = answer.json().get("producers", [])
    return found


SCRIPTS: dict[str, Callable[[Family], str]] = {}


def script(run: Callable[[Family], str]) -> Callable[[Family], str]:
    SCRIPTS[run.__name__.replace("_", "-")] = run
    return run


@script
def killed(family: Family) -> str:
    node = family.node()
    node.broker.create("t", "c")
    node.publish("t", *[b"%d" % number for number in range(100)])
    with node.consumer(max_in_flight=10) as consumer:
        consumer.get(timeout_s=30)
        node.kill()
    node.start()
    return f"{node.channel()['depth']} of 100 left"


@script
def deferred_restart(family: Family) -> str:
    node = family.node()
    node.broker.create("t", "c")
    node.request("POST", "/pub", b"later", topic="t", defer=3_000_000).raise_for_status()
    wait_until(lambda: node.has_in_channel(1))
    node.stop()
    node.start()
    return "still deferred" if node.channel()["deferred_count"] else "delivered at once"


@script
def deferred_for_hours(family: Family) -> str:
    answer = family.node().request("POST", "/pub", b"later", topic="t", defer=2 * 3_600_000)
    return f"status {answer.status_code}"


@script
def deferred_list(family: Family) -> str:
    node = family.node()
    node.broker.create("t", "c")
    node.request("POST", "/pub", b"later", topic="t", defer=3_000_000).raise_for_status()
    answer = node.request("GET", "/channel/deferred", topic="t", channel="c")
    return "later" if b"later" in answer.content else f"status {answer.status_code}"


@script
def deferred_counts_as_requeued(family: Family) -> str:
    node = family.node()
    node.broker.create("t", "c")
    node.request("POST", "/pub", b"later", topic="t", defer=10).raise_for_status()
    wait_until(lambda: node.channel()["depth"] == 1)
    found = node.channel()
    return f"{found['message_count']} messages, {found['requeue_count']} requeued"


@script
def requeue_without_attempt(family: Family) -> str:
    node = family.node()
    node.broker.create("t", "c")
    node.publish("t", b"1")
    with node.consumer() as consumer:
        first = consumer.get(timeout_s=30)
        assert first is not None
        first.requeue(delay_s=0, backoff=False, count_attempt=False)
        again = consumer.get(timeout_s=30)
        assert again is not None
        return f"attempt {again.attempts}"


@script
def attempts_limited(family: Family) -> str:
    node = family.node()
    node.broker.create("t", "c")
    settings = json.dumps({"max_attempts": 2, "dead_letter_topic": "dead"}).encode()
    answer = node.request("PUT", "/channel/settings", settings, topic="t", channel="c")
    if answer.status_code != 200:
        return f"status {answer.status_code}"
    node.publish("t", b"1")
    with node.consumer() as consumer:
        for _ in range(2):
            message = consumer.get(timeout_s=30)
            assert message is not None
            message.requeue(delay_s=0, backoff=False)
    wait_until(lambda: bool(node.request("GET", "/topic/read", topic="dead").content))
    return "in the dead-letter topic"


@script
def garbage_in_mpub(family: Family) -> str:
    node = family.node()
    answer = node.request("POST", "/mpub", b"<message>\\n<message>\\n<message>", topic="t", binary="true")
    return f"status {answer.status_code}; {node.request('GET', '/ping').text} afterwards"


@script
def place_of_binary(family: Family) -> str:
    node = family.node()
    body = struct.pack(">I", 3) + b"".join(struct.pack(">I", 1) + each for each in (b"A", b"B", b"C"))
    for topic, query in (("t1", "topic=t1&binary=true"), ("t2", "binary=true&topic=t2")):
        node.broker.create(topic, "c")
        url = f"http://{node.broker.http_address}/mpub?{query}"
        httpx.post(url, content=body, timeout=60).raise_for_status()
        wait_until(lambda: node.broker.channel_stats(topic, "c")["depth"] > 0)  # noqa: B023  # called here
    wait_until(lambda: node.broker.channel_stats("t2", "c")["depth"] in (1, 3))
    return " and ".join(f"{node.broker.channel_stats(topic, 'c')['depth']}" for topic in ("t1", "t2"))


@script
def revived_channel(family: Family) -> str:
    lookupd = family.lookupd()
    node = family.node(f"--lookupd-tcp-address={lookupd.tcp_address}")

    def registered() -> list[str]:
        found: list[str] = json.loads(lookupd.http("GET", "/channels", topic="t"))["channels"]
        return found

    node.broker.create("t", "c")
    wait_until(lambda: registered() == ["c"])
    node.broker.http("POST", "/channel/delete", topic="t", channel="c")
    node.broker.http("POST", "/topic/delete", topic="t")
    wait_until(lambda: not lookup_of(lookupd, "t"))
    node.publish("t", b"1")  # creates the topic, and waits for the channels that the service knows
    return f"channels: {' '.join(node.channels('t')) or 'none'}"


@script
def deleted_in_discovery_only(family: Family) -> str:
    lookupd = family.lookupd()
    node = family.node(f"--lookupd-tcp-address={lookupd.tcp_address}")

    def listed() -> list[str]:
        found: list[str] = json.loads(lookupd.http("GET", "/topics"))["topics"]
        return found

    node.publish("t", b"1")
    wait_until(lambda: "t" in listed())
    lookupd.http("POST", "/topic/delete", topic="t")
    node.publish("t", b"2")
    node.publish("other", b"3")
    wait_until(lambda: "other" in listed())
    return "listed again" if "t" in listed() else "not listed"


@script
def pause_of_new_node(family: Family) -> str:
    lookupd = family.lookupd()
    flag = f"--lookupd-tcp-address={lookupd.tcp_address}"
    first, second = family.node(flag), family.node(flag)
    first.broker.create("t", "c")
    first.broker.http("POST", "/channel/pause", topic="t", channel="c")
    wait_until(lambda: b'"c"' in lookupd.http("GET", "/channels", topic="t"))
    second.publish("t", b"1")
    wait_until(lambda: second.channels("t") == ["c"])
    return "paused" if second.channel()["paused"] else "not paused"


@script
def empty_topic(family: Family) -> str:
    node = family.node()
    node.broker.create("t", "c")
    node.publish("t", b"1", b"2", b"3")
    wait_until(lambda: node.channel()["depth"] == 3)
    node.broker.http("POST", "/topic/empty", topic="t")
    return f"{node.channel()['depth']} of 3 left"


@script
def paused_restart(family: Family) -> str:
    node = family.node()
    node.broker.create("t", "c")
    node.broker.http("POST", "/channel/pause", topic="t", channel="c")
    node.kill()
    node.start()
    return "paused" if node.channel()["paused"] else "not paused"


@script
def small_snappy(family: Family) -> str:
    node = family.node()
    node.broker.create("t", "c")
    with Producer(node.broker.tcp_address, snappy=True) as producer, node.consumer(snappy=True) as consumer:
        producer.publish("t", b"1")
        message = consumer.get(timeout_s=30)
        assert message is not None
        message.finish()
        return message.body.decode()


@script
def delete_with_consumer(family: Family) -> str:
    node = family.node()
    with node.consumer(reconnect_min_s=0.05):
        wait_until(lambda: node.channels("t") == ["c"])
        node.broker.http("POST", "/topic/delete", topic="t")
        wait_until(lambda: node.channels("t") == ["c"])
    return "the consumer creates it again"


@script
def requeued_first(family: Family) -> str:
    node = family.node()
    node.broker.create("t", "c")
    node.publish("t", *[b"%d" % number for number in range(5)])
    wait_until(lambda: node.has_in_channel(5))
    with node.consumer() as consumer:
        first = consumer.get(timeout_s=30)
        assert first is not None
        first.requeue(delay_s=0, backoff=False)
        bodies = [first.body]
        while len(bodies) < 6:
            message = consumer.get(timeout_s=30)
            assert message is not None
            bodies.append(message.body)
            message.finish()
    return b" ".join(bodies).decode()


def bodies_of(consumer: Consumer, count: int) -> set[bytes]:
    """Return bodies of a consumer until there are so many, or none comes for longer than nsqd needs.

    nsqd looks for due messages of a new channel after up to 5 seconds.
    """
    found: set[bytes] = set()
    while len(found) < count and (message := consumer.get(timeout_s=10)):
        found.add(message.body)
        message.finish()
    return found


@script
def ephemeral_without_memory(family: Family) -> str:
    node = family.node("--mem-queue-size=0")
    address = node.broker.tcp_address
    with Consumer("t", "c#ephemeral", nsqd_tcp_addresses=address) as consumer:
        node.publish("t", *[b"%d" % number for number in range(100)])
        return "all delivered" if len(bodies_of(consumer, 100)) == 100 else "some lost"


@script
def ephemeral_requeues(family: Family) -> str:
    node = family.node()
    address = node.broker.tcp_address
    with Consumer("t", "c#ephemeral", nsqd_tcp_addresses=address, max_in_flight=10) as consumer:
        node.publish("t", b"1")
        first = consumer.get(timeout_s=30)
        assert first is not None
        first.requeue(delay_s=0.01, backoff=False)
        node.publish("t", b"2")
        return f"{len(bodies_of(consumer, 2))} of 2 delivered"


@script
def deferred_without_memory(family: Family) -> str:
    node = family.node("--mem-queue-size=0")
    node.broker.create("t", "c")
    node.request("POST", "/pub", b"later", topic="t", defer=3_000_000).raise_for_status()
    wait_until(lambda: node.has_in_channel(1))
    return "deferred" if node.channel()["deferred_count"] else "delivered at once"


@script
def late_ephemeral_channel(family: Family) -> str:
    node = family.node()
    node.publish("t", b"1")
    with Consumer("t", "c#ephemeral", nsqd_tcp_addresses=node.broker.tcp_address) as consumer:
        return f"{len(bodies_of(consumer, 1))} of 1 delivered"


@contextmanager
def family_of(kind: str, folder: Path) -> Iterator[Family]:
    folder.mkdir()
    with ExitStack() as stack:
        yield Family(kind, folder, stack)


def rows() -> dict[str, tuple[str, str]]:
    """Return the outcomes of nsqd and of this project, by script or test."""
    return {row[5]: (row[3], row[4]) for row in _ROW.finditer(PAGE.read_text())}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_outcomes_are_those_of_the_page(name: str, tmp_path: Path) -> None:
    outcomes = []
    for kind in ("nsqd", "here"):
        with family_of(kind, tmp_path / kind) as family:
            outcomes.append(SCRIPTS[name](family))
    if os.environ.get("SHOW_OUTCOMES"):
        print(name, outcomes)
    found = rows()[name]
    assert found[0].startswith(outcomes[0])
    assert found[1].startswith(outcomes[1])


def test_each_row_names_a_script_or_a_test() -> None:
    text = PAGE.read_text()
    shown = rows()
    assert len(_ROW.findall(text)) == text.count("\n| [")
    assert set(SCRIPTS) <= set(shown)
    for name in set(shown) - set(SCRIPTS):
        path, _, function = name.partition("::")
        source = (ROOT / path).read_text()
        assert f"def {function}(" in source if function else source, name
