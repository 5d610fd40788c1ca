"""Tests for `set` and `settings` of `qcli topic` and `qcli channel`."""

from dataclasses import fields
from pathlib import Path

import pytest

from cli.support import Cli, Run
from interop.peers import Broker, nsqd
from trio_nsq.broker.state.settings import ChannelSettings, TopicSettings
from trio_nsq.text.settings import SETTINGS


def test_each_setting_of_the_broker_has_an_option() -> None:
    for kind, settings in (("topic", TopicSettings), ("channel", ChannelSettings)):
        assert [setting.key for setting in SETTINGS[kind]] == [field.name for field in fields(settings)]
        for setting in SETTINGS[kind]:
            assert setting.name == setting.key.removesuffix("_ms").removesuffix("_per_s")


def test_topic_settings(qcli: Cli, topic: str) -> None:
    qcli("topic", "create", topic)
    words = ["retention_time=7d", "retention_bytes=10GiB", "max_messages=1000000", "when_full=drop-oldest"]
    result = qcli("topic", "set", topic, *words)
    assert (result.code, result.err) == (0, "")
    shown = qcli("topic", "settings", topic).out
    assert shown == result.out
    assert shown.decode().split() == [
        *words[:2],
        "ttl=0",
        "max_messages=1000000",
        "max_bytes=0",
        "when_full=drop-oldest",
        "expire_idle=0",
        "table=",
    ]
    (record,) = qcli("topic", "settings", topic, "--format", "json").records
    assert (record["retention_time_ms"], record["retention_bytes"]) == (7 * 24 * 3_600_000, 10 * 2**30)
    result = qcli("topic", "set", topic, "retention_time=default", "max_messages=0", "--format", "json")
    assert result.records == [record | {"retention_time_ms": 0, "max_messages": 0}]


def test_change_that_drops_messages_asks_with_their_number(
    qcli: Cli, run_here: Run, broker: Broker, topic: str
) -> None:
    broker.create(topic, "a", "b")
    qcli("pub", topic, stdin=b"1\n2\n3\n4\n5\n")
    limit = ("max_messages=2", "when_full=drop-oldest")
    refused = qcli("topic", "set", topic, *limit)
    assert (refused.code, refused.out) == (2, b"")
    assert refused.err.endswith(
        "Error: This would drop 6 waiting messages, and standard input is not a terminal: confirm with --yes.\n"
    )
    question = f"Drop 6 waiting messages of topic {topic} on {qcli.http_address}? [y/N]".encode()
    with qcli.on_terminal("topic", "set", topic, *limit) as terminal:
        terminal.expect(question)
        terminal.type(b"n\n")
        assert terminal.end() == 1
    assert broker.channel_stats(topic, "a")["depth"] == 5
    with qcli.on_terminal("topic", "set", topic, *limit) as terminal:
        terminal.expect(question)
        terminal.type(b"y\n")
        assert terminal.end() == 0
    assert [broker.channel_stats(topic, name)["depth"] for name in "ab"] == [2, 2]
    assert run_here(qcli, "topic", "set", topic, *limit, "ttl=1h").code == 0
    refused = run_here(qcli, "topic", "set", topic, "ttl=1ms")
    assert (refused.code, "This would drop 4 waiting messages" in refused.err) == (2, True)
    assert run_here(qcli, "topic", "set", topic, "ttl=1ms", "--yes").code == 0
    qcli.wait_until(f"{topic}/a", lambda record: record["depth"] == 0)


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("retention_time=forever", "retention_time=forever"),
        ("retention_time=1d12h30m", "retention_time=1d12h30m"),
        ("retention_time=90s", "retention_time=1m30s"),
        ("ttl=1500ms", "ttl=1s500ms"),
        ("retention_bytes=unlimited", "retention_bytes=unlimited"),
        ("max_bytes=1000000", "max_bytes=1MB"),
        ("max_bytes=1000001", "max_bytes=1000001"),
        ("max_bytes=1536KiB", "max_bytes=1536KiB"),
        ("expire_idle=12h", "expire_idle=12h"),
    ],
)
def test_shown_settings_can_be_set(
    qcli: Cli, run_here: Run, broker: Broker, topic: str, word: str, shown: str
) -> None:
    broker.create(topic)
    words = run_here(qcli, "topic", "set", topic, word).out.decode().split()
    assert shown in words
    assert run_here(qcli, "topic", "set", topic, *words).out.decode().split() == words


def test_channel_settings(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c", "d")
    words = ["max_attempts=5", f"dead_letter_topic={topic}.dead", "order_by=json:user.id", "rate_limit=100/s"]
    words.append("expire_idle=7d")
    assert qcli("channel", "set", f"{topic}/c", *words).code == 0
    assert qcli("channel", "settings", f"{topic}/c").out.decode().split() == words
    assert qcli("channel", "settings", f"{topic}/d").out.decode().split() == [
        "max_attempts=0",
        "dead_letter_topic=",
        "order_by=",
        "rate_limit=0",
        "expire_idle=0",
    ]
    assert qcli("channel", "set", f"{topic}/c", "dead_letter_topic=", "rate_limit=20").code == 0
    assert qcli("channel", "settings", f"{topic}/c", "--format", "json").records == [
        {
            "max_attempts": 5,
            "dead_letter_topic": "",
            "order_by": "json:user.id",
            "rate_limit_per_s": 20,
            "expire_idle_ms": 7 * 86_400_000,
        }
    ]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ["channel", "set", "{t}/c", "max_attempts"],
            "'max_attempts' is not NAME=VALUE, NAME being one of max_att",
        ),
        (
            ["channel", "set", "{t}/c", "ttl=5s"],
            "'ttl=5s' is not NAME=VALUE, NAME being one of max_attempts, ",
        ),
        (["channel", "set", "{t}/c", "max_attempts=some"], "max_attempts: 'some' is not an integer"),
        (["channel", "set", "{t}/c", "max_attempts=-1"], "'-1' is not an integer of 0 or more"),
        (["topic", "set", "{t}", "retention=7d"], "(did you mean retention_time?)"),
        (["channel", "set", "{t}/c"], "Missing argument 'NAME=VALUE...'"),
        (["topic", "set", "{t}", "ttl=5"], "ttl: '5' has no unit: write 5s for seconds, or ms, m, h, d."),
        (
            ["topic", "set", "{t}", "max_bytes=1x"],
            "max_bytes: '1x' is not a size such as 4096, 500MB or 10GiB",
        ),
    ],
)
def test_usage_errors(qcli: Cli, broker: Broker, topic: str, args: list[str], says: str) -> None:
    broker.create(topic, "c")
    result = qcli(*(word.format(t=topic) for word in args))
    assert result.code == 2
    assert says in result.err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ["channel", "set", "{t}/c", "dead_letter_topic={t}"],
            "Error: dead_letter_topic is the topic itself; ",
        ),
        (
            ["channel", "set", "{t}/c", "dead_letter_topic=a|b"],
            "Error: dead_letter_topic is 'a|b'; it must be ",
        ),
        (["channel", "set", "{t}/none", "max_attempts=1"], 'Error: Channel "{t}/none" does not exist on '),
        (["channel", "settings", "{t}.none/c"], 'Error: Topic "{t}.none" does not exist on '),
        (
            ["topic", "set", "{t}", "when_full=explode"],
            "Error: when_full is 'explode'; it must be reject or drop-",
        ),
        (
            ["topic", "set", "{t}", "max_bytes=unlimited"],
            "Error: max_bytes is -1; it must be a whole number, 0 or",
        ),
    ],
)
def test_settings_that_the_broker_refuses(
    qcli: Cli, broker: Broker, topic: str, args: list[str], says: str
) -> None:
    broker.create(topic, "c")
    result = qcli(*(word.format(t=topic) for word in args))
    assert (result.code, result.out) == (1, b"")
    assert result.err.startswith(says.format(t=topic))


def test_no_broker(nowhere: Cli) -> None:
    assert nowhere("channel", "set", "t/c", "max_attempts=1").code == 3
    assert nowhere("topic", "settings", "t").code == 3


@pytest.mark.interop
def test_nsqd_is_refused(tmp_path: Path) -> None:
    with nsqd(tmp_path / "data") as theirs:
        qcli = Cli(theirs.tcp_address, theirs.http_address)
        theirs.create("t", "c")
        result = qcli("channel", "set", "t/c", "max_attempts=1")
        assert (result.code, result.err) == (
            1,
            f"Error: The broker at {theirs.http_address} has no settings of topics and channels: it is an nsqd, or an "
            "older 'qcli serve'.\n",
        )


def test_names_are_completed(qcli: Cli) -> None:
    complete = {
        "_QCLI_COMPLETE": "fish_complete",
        "QCLI_WORDS": "qcli\nchannel\nset\nt/c",
        "QCLI_CURRENT": "dead",
    }
    out = qcli(env=complete).out.decode()
    assert out.split("\t")[:2] == ["unfinished", "dead_letter_topic="]
