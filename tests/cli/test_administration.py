"""Tests for `qcli topic` and `qcli channel`."""

import subprocess

import pytest

from cli.support import DEADLINE_S, Cli, command_line, does_not_exist, without_suggestion
from interop.peers import Broker
from soak import in_soak


def test_topic_create_list_and_delete(qcli: Cli, topic: str) -> None:
    names = [f"{topic}.b", f"{topic}.a#ephemeral"]
    result = qcli("topic", "create", *names)
    assert (result.code, result.out) == (0, b"")
    assert result.err == f"topic {names[0]} created\ntopic {names[1]} created\n"
    again = qcli("topic", "create", *names, f"{topic}.c")  # not an error
    assert again.code == 0
    assert again.err == (
        f"topic {names[0]} exists already\ntopic {names[1]} exists already\ntopic {topic}.c created\n"
    )
    names.append(f"{topic}.c")
    listed = qcli("topic", "list").out.decode().splitlines()
    assert [name for name in listed if name.startswith(topic)] == sorted(names)
    assert qcli("topic", "delete", "--yes", *names).code == 0
    assert topic not in qcli("topic", "list").out.decode()


def test_topic_and_channel_list(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "b", "a")
    broker.create(f"{topic}.none")
    listed = [line.split() for line in qcli("topic", "list").out.decode().splitlines()]
    assert [topic, "a", "b"] in listed
    assert [f"{topic}.none"] in listed
    assert qcli("channel", "list", topic).out.decode() == f"{topic}/a\n{topic}/b\n"
    assert f"{topic}/a\n{topic}/b\n" in qcli("channel", "list").out.decode()
    assert qcli("channel", "list", f"{topic}.none").out == b""
    assert qcli("channel", "list", topic, "--format", "json").records == [
        {"topic": topic, "channel": name, "paused": False} for name in ("a", "b")
    ]
    missing = qcli("channel", "list", f"{topic}.missing")
    error = does_not_exist(f"{topic}.missing", qcli.http_address)
    assert (missing.code, without_suggestion(missing.err)) == (1, error)


def test_topic_list_as_json(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "b", "a")
    qcli("topic", "pause", topic)
    records = qcli("topic", "list", "--format", "json").records
    assert {"topic": topic, "channels": ["a", "b"], "paused": True} in records


def test_topic_pause_and_unpause(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    assert qcli("topic", "pause", topic).code == 0
    qcli.publish(topic, [b"a"])
    assert broker.channel_stats(topic, "c")["message_count"] == 0
    assert qcli("topic", "unpause", topic).code == 0
    assert qcli("tail", f"{topic}/c", "-n", "1").out == b"a\n"


def test_topic_empty(qcli: Cli, topic: str) -> None:
    qcli.publish(topic, [b"a", b"b"])
    assert qcli("stat", topic, "--format", "json").records[0]["depth"] == 2
    emptied = qcli("topic", "empty", "-y", topic)
    assert emptied.code == 0
    assert emptied.err == f"topic {topic}: its own queue emptied; its channels keep their messages\n"
    assert qcli("stat", topic, "--format", "json").records[0]["depth"] == 0


def test_channel_create_pause_empty_and_delete(qcli: Cli, broker: Broker, topic: str) -> None:
    source = f"{topic}/c#ephemeral"
    broker.create(topic)
    assert qcli("channel", "create", source).err == f"channel {source} created\n"
    assert qcli("channel", "create", source).err == f"channel {source} exists already\n"
    assert qcli("channel", "pause", source).code == 0
    qcli.publish(topic, [b"a", b"b"])
    (record,) = qcli("stat", source, "--format", "json").records
    assert (record["paused"], record["depth"]) == (True, 2)
    assert qcli("channel", "unpause", source).code == 0
    assert qcli("channel", "empty", "--yes", source).code == 0
    (record,) = qcli("stat", source, "--format", "json").records
    assert (record["paused"], record["depth"]) == (False, 0)
    assert qcli("channel", "delete", "--yes", source).code == 0
    assert qcli("stat", source).code == 1


def test_missing_topics_and_channels_are_named(qcli: Cli, topic: str) -> None:
    missing = does_not_exist(topic, qcli.http_address)
    for args in (
        ["topic", "pause", topic],
        ["channel", "create", f"{topic}/c"],
    ):
        result = qcli(*args)
        assert (result.code, without_suggestion(result.err)) == (1, missing)
    result = qcli("topic", "delete", "-y", topic)  # to create it is not the next step
    assert (result.code, without_suggestion(result.err)) == (1, missing.partition(" Create")[0] + "\n")
    qcli("topic", "create", topic)
    result = qcli("channel", "pause", f"{topic}/c")
    assert (result.code, result.err) == (1, does_not_exist(f"{topic}/c", qcli.http_address))


def test_similar_name_is_suggested(qcli: Cli, topic: str) -> None:
    qcli("topic", "create", f"{topic}.orders")
    qcli("channel", "create", f"{topic}.orders/archive")
    for wrong, right in (
        (f"{topic}.ordres", f"{topic}.orders"),
        (f"{topic}.ordres/archive", f"{topic}.orders"),
        (f"{topic}.orders/archives", "archive"),
    ):
        for command in (["stat"], ["channel", "settings"] if "/" in wrong else ["channel", "list"]):
            result = qcli(*command, wrong)
            assert (result.code, f"(did you mean {right}?)" in result.err) == (1, True), result.err


def test_partial_success_is_reported(qcli: Cli, topic: str) -> None:
    qcli("topic", "create", topic)
    result = qcli("topic", "pause", f"{topic}.missing", topic)
    assert result.code == 4
    assert f"topic {topic} paused\n" in result.err
    assert f'Topic "{topic}.missing" does not exist' in result.err


@pytest.mark.parametrize("args", [["topic", "delete", "t"], ["channel", "empty", "t/c"]])
def test_deleting_needs_yes_without_a_terminal(qcli: Cli, args: list[str]) -> None:
    result = qcli(*args)
    assert result.code == 2
    assert "--yes" in result.err


@pytest.mark.parametrize("args", ["topic delete t", *in_soak("channel empty t/c", "dlq drop t")])
def test_deleting_needs_yes_with_stdin_closed(qcli: Cli, args: str) -> None:
    line = " ".join(command_line(*args.split()))
    done = subprocess.run(
        ["sh", "-c", f"exec {line} <&-"], capture_output=True, env=qcli.environment(), timeout=DEADLINE_S
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.endswith(b"and standard input is not a terminal: confirm with --yes.\n")


@pytest.mark.parametrize(("answer", "code", "left"), [(b"y\n", 0, 1), (b"n\n", 1, 0), (b"\n", 1, 0)])
def test_deleting_asks_on_a_terminal(qcli: Cli, topic: str, answer: bytes, code: int, left: int) -> None:
    qcli("topic", "create", topic)
    qcli("channel", "create", f"{topic}/c")
    qcli.publish(topic, [b"a", b"b", b"c"])
    with qcli.on_terminal("topic", "delete", topic, columns=200) as terminal:  # no line break by readline
        terminal.expect(
            f"Delete topic {topic} with 1 channel and 3 messages on {qcli.http_address}? [y/N]: ".encode()
        )
        terminal.type(answer)
        assert terminal.end() == code
    assert qcli("stat", topic).code == left


def test_emptying_a_topic_asks_about_its_own_messages_only(qcli: Cli, topic: str) -> None:
    qcli("topic", "create", topic)
    qcli("channel", "create", f"{topic}/c")
    qcli.publish(topic, [b"a", b"b", b"c"])
    with qcli.on_terminal("topic", "empty", topic, columns=200) as terminal:
        terminal.expect(f"Empty topic {topic} with 0 messages on {qcli.http_address}? [y/N]: ".encode())
        terminal.type(b"n\n")
        assert terminal.end() == 1


def test_end_of_input_means_no(qcli: Cli, topic: str) -> None:
    qcli("topic", "create", topic)
    with qcli.on_terminal("topic", "delete", topic) as terminal:
        terminal.expect(b"[y/N]: ")
        terminal.type(b"\x04")  # Ctrl-D
        assert terminal.end() == 1
        assert terminal.shown.endswith(b"\r\nError: Nothing was done.\r\n")
    assert qcli("stat", topic).code == 0


def test_interrupted_question_deletes_nothing(qcli: Cli, topic: str) -> None:
    qcli("topic", "create", topic)
    with qcli.on_terminal("topic", "delete", topic) as terminal:
        terminal.expect(b"[y/N]: ")
        assert terminal.interrupt() == 130
    assert qcli("stat", topic).code == 0


@pytest.mark.parametrize(
    "args",
    [
        ["topic", "create", "a b"],
        ["channel", "create", "t"],
        ["channel", "create", "t/a/b"],
        ["topic", "create"],
    ],
)
def test_invalid_names_are_usage_errors(nowhere: Cli, args: list[str]) -> None:
    assert nowhere(*args).code == 2


def test_no_broker(nowhere: Cli) -> None:
    for args in (
        ["topic", "list"],
        ["channel", "list"],
        ["topic", "create", "t"],
        ["channel", "pause", "t/c"],
    ):
        result = nowhere(*args)
        assert result.code == 3
        assert result.err.startswith("Error: No broker answers at 127.0.0.1:1: connection refused.")
