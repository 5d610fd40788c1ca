"""Tests for the JSON Schemas of `--format json`: all commands have one, and print what it says.

`cli.support` also checks the output of every command that a test runs with `--format json` in its own process.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from jsonschema import Draft202012Validator

from cli.schemas import check_records, schemas
from cli.support import Cli, Run, all_contexts, fail_messages
from interop.peers import Broker, qcli_serve
from nsqd_import.nsqd_files import Queued, write_metadata, write_queue

PUBLISHED = Path(__file__).parents[2] / "docs" / "reference" / "json"
FORMAT = ("--format", "json")


def test_every_command_with_json_has_a_published_schema() -> None:
    with_json = {
        ctx.command_path.partition(" ")[2]
        for ctx in all_contexts()
        for param in ctx.command.params
        if "--format" in param.opts and isinstance(param.type, click.Choice) and "json" in param.type.choices
    }
    reads = {"pub"}
    assert set(schemas()) == with_json - reads
    published = {path.stem: json.loads(path.read_text()) for path in PUBLISHED.glob("*.json")}
    assert published == {name.replace(" ", "-"): schema for name, schema in schemas().items()}
    page = (PUBLISHED / "index.md").read_text()
    assert set(re.findall(r"^\| `qcli (.*?)` \|", page, re.MULTILINE)) == set(schemas())


@pytest.mark.parametrize("name", schemas())
def test_a_schema_is_valid_and_describes_records(nowhere: Cli, run_here: Run, name: str) -> None:
    result = run_here(nowhere, "help", *name.split(), "--schema")
    assert (result.code, result.err) == (0, "")
    schema = json.loads(result.out)
    assert schema == schemas()[name]
    Draft202012Validator.check_schema(schema)
    assert "additionalProperties" not in str(schema.get("properties"))
    for each in schema["$defs"].values():
        for field in each["properties"]:
            if field.endswith("_ns"):
                assert field.removesuffix("_ns") in each["properties"]


def test_fields_of_a_base_are_described() -> None:
    fields = schemas()["dlq show"]["$defs"]["LetterRecord"]["properties"]
    assert fields["id"]["description"] == "16 hex digits."
    assert fields["origin"]["description"].startswith("null: a producer published it")
    assert fields["due_ns"]["type"] == ["integer", "null"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"paused": None}, "None is not of type 'boolean'"),
        ({"channels": ["c", 1]}, "1 is not of type 'string'"),
        ({"age": 1}, "'age' was unexpected"),
        ({}, "'topic' is a required property"),
    ],
)
def test_the_check_of_outputs_is_strict(change: dict[str, object], problem: str) -> None:
    args = ("topic", "list", *FORMAT)
    record = {"topic": "t", "channels": ["c"], "paused": False}
    assert check_records(args, json.dumps(record).encode()) == 1
    bad = record | change if change else {"channels": ["c"], "paused": False}
    with pytest.raises(AssertionError, match=re.escape(problem)):
        check_records(args, json.dumps(bad).encode())


@pytest.mark.parametrize("words", [("pub",), ("topic",), ("positions",)])
def test_what_prints_no_json_has_no_schema(nowhere: Cli, run_here: Run, words: tuple[str, ...]) -> None:
    result = run_here(nowhere, "help", *words, "--schema")
    assert (result.code, result.out) == (2, b"")
    assert "--schema" in result.err or "--format json" in result.err


def test_help_names_the_command_that_prints_a_schema(nowhere: Cli, run_here: Run) -> None:
    record = json.loads(run_here(nowhere, "help", "topic", "list", *FORMAT).out)
    assert record["schema_command"] == "qcli help topic list --schema"
    assert json.loads(run_here(nowhere, "help", "pub", *FORMAT).out)["schema_command"] is None


@pytest.fixture(scope="module")
def archived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Broker, Path]]:
    """A broker with an archive, and the folder that its data folder and the archive are in."""
    folder = tmp_path_factory.mktemp("archived")
    with qcli_serve(folder / "data", "--archive", str(folder / "archive")) as running:
        yield running, folder


def test_what_commands_print_is_as_their_schemas_say(
    run_here: Run, archived: tuple[Broker, Path], tmp_path: Path
) -> None:
    broker, folder = archived
    qcli = Cli(broker.tcp_address, broker.http_address)
    printed: dict[str, int] = {}

    def show(*args: str, stdin: bytes = b"") -> None:
        result = run_here(qcli, *args, *FORMAT, stdin=stdin)
        assert result.code in (0, 1, 4, 7), (args, result.err)
        name = next(name for name in schemas() if args[: len(name.split())] == tuple(name.split()))
        printed[name] = printed.get(name, 0) + check_records([*args, *FORMAT], result.out)

    broker.create("t", "c", "d")
    run_here(qcli, "channel", "set", "t/d", "max_attempts=1", "dead_letter_topic=t.dead")
    run_here(qcli, "pub", "t", "-q", "--header", "a:b", stdin=b'{"a": 1}\n\xff\n')
    run_here(qcli, "pub", "t", "-q", "--defer", "1h", stdin=b"later")
    fail_messages(broker.tcp_address, "t", "d", 2)
    qcli.wait_until("t/d", lambda record: bool(record["dead_letter_count"] == 2))
    show("topic", "list")
    show("topic", "set", "t", "retention_time=7d", "table=delta:/nowhere/t")
    show("topic", "settings", "t")
    show("channel", "list")
    show("channel", "set", "t/c", "rate_limit=100/s")
    show("channel", "settings", "t/c")
    show("peek", "t")
    show("peek", "t/c")
    show("deferred", "list", "t/c")
    show("dlq", "list")
    show("dlq", "show", "t.dead")
    show("tail", "t", "--from", "earliest", "--to", "latest")
    show("tail", "t/c", "-n", "1")
    show("stat", "--once")
    show("nodes")
    show("nodes", "--check", "--min-brokers", "2")
    with qcli.running("tail", "t/c", "--format", "json") as tail:
        tail.read_line()
        show("clients", "--interval", "0")
        show("channel", "disconnect", "t/c", "--all")
    show("channel", "seek", "t/c", "--to", "earliest")
    show("replay", "t", "copy")
    copy = ["to-nsq", "--topic", "t", "--destination-topic", "copy", "--status-interval", "100ms", *FORMAT]
    with qcli.running(*copy, "--destination-nsqd-tcp-address", broker.tcp_address) as copying:
        printed["to-nsq"] = check_records(copy, copying.read_line())
    show("to-parquet", "t", str(tmp_path / "export"))
    show("replay", f"{tmp_path}/export", "copy", "--jobs-folder", str(tmp_path / "jobs"))
    show("pipeline", "status")
    for kind in ("pub", "sub", "latency"):
        show("bench", kind, "--duration", "50ms")
    definitions = {"version": 1, "topics": {"t": {"settings": {"ttl": "1h"}, "channels": {"new": {}}}}}
    show("definitions", "apply", "-", "--dry-run", stdin=json.dumps(definitions).encode())
    show("archive", "status", str(folder / "archive"))
    show("drain", "--timeout", "10ms")
    show("log", "dump", str(folder / "data"))
    show("log", "dump", str(folder / "data"), "--headers")
    show("log", "verify", str(folder / "data"))
    show("log", "archive", str(folder / "data"), str(tmp_path / "segments"))
    write_metadata(tmp_path / "nsqd", {"clicks": ["a"]})
    write_queue(tmp_path / "nsqd", "clicks:a", [Queued(3), Queued(1, attempts=2)])
    show("log", "import", str(tmp_path / "nsqd"), "--data-path", str(tmp_path / "imported"))
    run_here(qcli, "token", "create", "web", "--role", "publish", "--auth-file", str(tmp_path / "auth.toml"))
    show("token", "list", "--auth-file", str(tmp_path / "auth.toml"))
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    run_here(qcli, "context", "save", "here", "--tls", "--nsqd-tcp-address", broker.tcp_address, env=env)
    listed = run_here(qcli, "context", "list", *FORMAT, env=env)
    printed["context list"] = check_records(["context", "list", *FORMAT], listed.out)
    show("context", "show")
    show("help")
    print_nothing_here = {"archive verify", "to-file", "pipeline run", "cluster status"}
    assert {name for name, count in printed.items() if count} == set(schemas()) - print_nothing_here, printed
