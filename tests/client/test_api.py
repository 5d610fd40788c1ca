"""Every request of `trio_nsq.api` to a running broker: each field that clients read is in one of its answers.

A field that the broker renames, or a path that it changes, fails here.
"""

import json
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, is_typeddict

import pytest

from cli.support import fail_messages
from interop.peers import Broker, qcli_serve
from trio_nsq.api import answers
from trio_nsq.api import broker as api
from trio_nsq.api.fields import fields_of
from trio_nsq.api.request import Request, following, run
from trio_nsq.client.errors import NotABroker
from trio_nsq.client.http.broker_http import BrokerHTTP
from trio_nsq.console.actions.dead_letters import rules_of
from trio_nsq.console.fleet.clients import parse_clients
from trio_nsq.console.fleet.jobs import parse_jobs
from trio_nsq.fleet import dead_letters
from trio_nsq.fleet.stats import parse_topics

ELSEWHERE = {
    ("Info", "processes"): "of a node of several processes",
    ("Stats", "archive"): "of a broker with an archive",
    ("Stats", "cluster"): "of a member of a cluster",
    ("TopicDefinition", "unavailable"): "only while its files cannot be used",
    ("TopicStats", "first_sequence"): "of topics that keep messages",
    ("TopicStats", "disk_first_sequence"): "of topics with messages that only the archive has",
    ("TopicStats", "archived_bytes"): "of topics with messages that only the archive has",
    ("TopicStats", "unavailable"): "only while its files cannot be used",
    ("ChannelStats", "unavailable"): "topics only",
    ("ChannelStats", "message_bytes"): "topics only",
    ("TopicStats", "in_flight_count"): "channels only",
    ("TopicStats", "requeue_count"): "channels only",
    ("TopicStats", "timeout_count"): "channels only",
    ("TopicStats", "client_count"): "channels only",
    ("TopicStats", "oldest_message_age_ms"): "channels only",
    ("TopicStats", "dead_letter_count"): "channels only",
    ("TopicStats", "given_up_count"): "channels only",
    ("ClientStats", "authed"): "with authentication",
    ("ClientStats", "auth_identity"): "with authentication",
    ("Message", "body_base64"): "if the body is not UTF-8",
    ("Message", "channel"): "of a channel",
    ("Message", "headers"): "of messages with headers",
    ("DeadLetter", "headers"): "of messages with headers",
    ("ChannelMessage", "headers"): "of messages with headers",
    ("DeadLetter", "channel"): "of a channel",
    ("DeadLetter", "body_base64"): "if the body is not UTF-8",
}
"""Declared fields that these answers do not have, and why; by answer and field."""

REPORT = {
    **dict.fromkeys(("kind", "topic", "channel", "name", "host", "unit", "message"), "t"),
    "pid": 1,
    "started_at": 1,
    "done": 1,
    "state": "running",
}
Found = dict[str, set[str]]


def note(value: Any, kind: Any, found: Found) -> None:
    """Note the fields of an answer, by the names of the types that declare them."""
    if value is None or not is_typeddict(kind):
        return
    found.setdefault(kind.__name__, set()).update(value)
    for field in fields_of(kind):
        if field.inner is not None and field.name in value:
            inside = value[field.name]
            for each in inside if isinstance(inside, list) else [inside]:
                note(each, field.inner, found)


@contextmanager
def connected(broker: Broker, commands: bytes) -> Iterator[None]:
    """Keep a TCP client connected that has sent these commands."""
    host, _, port = broker.tcp_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(b"  V2" + commands)
        assert sock.recv(1000)
        yield


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker whose topic t has all that clients ask for."""
    with qcli_serve(tmp_path_factory.mktemp("api") / "data") as running:
        http = BrokerHTTP(running.http_address)
        for channel in ("a", "b"):
            running.create("t", channel)
        http.ask(
            api.settings(
                "t",
                None,
                {"ttl_ms": 3_600_000, "max_messages": 100, "when_full": "drop-oldest", "table": "delta:/t"},
            )
        )
        http.ask(
            api.settings("t", "a", {"max_attempts": 1, "dead_letter_topic": "t.dead", "order_by": "json:key"})
        )
        http.ask(api.settings("t", "b", {"rate_limit_per_s": 1000}))
        for body in (b"one", b"\xff"):
            running.post("/pub", body, topic="t")
            fail_messages(running.tcp_address, "t", "a", 1)
        while not (found := http.ask(api.stats("t.dead"))["topics"]) or found[0]["message_count"] < 2:
            time.sleep(0.01)
        running.post("/pub", b"own", topic="t.dead")
        for topic in ("t", "without-channels"):
            running.post("/pub", b"later", topic=topic, defer=1_000_000)
        yield running


@pytest.fixture
def http(broker: Broker) -> BrokerHTTP:
    return BrokerHTTP(broker.http_address)


def test_every_field_that_clients_read_is_in_an_answer(broker: Broker, http: BrokerHTTP) -> None:
    found: Found = {}

    def ask(
        request: Request[Any], kind: Any = None, *, read: Callable[[Any], Any] = lambda value: value
    ) -> Any:
        """Make a request, check its answer, and note what it has as the broker sent it."""
        body = http.request(request.method, request.path, request.params, request.body)
        answer = request.read(body, json.loads)
        if kind is not None:
            lines = [json.loads(line) for line in body.splitlines()]
            assert lines, request.path
            for line in map(read, lines):
                note(line, kind, found)
        return answer

    publish = b"PUB t\n" + struct.pack(">i", 3) + b"two"
    with connected(broker, publish), connected(broker, b"SUB t b\nRDY 1\n"):
        ask(api.stats(disk=True, clients=True), answers.Stats)
        (disconnected,) = ask(api.disconnect("t", "b"))
        note(disconnected, answers.Disconnected, found)
    ask(api.bounds("t"), answers.LogBounds)
    ask(api.position("t", "latest"), answers.LogPosition)
    ask(api.read("t", "0", 1), answers.Message)
    ask(api.peek("t", "b", 10), answers.ChannelMessage)
    ask(api.deferred("t", "b", 10), answers.ChannelMessage)
    ask(api.deferred_counts("t", "b", [1, 2]), answers.DeferredCounts)
    assert ask(api.cancel_deferred("t", "b", ["0" * 16])) == []
    assert set(ask(api.settings("t"))) == {each.name for each in answers.settings_fields("topic")}
    assert set(ask(api.settings("t", "a"))) == {each.name for each in answers.settings_fields("channel")}
    assert ask(api.settings("t", None, {"max_messages": 1}, dry_run=True))["dropped"] >= 0
    ask(api.definitions(), answers.Definitions)
    ask(api.seek("t", "b", "earliest", dry_run=True), answers.Seek)
    assert [each["topic"] for each in ask(api.dead_letter_topics())] == ["t.dead"]
    ask(api.count_dead_letters("t.dead"), answers.LetterCounts)
    ask(api.dead_letters("t.dead", start=0, count=1), answers.DeadLetter)
    for verb, done in api.DONE.items():
        moved = ask(api.move_dead_letters[verb]("t.dead", count=3, ids=["0" * 16]))
        assert (moved["done"], moved["next_sequence"]) == (0, None), done
    ask(api.move_dead_letters["requeue"]("t.dead", to="channel"), answers.LettersMoved)
    state = ask(api.producer_state("t", "p"), answers.ProducerState)
    assert (state["number"], state["may_be_forgotten"]) == (None, False)
    ask(api.forget_producer("t", "p"))
    ask(api.report_job("0" * 32, REPORT))
    assert ask(api.option("draining")) == b"false"
    ask(api.set_draining(True))
    ask(api.info(), answers.Info)
    ask(api.stats(), answers.Stats)
    move = ask(api.begin_move("t", "127.0.0.1:1"), answers.Move)["move"]
    ask(api.stats(), answers.Stats)
    assert ask(api.move_of("t"), answers.Move)["move"] == move
    ask(api.next_of_move("t", move, "a", None, 1000))
    ask(api.end_move("t", move, cancel=True))
    assert ask(api.move_of("t")) is None
    ask(api.set_draining(False))
    assert ask(api.store_moved("t", "m")) is None

    kinds = [each for each in vars(answers).values() if is_typeddict(each) and each.__name__ in found]
    missing = {
        (kind.__name__, field.name)
        for kind in kinds
        for field in fields_of(kind)
        if field.name not in found[kind.__name__]
    }
    assert missing - {("LettersMoved", "done")} == set(ELSEWHERE)
    declared = {each.__name__ for each in vars(answers).values() if is_typeddict(each)}
    of_clusters = {"ClusterCounts", "Cluster", "ClusterMember", "Diverged", "MemberView"}
    of_archives = {"ArchiveProgress", "ArchiveStats"}
    assert (
        declared - found.keys()
        == {"QueueStats", "Gap", "DeadLetterTopic", "ProcessAddresses"} | of_archives | of_clusters
    )


class Reading(dict[str, Any]):
    """An object that notes which of its fields are read, and which of these it has."""

    wanted: ClassVar[set[str]] = set()
    had: ClassVar[set[str]] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.wanted.add(key)
        if key in self:
            self.had.add(key)
        return super().get(key, default)


def test_every_field_that_the_console_reads_is_in_an_answer(broker: Broker, http: BrokerHTTP) -> None:
    """The console is lenient with brokers: to it, a field that is renamed is just missing."""

    def read(request: Request[Any]) -> Any:
        body = http.request(request.method, request.path, request.params, request.body)
        return json.loads(body, object_hook=Reading)

    http.ask(api.report_job("1" * 32, {**REPORT, "total": 1, "per_second": 1.5}))
    with connected(broker, b"SUB t b\nRDY 1\n"):
        stats = read(api.stats(clients=True))
        topics = parse_topics(stats)
        assert list(rules_of("", topics))
        assert parse_clients("", read(api.stats("t", "b", clients=True)), "t", "b")
    assert parse_jobs(read(api.jobs()), "")
    assert Reading.wanted - Reading.had == {"unavailable", "auth_identity"}  # see `ELSEWHERE`


def test_answers_that_are_not_those_of_a_broker(http: BrokerHTTP) -> None:
    http.request = lambda *args: b'{"topics": [{"topic_name": "t", "depth": "1"}]}'  # type: ignore[method-assign]
    with pytest.raises(NotABroker):
        http.ask(api.stats())


def test_pages_of_dead_letters(http: BrokerHTTP) -> None:
    counted = run(dead_letters.count(dead_letters.LetterFilter("t.dead")), http.ask)
    assert counted.is_complete
    moved = dead_letters.Moved()
    run(dead_letters.move(dead_letters.LetterFilter("t.dead"), "drop", moved, at_most=1), http.ask)
    assert (moved.done, moved.next_sequence) == (min(1, counted.total), None)


def test_parameters_are_those_of_the_endpoint() -> None:
    assert api.read("t", 5, count=2).params == {"topic": "t", "from": "5", "max_messages": "2"}
    assert api.peek("t", "c", states=("a", "b")).params["state"] == "a,b"
    assert api.seek("t", "c", "latest", dry_run=False).params == {
        "topic": "t",
        "channel": "c",
        "to": "latest",
    }
    for wrong in ({"form": "t"}, {"topic": "t", "start": 1, "from": 1}):
        with pytest.raises(TypeError, match="has the parameters topic, start, count"):
            api.read(**wrong)


def test_page_that_does_not_follow() -> None:
    assert following(5, 6) == 6
    assert following(5, None) is None
    with pytest.raises(ValueError, match="not after this one"):
        following(5, 5)


def test_paths_are_named_once() -> None:
    """Only the requests of `trio_nsq.api` name these paths of the broker, and command lines for people."""
    core = Path(api.__file__).parents[1]
    path = re.compile(r"[\"'](/topic/|/channel/|/dead_letters|/config/draining|/stats[\"']|/info[\"']|/jobs)")
    servers = (
        "api/",
        "broker/",
        "lookup/service/",
        "console/web/",
        "console/api/",
        "http/",
        "access/",
        "connectors/monitoring/",
    )
    found = {
        str(file.relative_to(core))
        for file in core.rglob("*.py")
        if not str(file.relative_to(core)).startswith(servers) and path.search(file.read_text())
    }
    assert found == {"console/messages/command_lines.py"}
