"""Requests for nsqadmin's API that the console must answer as nsqadmin does, or as a row of differences.md says.

Both ask the same fleet. Each script is played twice, with a topic of its own: `{T}` in a path or body. `{N0}`, `{N1}`
and `{N2}` are the HTTP addresses of the brokers; the last is nsqd.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class Reply(Protocol):
    """An answer over HTTP; the names of its headers are in lower case."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def body(self) -> bytes: ...


class Stage(Protocol):
    """A console and its fleet."""

    def ask(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Reply: ...

    def prepare(self, path: str, brokers: Sequence[int]) -> None:
        """POST this path to brokers; to discovery services, if there are no brokers."""

    def register(self) -> None:
        """Wait until the discovery services know the topic of all brokers."""

    def named(self, text: str) -> str:
        """Return a text with the script's names in it."""

    def anonymous(self, text: str) -> str:
        """Return a text without what differs between two runs: names, addresses, times."""


Step = Callable[[Stage], str]
Pick = Callable[[Any], Any]


@dataclass(frozen=True)
class Script:
    """Steps, and what their answers must be; see `interop.same.stage.Script`."""

    steps: tuple[Step, ...]
    row: str = ""
    here: tuple[str, ...] = ()


def same(*steps: Step) -> Script:
    """Return a script that both must answer equally."""
    return Script(steps)


def differs(row: str, *steps: Step, here: list[str]) -> Script:
    """Return a script that ours answers with `here`, for the reason in this row of differences.md."""
    return Script(steps, row, tuple(here))


def play(stage: Stage, script: Script) -> list[str]:
    """Play a script, and return its answers."""
    return [shown for step in script.steps if (shown := step(stage))]


# ----------------------------------------------------------------------- steps


def ask(
    method: str,
    path: str,
    body: object = None,
    *,
    pick: Pick = lambda found: found,
    headers: Mapping[str, str] | None = None,
    raw: bool = False,
    body_counts: bool = True,
    show: Sequence[str] = ("content-type", "x-nsq-content-type", "allow", "location"),
) -> Step:
    """Return a step that makes a request.

    Args:
        body: Bytes as they are; others as JSON.
        pick: Returns the part of a JSON answer that counts.
        raw: Compare the text of messages, too; otherwise only what they begin with.
        body_counts: Compare the body.
        show: The headers that count.
    """

    def step(stage: Stage) -> str:
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        if content is not None:
            content = stage.named(content.decode()).encode()
        answer = stage.ask(method, stage.named(path), content, headers or {})
        text = answer.body.decode()
        if not body_counts:
            shown = ""
        elif "json" in answer.headers.get("content-type", "") and text:
            found = pick(json.loads(stage.anonymous(text)))
            shown = json.dumps(found if raw else without_reasons(found), sort_keys=True)
        else:
            shown = stage.anonymous(text)
        heads = [f"{name}={stage.anonymous(answer.headers[name])}" for name in show if name in answer.headers]
        return f"{answer.status} {shown} {' '.join(heads)}".strip()

    return step


def on_brokers(path: str, *brokers: int) -> Step:
    """Return a step that POSTs this path to brokers; by default, to all."""

    def step(stage: Stage) -> str:
        stage.prepare(stage.named(path), brokers or (0, 1, 2))
        return ""

    return step


def on_lookupds(path: str) -> Step:
    """Return a step that POSTs this path to all discovery services."""

    def step(stage: Stage) -> str:
        stage.prepare(stage.named(path), ())
        return ""

    return step


def topic(*channels: str, messages: int = 0) -> Step:
    """Return a step that creates the topic and its channels on all brokers, with messages on each."""

    def step(stage: Stage) -> str:
        stage.prepare(stage.named("/topic/create?topic={T}"), (0, 1, 2))
        for channel in channels:
            stage.prepare(stage.named(f"/channel/create?topic={{T}}&channel={channel}"), (0, 1, 2))
        for number in range(3):
            for _ in range(messages * (number + 1)):
                stage.prepare(stage.named("/pub?topic={T}"), (number,))
        stage.register()
        return ""

    return step


def without_reasons(found: Any) -> Any:
    """Return an answer in which only the beginning of a message counts."""
    if isinstance(found, dict) and isinstance(message := found.get("message"), str):
        begin = re.match(r"WARNING: |UPSTREAM_ERROR: failed to query any \w+: |[A-Z_]+$", message)
        kept = begin[0] if begin else "(text)" if message else ""
        return {**found, "message": kept}
    return found


def no_channels(found: Any) -> Any:
    """Return a topic without its channels."""
    nodes = [{key: value for key, value in node.items() if key != "channels"} for node in found["nodes"]]
    return {
        **found,
        "channels": sorted(each["channel_name"] for each in found["channels"]),
        "nodes": in_order(nodes),
    }


def in_order(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts of brokers in the order of their addresses: nsqadmin's order is random."""
    return sorted(nodes, key=lambda node: str(node["node"]))


def ordered(found: Any) -> Any:
    """Return a topic or channel with its parts in order."""
    return {**found, "nodes": in_order(found["nodes"])}


def own(found: Any) -> Any:
    """Return a list of topics without those of other scripts."""
    topics = found.get("topics")
    mine = (
        {"T": topics["T"]}
        if isinstance(topics, dict) and "T" in topics
        else [t for t in topics or () if t == "T"]
    )
    return {**found, "topics": mine}


def nodes(found: Any) -> Any:
    """Return the brokers, with the script's own topic only."""
    shown = [
        {
            **node,
            "topics": [each for each in node["topics"] or () if each["topic"] == "T"],
            "remote_addresses": sorted(node["remote_addresses"]),
        }
        for node in found["nodes"]
    ]
    return {**found, "nodes": sorted(shown, key=lambda node: str(node["http_port"]))}


def no_versions(found: Any) -> Any:
    """Return the brokers, without whether they are out of date."""
    shown = nodes(found)
    return {
        **shown,
        "nodes": [{key: node[key] for key in node if key != "out_of_date"} for node in shown["nodes"]],
    }


def node(found: Any) -> Any:
    """Return a broker, with the script's own topic only, and without the sums over all topics."""
    return {
        "node": found["node"],
        "topics": [each for each in found["topics"] or () if each["topic_name"] == "T"],
    }


def counts(found: Any) -> Any:
    """Return the counter, with the script's own topic only."""
    return {
        **found,
        "stats": {key: each for key, each in found["stats"].items() if each["topic_name"] == "T"},
    }


def only(*keys: str) -> Pick:
    """Return a function that picks these keys."""
    return lambda found: {key: found.get(key) for key in keys}


@dataclass
class Names:
    """What differs between two runs of a script."""

    topic: str
    nodes: Sequence[str]
    lookupds: Sequence[str]
    ports: Mapping[str, str] = field(default_factory=dict)

    def named(self, text: str) -> str:
        """Return a text with the script's names in it."""
        for letter, addresses in (("N", self.nodes), ("L", self.lookupds)):
            for number, address in enumerate(addresses):
                text = text.replace(f"{{{letter}{number}}}", address)
        return text.replace("{T}", self.topic)

    def anonymous(self, text: str) -> str:
        """Return a text without names, addresses and times."""
        for letter, addresses in (("N", self.nodes), ("L", self.lookupds)):
            for number, address in enumerate(addresses):
                text = text.replace(address, f"{letter}{number}")
                text = text.replace(
                    f'"http_port":{address.rpartition(":")[2]},', f'"http_port":"{letter}{number}",'
                )
        text = re.sub(r"127\.0\.0\.1:\d+", "ADDRESS", text)
        text = re.sub(r'"tcp_port":\d+', '"tcp_port":0', text)
        text = re.sub(r'"(connect_ts|connected)":\d+', r'"\1":0', text)
        return re.sub(rf"\b{re.escape(self.topic)}\b", "T", text)


# --------------------------------------------------------------------- scripts

_NSQ = "content-type=application/json; charset=utf-8 x-nsq-content-type=nsq; version=1.0"


def _json(found: object, status: int = 200) -> str:
    return f"{status} {json.dumps(found, sort_keys=True)} {_NSQ}"


def _channels(found: Any) -> Any:
    """Return the parts of which the sums of a topic's channels consist."""
    sums = [
        [each["node"], each["hostname"], each["depth"], sorted(part["node"] for part in each["nodes"])]
        for each in found["channels"]
    ]
    parts = [[node["node"], node["channels"][0]["depth"]] for node in found["nodes"]]
    return {"channels": sums, "nodes": sorted(parts)}


_PAUSED = only("depth", "paused", "message")
_BAD_NAME = {"topic": "bad name"}

SCRIPTS: dict[str, Script] = {
    "ping": same(ask("GET", "/ping")),
    "topics": same(topic(), ask("GET", "/api/topics", pick=own)),
    "topics, inactive is not true": same(topic(), ask("GET", "/api/topics?inactive=1", pick=own)),
    "inactive topics": same(
        on_lookupds("/topic/create?topic={T}"), ask("GET", "/api/topics?inactive=true", pick=own)
    ),
    "inactive topics with channels": same(
        on_lookupds("/topic/create?topic={T}"),
        on_lookupds("/channel/create?topic={T}&channel=c"),
        ask("GET", "/api/topics?inactive=true", pick=own),
    ),
    "active topics are not inactive": same(topic(), ask("GET", "/api/topics?inactive=true", pick=own)),
    "a topic": same(topic("a", "b", messages=2), ask("GET", "/api/topics/{T}", pick=no_channels)),
    "a topic without channels": same(topic(messages=3), ask("GET", "/api/topics/{T}", pick=ordered)),
    "a channel": same(topic("a", messages=2), ask("GET", "/api/topics/{T}/a", pick=ordered)),
    "a missing topic": same(ask("GET", "/api/topics/{T}"), ask("GET", "/api/topics/{T}/c")),
    "a missing channel": same(topic("a"), ask("GET", "/api/topics/{T}/b")),
    "an invalid topic": same(ask("GET", "/api/topics/bad%20name"), ask("DELETE", "/api/topics/bad%20name")),
    "nodes": same(topic(), ask("GET", "/api/nodes", pick=no_versions)),
    "a node": same(
        topic("a", messages=1), *(ask("GET", f"/api/nodes/{{N{n}}}", pick=node) for n in range(3))
    ),
    "sums of a node": same(ask("GET", "/api/nodes/{N0}", pick=lambda found: sorted(found))),
    "a missing node": same(ask("GET", "/api/nodes/nowhere:1")),
    "counter": same(topic("a", "b", messages=1), ask("GET", "/api/counter", pick=counts)),
    "create a topic": same(
        ask("POST", "/api/topics", {"topic": "{T}"}),
        ask("POST", "/api/topics", {"topic": "{T}"}),
        ask("GET", "/api/topics?inactive=true", pick=own),
    ),
    "create a topic and a channel": same(
        ask("POST", "/api/topics", {"topic": "{T}", "channel": "c"}),
        ask("GET", "/api/topics?inactive=true", pick=own),
    ),
    "create a channel on the brokers of a topic": same(
        topic(),
        ask("POST", "/api/topics", {"topic": "{T}", "channel": "c"}),
        ask("GET", "/api/topics/{T}/c", pick=ordered),
    ),
    "create with keys in other letter case": same(ask("POST", "/api/topics", {"Topic": "{T}"})),
    "create with bad names": same(
        ask("POST", "/api/topics", {}),
        ask("POST", "/api/topics", _BAD_NAME),
        ask("POST", "/api/topics", {"topic": None}),
        ask("POST", "/api/topics", {"topic": "{T}", "channel": "bad name"}),
        ask("POST", "/api/topics", {"topic": "{T}", "channel": None}),
    ),
    "pause and unpause a topic": same(
        topic("a", messages=1),
        ask("POST", "/api/topics/{T}", {"action": "pause"}),
        ask("GET", "/api/topics/{T}", pick=_PAUSED),
        ask("POST", "/api/topics/{T}", {"action": "unpause"}),
        ask("GET", "/api/topics/{T}", pick=_PAUSED),
    ),
    "pause and unpause a channel": same(
        topic("a", messages=1),
        ask("POST", "/api/topics/{T}/a", {"action": "pause"}),
        ask("GET", "/api/topics/{T}/a", pick=ordered),
        ask("POST", "/api/topics/{T}/a", {"action": "unpause"}),
        ask("GET", "/api/topics/{T}/a", pick=ordered),
    ),
    "empty a topic": same(
        topic(messages=2),
        ask("POST", "/api/topics/{T}", {"action": "empty"}),
        ask("GET", "/api/topics/{T}", pick=_PAUSED),
    ),
    "empty a channel": same(
        topic("a", "b", messages=2),
        ask("POST", "/api/topics/{T}/a", {"action": "empty"}),
        ask("GET", "/api/topics/{T}/a", pick=_PAUSED),
        ask("GET", "/api/topics/{T}/b", pick=_PAUSED),
    ),
    "unknown actions": same(
        topic("a"),
        ask("POST", "/api/topics/{T}", {}),
        ask("POST", "/api/topics/{T}", {"action": "Pause"}),
        ask("POST", "/api/topics/{T}/a", {"action": "delete"}),
    ),
    "actions on what is missing": same(
        topic("a"),
        ask("POST", "/api/topics/{T}/b", {"action": "pause"}),
        ask("DELETE", "/api/topics/{T}/b"),
        ask("POST", "/api/topics/{T}x", {"action": "pause"}),
        ask("POST", "/api/topics/{T}x/b", {"action": "empty"}),
        ask("DELETE", "/api/topics/{T}x"),
        ask("DELETE", "/api/topics/{T}x/b"),
    ),
    "delete a channel": same(
        topic("a", "b"),
        ask("DELETE", "/api/topics/{T}/a"),
        ask("GET", "/api/topics/{T}", pick=no_channels),
        ask("GET", "/api/topics/{T}/a"),
    ),
    "delete a topic": same(
        topic("a", messages=1),
        ask("DELETE", "/api/topics/{T}"),
        ask("GET", "/api/topics", pick=own),
        ask("GET", "/api/topics/{T}"),
    ),
    "hide a node": same(
        topic("a"),
        ask("DELETE", "/api/nodes/{N0}", {"topic": "{T}"}),
        ask("GET", "/api/topics/{T}", pick=no_channels),
        ask("GET", "/api/nodes/{N0}", pick=node),
    ),
    "hide a node with a bad topic": same(
        ask("DELETE", "/api/nodes/{N0}", {}),
        ask("DELETE", "/api/nodes/{N0}", _BAD_NAME),
        ask("DELETE", "/api/nodes/{N0}", {"topic": "{T}"}),
    ),
    "graphite without its arguments": same(
        ask("GET", "/api/graphite"),
        ask("GET", "/api/graphite?metric=rate"),
        ask("GET", "/api/graphite?metric=depth&target=x"),
    ),
    "paths that end with a slash": same(
        *(
            ask("GET", f"{path}/", show=("location",), body_counts=False)
            for path in (
                "/api/topics",
                "/api/topics/{T}",
                "/api/topics/{T}/c",
                "/api/nodes",
                "/api/nodes/{N0}",
            )
        )
    ),
    "unknown paths": same(
        ask("GET", "/api/topics/{T}/c/d"), ask("GET", "/api/none"), ask("DELETE", "/api/none")
    ),
    "methods": same(
        *(ask(method, "/api/topics") for method in ("PUT", "DELETE", "OPTIONS", "PATCH")),
        *(ask(method, "/api/topics/{T}") for method in ("PUT", "OPTIONS")),
        *(ask(method, "/api/topics/{T}/c") for method in ("PUT", "OPTIONS")),
        *(ask(method, "/api/nodes/{N0}") for method in ("POST", "OPTIONS")),
        *(ask("POST", path, b"") for path in ("/ping", "/api/nodes", "/api/counter", "/config/log_level")),
    ),
    "show the configuration": same(
        *(
            ask("GET", f"/config/{option}")
            for option in (
                *(
                    "log_level",
                    "nsqlookupd_http_addresses",
                    "nsqd_http_addresses",
                    "base_path",
                    "graphite_url",
                ),
                *("proxy_graphite", "statsd_prefix", "statsd_counter_format", "statsd_gauge_format"),
                *("statsd_interval", "http_client_connect_timeout", "http_client_request_timeout"),
                *(
                    "http_client_tls_insecure_skip_verify",
                    "http_client_tls_root_ca_file",
                    "http_client_tls_cert",
                ),
                *("http_client_tls_key", "allow_config_from_cidr", "notification_http_endpoint"),
                *("acl_http_header", "admin_users", "none"),
            )
        )
    ),
    "change the log level": same(
        ask("PUT", "/config/log_level", b"ERROR"),
        ask("GET", "/config/log_level"),
        ask("PUT", "/config/log_level", b"loud"),
        ask("PUT", "/config/log_level", b"3"),
        ask("PUT", "/config/log_level", b""),
        ask("PUT", "/config/log_level", b"x" * (1024 * 1024 + 1)),
        ask("PUT", "/config/log_level", b"info"),
    ),
    "change the discovery services": same(
        topic("a"),
        ask("PUT", "/config/nsqlookupd_http_addresses", b'["{L1}"]'),
        ask("GET", "/api/nodes", pick=no_versions),
        ask("GET", "/api/topics/{T}", pick=no_channels),
        ask("PUT", "/config/nsqlookupd_http_addresses", b"{L1}"),
        ask("PUT", "/config/nsqlookupd_http_addresses", b'{"a": 1}'),
        ask("PUT", "/config/nsqlookupd_http_addresses", b"[1]"),
        ask("GET", "/config/nsqlookupd_http_addresses"),
        ask("PUT", "/config/nsqlookupd_http_addresses", b'["{L0}", "{L1}"]'),
    ),
    "options that cannot change": same(
        *(ask("PUT", f"/config/{option}", b"x") for option in ("base_path", "admin_users", "none"))
    ),
    # ------------------------------------------------------------- differences
    "channels of a topic": differs(
        "admin-topic-channels",
        topic("a", messages=1),
        ask("GET", "/api/topics/{T}", pick=_channels),
        here=[
            _json(
                {"channels": [["*", "", 6, ["N0", "N1", "N2"]]], "nodes": [["N0", 1], ["N1", 2], ["N2", 3]]}
            )
        ],
    ),
    "texts of warnings": differs(
        "admin-messages",
        topic("a"),
        ask("DELETE", "/api/nodes/{N0}", {"topic": "{T}x"}, raw=True),
        here=[_json({"message": "WARNING: N0: TOPIC_NOT_FOUND"})],
    ),
    "a topic that no broker has": differs(
        "admin-no-broker",
        on_lookupds("/topic/create?topic={T}"),
        on_lookupds("/channel/create?topic={T}&channel=c"),
        ask("GET", "/api/topics/{T}", raw=True),
        ask("GET", "/api/topics/{T}/c", raw=True),
        here=[_json({"message": "TOPIC_NOT_FOUND"}, 404)] * 2,
    ),
    "texts of errors": differs(
        "admin-messages",
        ask("GET", "/api/topics/{T}", raw=True),
        here=[
            _json(
                {
                    "message": "UPSTREAM_ERROR: failed to query any nsqlookupd: L0: TOPIC_NOT_FOUND\n"
                    "L1: TOPIC_NOT_FOUND"
                },
                502,
            )
        ],
    ),
    "bodies that are no JSON": differs(
        "admin-bad-body",
        ask("POST", "/api/topics", b"", raw=True),
        ask("POST", "/api/topics", b'{"topic": 5}', raw=True),
        here=[
            _json(
                {"message": "INVALID_BODY: Expecting value: line 1 column 1 (char 0): send a JSON object"},
                400,
            ),
            _json({"message": "INVALID_BODY: topic is of the wrong type"}, 400),
        ],
    ),
    "text after a body": differs(
        "admin-bad-body",
        ask("POST", "/api/topics", b'{"topic": "{T}"} more'),
        here=[_json({"message": "(text)"}, 400)],
    ),
    "HEAD": differs(
        "admin-head",
        ask("HEAD", "/api/topics", body_counts=False),
        here=["200  content-type=application/json; charset=utf-8 x-nsq-content-type=nsq; version=1.0"],
    ),
    "almost right paths": differs(
        "admin-paths",
        ask("GET", "/API/topics", show=("location",), body_counts=False),
        ask("GET", "//api/topics", show=("location",), body_counts=False),
        here=["404", "404"],
    ),
    "bad queries": differs(
        "admin-query",
        topic(),
        ask("GET", "/api/topics?a=%zz", pick=own),
        ask("GET", "/api/topics?a;b", pick=own),
        here=[_json({"message": "", "topics": ["T"]})] * 2,
    ),
    "hide an unknown node": differs(
        "admin-unknown-node",
        topic(),
        ask("DELETE", "/api/nodes/127.0.0.1:1", {"topic": "{T}"}),
        here=[_json({"message": "NODE_NOT_FOUND"}, 404)],
    ),
    "versions": differs(
        "admin-out-of-date",
        ask("GET", "/api/nodes", pick=lambda found: sorted(node["out_of_date"] for node in found["nodes"])),
        here=[_json([False, False, False])],
    ),
    "options of nsqadmin only": differs(
        "admin-config-options",
        ask("GET", "/config/dev_static_dir"),
        here=[_json({"message": "INVALID_OPTION"}, 400)],
    ),
    "graphite without a URL": differs(
        "admin-graphite-errors",
        ask("GET", "/api/graphite?metric=rate&target=x", raw=True),
        here=[_json({"message": "UPSTREAM_ERROR: there is no --graphite-url"}, 502)],
    ),
}
