"""Tests for `qcli to-nsq` on real brokers: copies to another broker, once each."""

import itertools
import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cli.support import Cli, Run, fail_messages, only_ours
from connectors.mapped_ports import mapped
from interop.peers import Broker, nsqd, qcli_serve
from qcli.commands.to_nsq.command import command
from trio_nsq.client.http.idempotent_producer import IdempotentProducer
from trio_nsq.connectors.to_nsq.numbers import number_of, producer_name

pytestmark = only_ours


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with qcli_serve(tmp_path_factory.mktemp("target") / "data") as broker:
        yield broker


@pytest.fixture(scope="module")
def other_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with qcli_serve(tmp_path_factory.mktemp("other_target") / "data") as broker:
        yield broker


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with nsqd(tmp_path_factory.mktemp("theirs") / "data") as broker:
        yield broker


def to(*brokers: Broker) -> list[str]:
    return [
        flag
        for broker in brokers
        for flag in (
            f"--destination-nsqd-tcp-address={broker.tcp_address}",
            f"--destination-nsqd-http-address={broker.http_address}",
        )
    ]


def read(broker: Broker, topic: str) -> list[bytes]:
    """Return the bodies in a topic of one of our brokers."""
    text = broker.http("GET", "/topic/read", topic=topic).decode()
    return [json.loads(line)["body"].encode() for line in text.splitlines()]


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(start, start + count)]


def test_copies_of_one_source_that_differ_are_refused(topic: str, target: Broker, tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "one") as broker:
        broker.post("/pub", b"old", topic=topic)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with qcli_serve(tmp_path / "one") as one, qcli_serve(tmp_path / "two") as two:
        for number, broker in enumerate((one, two)):
            broker.post("/pub", b"%d" % number, topic=topic)
        sources = Cli(f"{one.tcp_address},{two.tcp_address}", f"{one.http_address},{two.http_address}")
        found = sources("to-nsq", topic, *to(target), "--no-follow")
    assert found.code == 4
    assert "is a copy of the one at" in found.err


def test_every_message_once_and_in_order(qcli: Cli, topic: str, target: Broker) -> None:
    bodies = numbered(3000)
    qcli.publish(topic, bodies, at_once=700)
    for _ in range(2):
        result = qcli("to-nsq", topic, *to(target), "--no-follow")
        assert result.code == 0, result.err
        assert read(target, topic) == bodies
    more = numbered(10, 3000)
    qcli.publish(topic, more)
    result = qcli("to-nsq", topic, *to(target), "--no-follow", "--format", "json")
    assert result.code == 0, result.err
    assert read(target, topic) == bodies + more
    record = result.records[-1]
    assert (record["topic"], record["copied"], record["lag"]) == (topic, 10, 0)
    assert record["exactly_once"] is True
    qcli.wait_until(f"{topic}/nsq_to_nsq", lambda channel: bool(channel["depth"] == 0))


def test_the_position_is_at_the_destination(qcli: Cli, topic: str, target: Broker, broker: Broker) -> None:
    """The channel need not be where the copies are: it moves from time to time only."""
    bodies = numbered(100)
    qcli.publish(topic, bodies)
    assert qcli("to-nsq", topic, *to(target), "--no-follow").code == 0
    broker.http("POST", "/channel/delete", topic=topic, channel="nsq_to_nsq")
    broker.http("POST", "/channel/create", topic=topic, channel="nsq_to_nsq")
    broker.http("POST", "/channel/seek", topic=topic, channel="nsq_to_nsq", to="earliest")
    qcli.publish(topic, [b"new"])
    assert qcli("to-nsq", topic, *to(target), "--no-follow").code == 0
    assert read(target, topic) == [*bodies, b"new"]


def test_topic_that_was_created_again_is_copied(
    qcli: Cli, topic: str, target: Broker, broker: Broker
) -> None:
    qcli.publish(topic, numbered(10))
    assert qcli("to-nsq", topic, *to(target), "--no-follow").code == 0
    broker.http("POST", "/topic/delete", topic=topic)
    for count, start in ((12, 100), (3, 200)):  # as many messages as before, and more
        qcli.publish(topic, numbered(count, start))
        result = qcli("to-nsq", topic, *to(target), "--no-follow")
        assert result.code == 0
    assert read(target, topic) == numbered(10) + numbered(12, 100) + numbered(3, 200)


def test_topic_with_other_bodies_only_that_was_created_again(
    qcli: Cli, topic: str, target: Broker, broker: Broker
) -> None:
    """The only position at the destination is that of these bodies."""
    everything = []
    for count, start in ((10, 0), (5, 100), (12, 200), (3, 300)):
        everything += numbered(count, start)
        qcli.publish(topic, numbered(count, start))
        for _ in range(2):
            result = qcli("to-nsq", topic, *to(target), "--where=level=error", "--no-follow")
            assert result.code == 0, result.err
        assert read(target, f"{topic}.not-json") == everything
        broker.http("POST", "/topic/delete", topic=topic)


def test_destination_behind_mapped_ports(qcli: Cli, topic: str, target: Broker) -> None:
    qcli.publish(topic, [b"a", b"b"])
    with mapped(target.tcp_address) as tcp, mapped(target.http_address) as http:
        both = (f"--destination-nsqd-tcp-address={tcp}", f"--destination-nsqd-http-address={http}")
        for _ in range(2):
            result = qcli("to-nsq", topic, *both, "--no-follow")
            assert result.code == 0, result.err
            assert f"names {target.tcp_address} as its TCP address, not {tcp}" in result.err
            assert "at least once" not in result.err
        assert read(target, topic) == [b"a", b"b"]


def test_destinations_that_cannot_be_told_apart(
    qcli: Cli, topic: str, target: Broker, other_target: Broker
) -> None:
    """One HTTP address for two brokers, and it names neither."""
    qcli.publish(topic, [b"a"])
    with mapped(target.tcp_address) as tcp, mapped(other_target.tcp_address) as other_tcp:
        named = (f"--destination-nsqd-tcp-address={tcp},{other_tcp}",)
        http = f"--destination-nsqd-http-address={target.http_address}"
        result = qcli("to-nsq", topic, *named, http, "--no-follow")
    assert result.code == 1
    assert f"{target.http_address} names {target.tcp_address} as its TCP address" in result.err
    assert "give one HTTP address for each TCP address, in the same order" in result.err


def keeps_all(broker: Broker, topic: str) -> None:
    broker.put("/topic/settings", b'{"retention_time_ms": 3600000}', topic=topic)


def seek(broker: Broker, topic: str, to: str) -> None:
    broker.http("POST", "/channel/seek", topic=topic, channel="nsq_to_nsq", to=to)


def test_destination_that_lacks_messages_gets_no_newer_ones(
    qcli: Cli, topic: str, target: Broker, broker: Broker
) -> None:
    """As after it was restored from an older copy of its data folder."""
    qcli.publish(topic, [b"a"])
    keeps_all(broker, topic)
    assert qcli("to-nsq", topic, *to(target), "--no-follow").code == 0
    qcli.publish(topic, [b"b", b"c"])
    seek(broker, topic, "latest")
    qcli.publish(topic, [b"d"])
    for _ in range(2):
        result = qcli("to-nsq", topic, *to(target), "--no-follow")
        assert result.code == 1
        assert "sequences 1 to 2 are missing" in result.err
        assert f"'qcli channel seek {topic}/nsq_to_nsq --to 1'" in result.err
        assert "--allow-gaps" in result.err
        assert read(target, topic) == [b"a"]
    seek(broker, topic, "1")
    result = qcli("to-nsq", topic, *to(target), "--no-follow")
    assert result.code == 0, result.err
    assert read(target, topic) == [b"a", b"b", b"c", b"d"]


def test_destination_that_is_restored_while_the_command_runs(
    qcli: Cli, topic: str, broker: Broker, tmp_path: Path
) -> None:
    qcli.publish(topic, [b"a"])
    keeps_all(broker, topic)
    with qcli_serve(tmp_path / "data") as first:
        assert qcli("to-nsq", topic, *to(first), "--no-follow").code == 0
    shutil.copytree(tmp_path / "data", tmp_path / "backup")
    same = [f"--tcp-address={first.tcp_address}", f"--http-address={first.http_address}"]
    with ExitStack() as stack:
        with qcli_serve(tmp_path / "data", *same) as before:
            run = stack.enter_context(qcli.running("to-nsq", topic, *to(before)))
            qcli.publish(topic, [b"b"])
            qcli.wait_until(f"{topic}/nsq_to_nsq", lambda channel: bool(channel["depth"] == 0))
            assert read(before, topic) == [b"a", b"b"]
        with qcli_serve(tmp_path / "backup", *same) as after:
            qcli.publish(topic, [b"c"])
            result = run.end()
            assert result.code == 1, result.err
            assert "lacks messages that were copied" in result.err
            assert "sequences 1 to 1 are missing" in result.err
            assert read(after, topic) == [b"a"]


def test_gap_is_allowed(qcli: Cli, topic: str, target: Broker, broker: Broker) -> None:
    qcli.publish(topic, [b"a"])
    keeps_all(broker, topic)
    assert qcli("to-nsq", topic, *to(target), "--no-follow").code == 0
    qcli.publish(topic, [b"b", b"c"])
    seek(broker, topic, "latest")
    qcli.publish(topic, [b"d"])
    result = qcli("to-nsq", topic, *to(target), "--no-follow", "--allow-gaps")
    assert result.code == 0, result.err
    assert "sequences 1 to 2 are left out" in result.err
    assert read(target, topic) == [b"a", b"d"]
    result = qcli("to-nsq", topic, *to(target), "--no-follow")
    assert result.code == 0, result.err


def test_messages_that_a_full_topic_has_dropped_are_left_out(
    qcli: Cli, topic: str, target: Broker, broker: Broker
) -> None:
    """The broker has moved the channel, and nothing was restored: a mirror must go on by itself."""
    qcli.publish(topic, [b"a"])
    keeps_all(broker, topic)
    assert qcli("topic", "set", topic, "max_messages=1", "when_full=drop-oldest").code == 0
    assert qcli("to-nsq", topic, *to(target), "--no-follow").code == 0
    for body in (b"b", b"c", b"d"):
        qcli.publish(topic, [body])
    result = qcli("to-nsq", topic, *to(target), "--no-follow")
    assert result.code == 0, result.err
    assert "sequences 1 to 2 are left out" in result.err
    assert read(target, topic) == [b"a", b"d"]


def test_messages_for_another_channel_are_no_gap(
    qcli: Cli, topic: str, target: Broker, broker: Broker
) -> None:
    """The command passes them, and does not store them."""
    qcli.publish(topic, [b"a"])
    keeps_all(broker, topic)
    assert qcli("to-nsq", topic, *to(target), "--no-follow").code == 0
    broker.create(topic, "other")
    qcli("channel", "set", f"{topic}/other", "max_attempts=1", f"dead_letter_topic={topic}.dead")
    qcli.publish(topic, [b"b"])
    assert qcli("to-nsq", topic, *to(target), "--no-follow").code == 0
    fail_messages(broker.tcp_address, topic, "other", 1)
    qcli.wait_until(f"{topic}/other", lambda record: bool(record["dead_letter_count"] == 1))
    assert qcli("dlq", "requeue", f"{topic}.dead").code == 0
    for _ in range(2):
        result = qcli("to-nsq", topic, *to(target), "--no-follow")
        assert (result.code, "sequences" in result.err) == (0, False), result.err
    assert read(target, topic) == [b"a", b"b"]


def test_destination_topic_that_was_deleted_is_noticed(
    qcli: Cli, topic: str, target: Broker, broker: Broker
) -> None:
    qcli.publish(topic, [b"a", b"b"])
    keeps_all(broker, topic)
    first = qcli("to-nsq", topic, *to(target), "--no-follow")
    assert (first.code, "left out" in first.err) == (0, False), first.err
    for body in (b"c", b"d"):
        target.http("POST", "/topic/delete", topic=topic)
        qcli.publish(topic, [body])
        result = qcli("to-nsq", topic, *to(target), "--no-follow")
        assert result.code == 0, result.err
        assert "delete the topic at the destination, and move the channel back" in result.err
        assert read(target, topic) == [body]
    target.http("POST", "/topic/delete", topic=topic)
    seek(broker, topic, "earliest")
    assert qcli("to-nsq", topic, *to(target), "--no-follow").code == 0
    assert read(target, topic) == [b"a", b"b", b"c", b"d"]


def test_channel_moves_behind_what_is_stored(qcli: Cli, topic: str, target: Broker, broker: Broker) -> None:
    qcli.publish(topic, numbered(10))
    keeps_all(broker, topic)
    assert qcli("to-nsq", topic, *to(target), "--no-follow").code == 0
    seek(broker, topic, "earliest")
    assert qcli("to-nsq", topic, *to(target), "--no-follow").code == 0
    qcli.wait_until(f"{topic}/nsq_to_nsq", lambda channel: bool(channel["depth"] == 0))
    assert read(target, topic) == numbered(10)


@pytest.mark.parametrize("pattern", ["^nothing-has-this-name", None])
def test_no_follow_ends_without_topics(qcli: Cli, topic: str, target: Broker, pattern: str | None) -> None:
    which = [f"--topic-pattern={pattern}"] if pattern else [topic]
    result = qcli("to-nsq", *which, *to(target), "--no-follow")
    assert result.code == 0, result.err


def test_destination_that_requires_a_secret(qcli: Cli, topic: str, tmp_path: Path) -> None:
    auth_file = tmp_path / "auth"
    created = qcli("token", "create", "copies", "--auth-file", str(auth_file), "--role", "publish")
    token = created.out.decode().strip()
    qcli.publish(topic, [b"a"])
    with qcli_serve(tmp_path / "data", f"--auth-file={auth_file}") as target:
        flags = ["to-nsq", topic, *to(target), "--no-follow"]
        result = qcli(*flags)
        assert result.code == 1
        assert "AUTH_REQUIRED (HTTP status 401)" in result.err
        assert "--producer-opt auth_secret_file,FILE" in result.err
        assert "Copied 1 message " in qcli(*flags, f"--producer-opt=auth_secret,{token}").err
        qcli.publish(topic, [b"b"])
        (tmp_path / "token").write_text(token)
        for_sources = ("--auth-secret", "unknown", "--producer-opt", f"auth_secret_file,{tmp_path / 'token'}")
        assert "Copied 1 message " in qcli(*flags, *for_sources).err


def test_several_topics_into_one(qcli: Cli, topic: str, target: Broker) -> None:
    names = [f"{topic}.{each}" for each in "abc"]
    for name in names:
        qcli.publish(name, [f"{name}/{number}".encode() for number in range(20)])
    merged = f"{topic}.all"
    flags = [*to(target), f"--destination-topic={merged}", "--no-follow"]
    assert qcli("to-nsq", *names, *flags).code == 0
    found = read(target, merged)
    for name in names:
        of_name = [body for body in found if body.startswith(name.encode() + b"/")]
        assert of_name == [f"{name}/{number}".encode() for number in range(20)]
    assert len(found) == 60


@pytest.mark.parametrize("mode", ["hostpool", "round-robin", "epsilon-greedy"])
def test_several_destinations_have_each_message_once(
    qcli: Cli, topic: str, target: Broker, other_target: Broker, mode: str
) -> None:
    both = [*to(target, other_target), f"--mode={mode}", "--no-follow"]
    everything = []
    for start in range(0, 400, 100):
        bodies = numbered(100, start)
        qcli.publish(topic, bodies)
        everything += bodies
        assert qcli("to-nsq", topic, *both).code == 0
    found = list(
        itertools.chain.from_iterable(
            read(each, topic) for each in (target, other_target) if topic in _topics(each)
        )
    )
    assert sorted(found) == sorted(everything)


def test_second_command_with_several_destinations_is_noticed(
    qcli: Cli, topic: str, target: Broker, other_target: Broker, broker: Broker
) -> None:
    """It stores messages at one of the destinations while the first command reads them."""
    broker.create(topic, "c")
    qcli.publish(topic, [b"0"])
    with qcli.running("to-nsq", topic, *to(target, other_target), "--channel=c") as run:
        qcli.wait_until(f"{topic}/c", lambda channel: bool(channel["depth"] == 0))
        log = json.loads(broker.http("GET", "/topic/bounds", topic=topic))["incarnation"]
        name = producer_name(log, topic, "c", 0)
        for each in (target, other_target):
            with IdempotentProducer(each.http_address, topic, name) as producer:
                producer.publish([b"1"], number_of(1, b"0" * 16))
        qcli.publish(topic, [b"1"])
        assert f"another command copies to topic {topic}" in run.hear_line()


def _topics(broker: Broker) -> list[str]:
    stats = json.loads(broker.http("GET", "/stats", format="json"))
    return [each["topic_name"] for each in stats["topics"]]


def test_filters_and_fields(qcli: Cli, topic: str, target: Broker) -> None:
    bodies = [
        b'{"id": 9007199254740993, "level": "error", "user": {"id": 1, "name": "x"}}',
        b'{"id": 2, "level": "debug"}',
        b"not JSON",
        b'{"id": 1.10, "level": "error"}',
    ]
    qcli.publish(topic, bodies)
    flags = [*to(target), "--where", "level=error", "--fields", "id,user.id", "--no-follow"]
    result = qcli("to-nsq", topic, *flags)
    assert result.code == 0, result.err
    assert read(target, topic) == [b'{"id":9007199254740993,"user":{"id":1}}', b'{"id":1.10}']
    assert read(target, f"{topic}.not-json") == [b"not JSON"]
    assert f"such bodies go to topic {topic}.not-json" in result.err
    assert "Copied 2 messages (50 B); 1 left out; 1 not JSON." in result.err
    # What was left out is not read again.
    again = qcli("to-nsq", topic, *flags, "--format", "json").records[-1]
    assert (again["copied"], again["dropped"], again["not_json"]) == (0, 0, 0)


@pytest.mark.parametrize(("choice", "copied"), [("pass", [b"x", b'{"a":1}']), ("drop", [b'{"a":1}'])])
def test_bodies_that_are_not_json(
    qcli: Cli, topic: str, target: Broker, choice: str, copied: list[bytes]
) -> None:
    qcli.publish(topic, [b"x", b'{"a":1}', b'{"b":1}'])
    result = qcli("to-nsq", topic, *to(target), "--where", "a", "--not-json", choice, "--no-follow")
    assert result.code == 0, result.err
    assert read(target, topic) == copied
    assert "1 not JSON" in result.err


def test_the_options_of_nsq_to_nsq(qcli: Cli, topic: str, target: Broker) -> None:
    qcli.publish(topic, [b'{"a.b":"5","c":1,"d":2}', b'{"a.b":5.0,"d":3}', b'{"a.b":6}', b'{"a":{"b":5}}'])
    result = qcli(
        *("to-nsq", f"-topic={topic}", f"-destination-nsqd-tcp-address={target.tcp_address}"),
        *(f"-destination-nsqd-http-address={target.http_address}", "-destination-topic", f"{topic}.copy"),
        *("-require-json-field=a.b", "-require-json-value", "5", "-whitelist-json-field=c"),
        *("-whitelist-json-field", "d", "-status-every=1", "-max-in-flight=7", "-channel=old"),
        *("-producer-opt=user_agent,me", "-consumer-opt", "max_attempts,3", "-no-follow"),
    )
    assert result.code == 0, result.err
    assert read(target, f"{topic}.copy") == [b'{"c":1,"d":2}', b'{"d":3}']


def test_topic_is_not_copied_to_itself(qcli: Cli, topic: str, broker: Broker) -> None:
    port = broker.tcp_address.rpartition(":")[2]
    for flags in (
        [f"--destination-nsqd-tcp-address={broker.tcp_address}"],
        [f"--destination-nsqd-tcp-address=localhost:{port}"],
        [f"--destination-nsqd-http-address={broker.http_address}", "--at-least-once"],
        [f"--destination-nsqd-tcp-address={broker.tcp_address}", f"--destination-topic={topic}"],
    ):
        qcli.publish(topic, [b"x"])
        result = qcli("to-nsq", topic, *flags)
        assert result.code == 2
        assert f"Topic {topic} would be copied to itself" in result.err


def test_topic_is_copied_to_another_one_of_the_same_broker(qcli: Cli, topic: str, broker: Broker) -> None:
    qcli.publish(topic, numbered(5))
    flags = [*to(broker), f"--destination-topic={topic}.copy"]
    assert qcli("to-nsq", topic, *flags, "--no-follow").code == 0
    # A pattern does not find the topic that it fills.
    assert qcli("to-nsq", "--topic-pattern", f"^{topic}", *flags, "--no-follow").code == 0
    assert read(broker, f"{topic}.copy") == numbered(5)


@pytest.mark.interop
@pytest.mark.parametrize("way", ["from", "to", "both"])
def test_nsqd_on_either_side(
    run_here: Run, qcli: Cli, topic: str, theirs: Broker, target: Broker, broker: Broker, way: str
) -> None:
    source, destination = {
        "from": (theirs, target),
        "to": (broker, theirs),
        "both": (theirs, theirs),
    }[way]
    copy = f"{topic}.copy"
    source.create(topic, "nsq_to_nsq")
    destination.create(copy, "check")
    bodies = numbered(500)
    source.post("/mpub", b"\n".join(bodies), topic=topic)
    cli = Cli(source.tcp_address, source.http_address)
    result = cli("to-nsq", topic, *to(destination), f"--destination-topic={copy}", "--no-follow")
    assert result.code == 0, result.err
    got = Cli(destination.tcp_address, destination.http_address)("tail", f"{copy}/check", "-n", "500")
    assert sorted(got.out.splitlines()) == sorted(bodies)
    assert source.channel_stats(topic, "nsq_to_nsq")["depth"] == 0


def test_deferred_messages_keep_the_rest_of_their_delay(
    qcli: Cli, topic: str, target: Broker, broker: Broker
) -> None:
    target.create(topic, "check")
    for defer, body in ((0, b"a"), (3_600_000, b"b"), (0, b"c")):
        broker.post("/pub", body, topic=topic, **({"defer": defer} if defer else {}))
    assert qcli("to-nsq", topic, *to(target), "--no-follow").code == 0
    assert read(target, topic) == [b"a", b"b", b"c"]
    text = target.http("GET", "/channel/deferred", topic=topic, channel="check").decode()
    (line,) = text.splitlines()
    assert json.loads(line)["body"] == "b"
    assert target.channel_stats(topic, "check")["depth"] == 2


def test_follows_until_interrupted(qcli: Cli, topic: str, target: Broker) -> None:
    target.create(topic)
    with qcli.running("to-nsq", topic, *to(target)) as running:
        qcli.publish(topic, [b"a", b"b"])
        Cli(target.tcp_address, target.http_address).wait_until(
            topic, lambda found: found["message_count"] == 2
        )
        running.process.send_signal(signal.SIGINT)
        result = running.end()
    assert result.code == 130
    assert "Copied 2 messages" in result.err
    assert read(target, topic) == [b"a", b"b"]


@pytest.mark.parametrize("how", ["--follow", "--no-follow"])
def test_interrupted_while_the_destination_is_full(qcli: Cli, topic: str, target: Broker, how: str) -> None:
    target.create(topic, "slow")
    target.put("/topic/settings", b'{"max_messages": 3, "when_full": "reject"}', topic=topic)
    qcli.publish(topic, numbered(20))
    with qcli.running("to-nsq", topic, *to(target), how) as running:
        assert "retrying until it stores the messages" in running.hear_line()
        running.process.send_signal(signal.SIGINT)
        assert running.end().code == 130
    target.put("/topic/settings", b'{"max_messages": 0}', topic=topic)
    assert qcli("to-nsq", topic, *to(target), "--no-follow").code == 0
    assert read(target, topic) == numbered(20)


def test_no_destination_answers(qcli: Cli, topic: str) -> None:
    result = qcli("to-nsq", topic, "--destination-nsqd-tcp-address", "127.0.0.1:1")
    assert result.code == 3
    assert "No destination answers: 127.0.0.1:1" in result.err


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["t"], "Missing option '--destination-nsqd-tcp-address'"),
        (["--destination-nsqd-tcp-address", "h:1"], "Missing argument 'TOPIC...'"),
        (["t", "--where", "=x"], "is not a condition such as level=error"),
        (["t", "--fields", "a,,b"], "is not a field such as user.name"),
        (["t", "--match", "("], "is not a regular expression (RE2)"),
        (["t", "--destination-nsqd-tcp-address", "h:1", "--not-json", "drop"], "--not-json is for --where"),
        (["t", "--destination-nsqd-tcp-address", "h:1", "--require-json-value", "x"], "--require-json-field"),
        (["t" * 60, "--destination-nsqd-tcp-address", "h:1", "--where", "a"], "give --not-json-topic"),
    ],
)
def test_wrong_command_line(nowhere: Cli, run_here: Run, args: list[str], text: str) -> None:
    result = run_here(nowhere, "to-nsq", *args)
    assert result.code == 2
    assert text in result.err


def test_defaults() -> None:
    found = {param.name: param.default for param in command.params}
    assert {name: found[name] for name in ("channel", "max_in_flight")} == {
        "channel": "nsq_to_nsq",
        "max_in_flight": 2500,
    }
