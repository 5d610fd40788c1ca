"""Tests for `qcli peek` and `qcli tail` with bodies that are decoded and masked."""

import gzip
import io
import json
import os
import subprocess
from functools import partial
from pathlib import Path

import fastavro
import pytest
import trio

from cli.support import Cli, command_line, only_ours
from client.support.fake_broker import fake_broker, message
from interop.peers import Broker
from trio_nsq.protocol.frames import encode_response

pytestmark = only_ours

CLICK = {
    "type": "record",
    "name": "Click",
    "fields": [{"name": "user", "type": "string"}, {"name": "n", "type": "long"}],
}


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    """A file with a schema, beside a bodies file that names it."""
    (tmp_path / "bodies.toml").write_text(
        '[[topic]]\nname = "*"\nformat = "avro"\nschema = "click.avsc"\nmask = ["user"]\n'
    )
    file = tmp_path / "click.avsc"
    file.write_text(json.dumps(CLICK))
    return file


def avro(user: str, number: int) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, CLICK, {"user": user, "n": number})
    return stream.getvalue()


def test_peek(qcli: Cli, broker: Broker, topic: str, schema: Path) -> None:
    """In tables, as JSON and as they are written."""
    broker.create(topic, "c")
    qcli.publish(topic, [avro("ö", 1), gzip.compress(avro("b", 2))])
    options = ("--body-format", "avro", "--schema", str(schema))
    found = [{"user": "ö", "n": 1}, {"user": "b", "n": 2}]
    for source in topic, f"{topic}/c":
        raw = qcli("peek", source, "--format", "raw", *options)
        assert (raw.code, raw.err, [json.loads(line) for line in raw.out.splitlines()]) == (0, "", found)
        lines = qcli("peek", source, "--format", "json", *options).out.splitlines()
        assert [json.loads(json.loads(line)["body"]) for line in lines] == found
        assert '{"user": "b", "n": 2}' in qcli("peek", source, *options).out.decode()
        assert "body_base64" in json.loads(qcli("peek", source, "--format", "json").out.splitlines()[1])


def test_bodies_file_masks(qcli: Cli, topic: str, schema: Path) -> None:
    qcli.publish(topic, [avro("secret", 1)])
    file = str(schema.with_name("bodies.toml"))
    assert qcli("peek", topic, "--format", "raw", "--bodies-file", file).out == b'{"user": "***", "n": 1}\n'
    tail = qcli("tail", topic, "--from", "earliest", "--to", "latest", "--bodies-file", file)
    assert tail.out == b'{"user": "***", "n": 1}\n'


@pytest.mark.parametrize("by", ["log", "channel"])
@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ((), b'{"user": "a", "n": 1}\n'),
        (("-f", r"%s;"), b'{"user": "a", "n": 1};'),
        (("--format", "json"), None),
    ],
)
def test_tail(
    qcli: Cli, broker: Broker, topic: str, schema: Path, by: str, form: tuple[str, ...], wanted: bytes | None
) -> None:
    broker.create(topic, "c")
    qcli.publish(topic, [avro("a", 1), avro("b", 2)])
    where = (topic, "--from", "0", "--to", "1") if by == "log" else (f"{topic}/c", "-n", "1")
    result = qcli("tail", *where, *form, "--body-format", "avro", "--schema", str(schema))
    assert (result.code, result.err) == (0, "")
    assert wanted in (None, result.out)
    if wanted is None:
        assert json.loads(json.loads(result.out)["body"]) == {"user": "a", "n": 1}


def test_body_that_cannot_be_decoded_stays(qcli: Cli, topic: str, schema: Path) -> None:
    """The first one is reported."""
    qcli.publish(topic, [avro("a", 1), b"\x08x", b"\x08y"])
    result = qcli("peek", topic, "--format", "raw", "--body-format", "avro", "--schema", str(schema))
    assert (result.code, result.out) == (0, b'{"user": "a", "n": 1}\n\x08x\n\x08y\n')
    assert result.err.count("Warning: a body of topic") == 1
    assert "The body is no record of its schema" in result.err


def test_auto_decompresses(qcli: Cli, topic: str) -> None:
    qcli.publish(topic, [gzip.compress(b"text"), b"plain"])
    assert qcli("peek", topic, "--format", "raw", "--body-format", "auto").out == b"text\nplain\n"


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--schema", "click.avsc"), 2, "--schema is for --body-format avro or protobuf."),
        (("--body-format", "avro"), 2, "--body-format avro needs --schema or --registry."),
        (
            ("--body-format", "auto", "--schema", "click.avsc"),
            2,
            "--schema is for --body-format avro or protobuf.",
        ),
        (("--body-format", "avro", "--schema", "bodies.toml"), 1, "the Avro schema is not valid"),
        (("--bodies-file", "click.avsc"), 1, "Error: --bodies-file: "),
        (("--bodies-file", "unnamed.toml"), 1, "a [[topic]] has no name: give a topic, or a pattern such as"),
        (("--bodies-file", "misspelt.toml"), 1, "unknown key masks; the keys are name, format, "),
        (
            ("--bodies-file", "bodies.toml", "--body-format", "auto"),
            2,
            "--bodies-file and --body-format exclude each other.",
        ),
    ],
)
@pytest.mark.parametrize("command", ["peek", "tail"])
def test_options_that_cannot_be_used(
    qcli: Cli, topic: str, schema: Path, command: str, options: tuple[str, ...], code: int, said: str
) -> None:
    names = ("click.avsc", "bodies.toml", "unnamed.toml", "misspelt.toml")
    files = {each: str(schema.with_name(each)) for each in names}
    schema.with_name("unnamed.toml").write_text('[[topic]]\nmask = ["user"]\n')
    schema.with_name("misspelt.toml").write_text('[[topic]]\nname = "t"\nmasks = ["user"]\n')
    qcli.publish(topic, [b"x"])
    where = ("--from", "0", "--to", "1") if command == "tail" else ()
    result = qcli(command, topic, *where, *(files.get(each, each) for each in options))
    assert (result.code, said in result.err) == (code, True), result.err
    assert "Traceback" not in result.err


async def test_a_registry_that_hangs_keeps_no_heartbeat_waiting(tmp_path: Path) -> None:
    """The answer to the heartbeat comes before that of the registry, with which the body is decoded."""
    answer = json.dumps({"schema": json.dumps(CLICK)}).encode()
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    file = tmp_path / "bodies.toml"
    file.write_text(f'[[topic]]\nname = "*"\nformat = "avro"\nregistry = "http://127.0.0.1:{port}"\n')
    async with listener, fake_broker() as broker, trio.open_nursery() as nursery:
        command = command_line("tail", "topic/channel", "-n", "1", f"--bodies-file={file}")
        run = partial(trio.run_process, capture_stdout=True, env=os.environ | {"NO_PROXY": "*"})
        ended: list[subprocess.CompletedProcess[bytes]] = []

        async def tail() -> None:
            ended.append(await run([*command, f"--nsqd-tcp-address={broker.address}"]))

        nursery.start_soon(tail)
        peer = await broker.accept()
        await peer.subscribe(ready=1)
        await peer.send(message(1, b"\0\0\0\0\5" + avro("a", 1)))
        async with await listener.accept() as registry:
            assert b"/schemas/ids/5" in await registry.receive_some()
            await peer.send(encode_response(b"_heartbeat_"))
            await peer.expect(b"NOP\n")
            await registry.send_all(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer)
            )
            await peer.receive_line()  # it is finished
    assert ended[0].stdout == b'{"user": "a", "n": 1}\n'
