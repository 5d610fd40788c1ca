"""Tests for `qcli definitions` and `qcli channel disconnect`, on brokers of their own."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from cli.support import Cli, CliHere, Run
from fleet.definitions import documents
from interop.peers import Broker, free_ports, nsqd, qcli_serve
from soak import examples

DOCUMENT = {
    "version": 1,
    "topics": {
        "clicks": {
            "settings": {"retention_time": "7d", "max_messages": 1000},
            "channels": {
                "alerts": {},
                "archive": {
                    "settings": {"max_attempts": 5, "dead_letter_topic": "clicks.dead"},
                    "paused": True,
                },
            },
        },
        "clicks.dead": {},
    },
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Broker, Broker]]:
    folder = tmp_path_factory.mktemp("pair")
    with qcli_serve(folder / "one") as one, qcli_serve(folder / "two") as two:
        yield one, two


@pytest.fixture
def one(pair: tuple[Broker, Broker], run_here: Run) -> Cli:
    """Runs commands with the first broker, which is empty."""
    cli = CliHere("", pair[0].http_address, run=run_here)
    assert apply(cli, {"version": 1, "topics": {}}, "--delete", "--yes")[0] == 0
    return cli


@pytest.fixture
def both(pair: tuple[Broker, Broker], run_here: Run) -> Cli:
    """Runs commands with both brokers, which are empty."""
    cli = CliHere("", ",".join(each.http_address for each in pair), run=run_here)
    assert apply(cli, {"version": 1, "topics": {}}, "--delete", "--yes")[0] == 0
    return cli


def apply(cli: Cli, document: Mapping[str, Any] | bytes, *flags: str) -> tuple[int, str, str]:
    """Apply a document from standard input; return the exit code and what was written."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    result = cli("definitions", "apply", "-", *flags, stdin=text)
    return result.code, result.out.decode(), result.err


def export(cli: Cli, *flags: str) -> bytes:
    """Return what is exported."""
    result = cli("definitions", "export", *flags)
    assert (result.code, result.err) == (0, "")
    return result.out


PLAN = """\
create  clicks
create  clicks.dead
create  clicks/alerts
create  clicks/archive
set     clicks          retention_time: default -> 7d, max_messages: default -> 1000
set     clicks/archive  max_attempts: default -> 5, dead_letter_topic: default -> clicks.dead
pause   clicks/archive
"""


def test_a_document_is_applied_once(one: Cli) -> None:
    assert apply(one, DOCUMENT, "--dry-run") == (7, PLAN, "")
    assert export(one) == b'{\n  "version": 1,\n  "topics": {}\n}\n'
    assert apply(one, DOCUMENT) == (0, PLAN, "7 changes made.\n")
    for flags in ((), ("--dry-run",), ("--delete",), ("--format", "json")):
        assert apply(one, DOCUMENT, *flags) == (0, "", "Nothing to change.\n")
    assert json.loads(export(one)) == DOCUMENT
    assert list(json.loads(export(one, "--topic", "*.d[a-f]ad"))["topics"]) == ["clicks.dead"]
    none = one("definitions", "export", "--topic", "clickz*")
    assert (none.code, json.loads(none.out)["topics"]) == (0, {})
    assert none.err == "Note: no topic matches clickz*.\n"
    assert one("definitions", "apply", "").err == "Error: '': no such file or directory.\n"
    assert one("topic", "settings", "clicks").out.startswith(b"retention_time=7d\n")


def test_changes_as_json(one: Cli) -> None:
    apply(one, DOCUMENT)
    changed = {
        "version": 1,
        "topics": {"clicks": {"settings": {"retention_time": "default", "ttl": "1h"}}, "new": {}},
    }
    common: dict[str, Any] = {"channel": None, "settings": {}, "messages": 0}
    changes = [
        {"action": "create", "topic": "new", **common},
        {
            "action": "set",
            "topic": "clicks",
            **common,
            "settings": {
                "retention_time": {"from": "7d", "to": "default"},
                "ttl": {"from": "default", "to": "1h"},
            },
        },
        {"action": "delete", "topic": "clicks", **common, "channel": "alerts"},
        {"action": "delete", "topic": "clicks", **common, "channel": "archive"},
        {"action": "delete", "topic": "clicks.dead", **common},
    ]
    flags = ("definitions", "apply", "-", "--delete", "--format", "json")
    text = json.dumps(changed).encode()
    planned = one(*flags, "--dry-run", stdin=text)
    assert (planned.code, planned.records) == (7, [each | {"done": False} for each in changes])
    made = one(*flags, stdin=text)
    assert (made.code, made.records) == (0, [each | {"done": True} for each in changes])


@settings(
    max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(document=documents())
def test_an_export_brings_everything_back(one: Cli, document: Mapping[str, Any]) -> None:
    assert apply(one, document, "--delete")[0] == 0
    before = export(one)
    assert apply(one, document, "--delete")[2] == "Nothing to change.\n"
    assert apply(one, {"version": 1, "topics": {}}, "--delete")[0] == 0
    assert apply(one, before)[0] == 0
    assert export(one) == before


def test_messages_are_deleted_only_if_that_is_confirmed(one: Cli, pair: tuple[Broker, Broker]) -> None:
    apply(one, {"version": 1, "topics": {"full": {"channels": {"c": {}, "d": {}}}, "empty": {}}})
    pair[0].post("/pub", b"x", topic="full")
    limited = {"version": 1, "topics": {"full": {"channels": {"c": {}}, "settings": {"ttl": "1ms"}}}}
    code, out, err = apply(one, limited, "--delete")
    assert (code, out) == (
        2,
        "set     full    ttl: default -> 1ms, drops 2 messages\n"
        "delete  empty\n"
        "delete  full/d  deletes 1 message\n",
    )
    assert err.endswith(
        "Error: This would delete 3 messages, and standard input is not a terminal: confirm with --yes.\n"
    )
    assert list(json.loads(export(one))["topics"]) == ["empty", "full"]
    assert apply(one, limited, "--delete", "--yes")[0] == 0
    assert json.loads(export(one))["topics"] == {"full": {"channels": {"c": {}}, "settings": {"ttl": "1ms"}}}


@pytest.mark.parametrize("delete", [False, True])
def test_dead_letter_topics_change_places(one: Cli, delete: bool) -> None:
    def to(topic: str) -> dict[str, Any]:
        return {"channels": {"c": {"settings": {"dead_letter_topic": topic}}}}

    assert apply(one, {"version": 1, "topics": {"a": to("b"), "b": to("")}})[0] == 0
    wanted = {"a": {} if delete else to("default"), "b": to("a")}
    code, _, err = apply(one, {"version": 1, "topics": wanted}, *(["--delete"] if delete else []))
    assert (code, err) == (0, "2 changes made.\n")


@pytest.mark.parametrize(
    ("topics", "message"),
    [
        (
            {"new": {}, "bad": {"settings": {"ttl": 5}, "channels": {"c": {"settings": {"order_by": "é"}}}}},
            "Error: standard input: nothing was changed:\n"
            "  channel \"bad/c\": order_by is 'é'; it must be json:FIELD, such as json:user.id, header:NAME in lower "
            "case, or empty.\n"
            "  topic \"bad\": ttl: '5' has no unit: write 5s for seconds, or ms, m, h, d.\n",
        ),
        (
            {"new": {}, "clicks.dead": {"channels": {"c": {"settings": {"dead_letter_topic": "clicks"}}}}},
            'Error: Nothing was changed. topic "clicks": its dead letters end up in it again.\n'
            '  topic "clicks.dead": its dead letters end up in it again.\n',
        ),
    ],
)
def test_nothing_is_done_of_what_is_refused(one: Cli, topics: dict[str, Any], message: str) -> None:
    apply(one, DOCUMENT)
    assert apply(one, {"version": 1, "topics": topics}) == (1, "", message)
    assert json.loads(export(one)) == DOCUMENT


def test_several_brokers(both: Cli, one: Cli, pair: tuple[Broker, Broker]) -> None:
    second = pair[1].http_address
    apply(one, DOCUMENT)
    result = both("definitions", "export")
    assert (result.code, json.loads(result.out)) == (0, DOCUMENT)
    assert result.err == (
        f'Note: The topic "clicks" is not on {second}.\nNote: The topic "clicks.dead" is not on {second}.\n'
    )
    code, out, err = apply(both, DOCUMENT)
    rows = [line.rstrip().rsplit(maxsplit=1) for line in out.splitlines()]
    assert (code, err) == (0, "7 changes made.\n")
    assert ([text.rstrip() for text, _ in rows], {address for _, address in rows}) == (
        PLAN.splitlines(),
        {second},
    )
    assert export(both) == export(one)
    one("channel", "unpause", "clicks/archive")
    differing = both("definitions", "export")
    assert (differing.code, differing.out) == (1, b"")
    assert differing.err == (
        "Error: The brokers differ. Export one of them, and apply its document to all. "
        f'channel "clicks/archive": paused is false on {pair[0].http_address}, true on {second}.\n'
    )


def test_a_broker_that_does_not_answer(one: Cli, run_here: Run, pair: tuple[Broker, Broker]) -> None:
    down = f"127.0.0.1:{free_ports(1)[0]}"
    cli = CliHere("", f"{pair[0].http_address},{down}", run=run_here)
    code, out, err = apply(cli, DOCUMENT)
    assert (code, out) == (3, "")
    assert err.startswith("Error: Nothing was changed. ")
    assert down in err
    assert json.loads(export(one))["topics"] == {}
    exported = cli("definitions", "export")
    assert (exported.code, exported.out) == (3, b"")


def test_an_apply_that_is_cut_off_is_completed(run_here: Run, tmp_path: Path) -> None:
    """The broker dies after some topics."""
    topic = {"channels": {"c": {"settings": {"max_attempts": 1}}}}
    document = {"version": 1, "topics": {f"t{number:03}": topic for number in range(300)}}
    file = tmp_path / "definitions.json"
    file.write_text(json.dumps(document))
    with qcli_serve(tmp_path / "data") as broker:
        cli = Cli("", broker.http_address)
        with cli.running("definitions", "apply", str(file), stdin=subprocess.DEVNULL) as running:
            cli_here = CliHere("", broker.http_address, run=run_here)
            while len(cli_here("topic", "list").out.splitlines()) < 20:
                pass
            broker.process.kill()
            result = running.end()
    assert result.code == 4, result.err
    assert "changes made." in result.err
    with qcli_serve(tmp_path / "data") as broker:
        cli_here = CliHere("", broker.http_address, run=run_here)
        before = len(json.loads(export(cli_here))["topics"])
        assert before > 0
        code, _, err = apply(cli_here, document)
        assert (code, "changes made." in err) == (0, True)
        assert json.loads(export(cli_here)) == document
        assert apply(cli_here, document) == (0, "", "Nothing to change.\n")


def test_topics_of_nsqd_are_copied(one: Cli, run_here: Run, tmp_path: Path) -> None:
    with nsqd(tmp_path / "nsqd") as peer:
        peer.create("t", "c", "d#ephemeral")
        peer.http("POST", "/channel/pause", topic="t", channel="c")
        cli = CliHere("", peer.http_address, run=run_here)
        text = export(cli)
        assert json.loads(text)["topics"] == {"t": {"channels": {"c": {"paused": True}}}}
        assert apply(one, text)[0] == 0
        assert export(one) == text
        more = {"version": 1, "topics": {"t": {}, "u": {"channels": {"c": {}}}}}
        assert apply(cli, more)[0] == 0
        code, _, err = apply(cli, DOCUMENT)
        assert (code, "has no list of settings: it is an nsqd" in err) == (1, True)
        assert json.loads(export(cli))["topics"].keys() == {"t", "u"}


def test_consumers_are_disconnected(both: Cli, one: Cli, pair: tuple[Broker, Broker]) -> None:
    pair[0].create("t", "c")
    consumer = Cli(pair[0].tcp_address, pair[0].http_address)
    assert one("channel", "disconnect", "t/c", "--all").out == b"channel t/c: 0 consumers disconnected\n"
    unknown = both("channel", "disconnect", "t/c", "--client", "nobody")
    assert (unknown.code, unknown.out) == (1, b"")
    assert 'Channel "t/c" has no consumer "nobody" on' in unknown.err
    for flags, said in (
        ((), "Say which consumers: --client ID or --all."),
        (("--all", "--client", "x"), "--client and --all exclude each other."),
    ):
        usage = one("channel", "disconnect", "t/c", *flags)
        assert (usage.code, said in usage.err) == (2, True)
    with consumer.running("tail", "t/c"):
        while not (found := one("clients", "t/c", "--format", "json", "--interval", "0").records):
            pass
        (client,) = found
        gone = one("channel", "disconnect", "t/c", "--client", client["address"], "--format", "json")
        assert (gone.code, gone.records) == (
            0,
            [{"topic": "t", "channel": "c", "address": client["address"], "client_id": client["client_id"]}],
        )
        while not (again := one("clients", "t/c", "--format", "json", "--interval", "0").records):
            pass  # it connects again
        assert again[0]["address"] != client["address"]
        result = both("channel", "disconnect", "t/c", "--all")
        assert (
            result.code,
            f"channel t/c on {pair[0].http_address}: 1 consumer disconnected: " in result.out.decode(),
        ) == (
            0,
            True,
        )
        assert f'Note: Topic "t" does not exist on {pair[1].http_address}' in result.err
