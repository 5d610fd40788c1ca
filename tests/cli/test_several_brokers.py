"""Tests for repeated options: commands with several brokers, and options that take one value."""

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from cli.support import Cli, Result, Run, does_not_exist, lines, only_ours, without_suggestion
from interop.peers import Broker, qcli_serve
from qcli.app import root
from qcli.broker.refusals import listed
from qcli.framework.errors import ExitCode
from qcli.framework.go_flags import GoFlagsCommand


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A second broker."""
    with qcli_serve(tmp_path_factory.mktemp("other") / "data") as running:
        yield running


@dataclass(frozen=True)
class Both:
    """Runs commands with the addresses of two brokers."""

    run_here: Run
    cli: Cli
    addresses: tuple[str, str]

    def __call__(self, *args: str) -> Result:
        named = [word for address in self.addresses for word in ("--nsqd-http-address", address)]
        return self.run_here(self.cli, *args, *named)


@pytest.fixture
def both(run_here: Run, nowhere: Cli, broker: Broker, other: Broker) -> Both:
    return Both(run_here, nowhere, (broker.http_address, other.http_address))


def names(broker: Broker) -> set[str]:
    topics = json.loads(broker.http("GET", "/stats", format="json"))["topics"]
    return {topic["topic_name"] for topic in topics}


def test_changes_apply_to_all_brokers(both: Both, broker: Broker, other: Broker, topic: str) -> None:
    here, there = both.addresses
    created = both("topic", "create", topic)
    assert (created.code, created.err) == (
        0,
        f"topic {topic} created on {here}\ntopic {topic} created on {there}\n",
    )
    assert topic in names(broker) & names(other)
    deleted = both("topic", "delete", "--yes", topic)
    assert (deleted.code, deleted.err) == (
        0,
        f"topic {topic} deleted on {here}\ntopic {topic} deleted on {there}\n",
    )
    assert topic not in names(broker) | names(other)


def test_addresses_with_commas_and_in_the_environment(
    run_here: Run, broker: Broker, other: Broker, topic: str
) -> None:
    several = f"{broker.http_address},{other.http_address}"
    assert run_here(Cli("127.0.0.1:1", several), "topic", "create", topic).code == 0
    assert topic in names(broker) & names(other)
    nowhere = Cli("127.0.0.1:1", "127.0.0.1:1")
    assert run_here(nowhere, "topic", "delete", "-y", topic, f"--nsqd-http-address={several}").code == 0
    assert topic not in names(broker) | names(other)


def test_failing_broker_is_named_and_others_are_changed(
    run_here: Run, broker: Broker, other: Broker, topic: str
) -> None:
    gone = "127.0.0.1:1"
    several = Cli("127.0.0.1:1", f"{broker.http_address},{gone},{other.http_address}")
    created = run_here(several, "topic", "create", topic)
    assert created.code == ExitCode.PARTIAL
    assert topic in names(broker) & names(other)
    *done, failed = created.err.splitlines()
    assert [line.rpartition(" ")[2] for line in done] == [broker.http_address, other.http_address]
    assert failed.startswith(f"Error: No broker answers at {gone}")
    run_here(several, "topic", "delete", "-y", topic, f"--nsqd-http-address={other.http_address}")
    deleted = run_here(several, "topic", "delete", "-y", topic)
    assert f'Topic "{topic}" does not exist on {other.http_address}' in deleted.err
    assert (deleted.code, topic in names(broker)) == (ExitCode.PARTIAL, False)
    nothing = run_here(Cli("127.0.0.1:1", f"{gone},127.0.0.2:1"), "topic", "create", topic)
    assert nothing.code == ExitCode.UNREACHABLE


def test_three_brokers_are_a_list_in_questions_and_errors() -> None:
    assert [listed(["a", "b", "c"][:count], "or") for count in (1, 2, 3)] == ["a", "a or b", "a, b or c"]


def test_duplicate_addresses_are_refused(run_here: Run, nowhere: Cli, broker: Broker) -> None:
    twice = run_here(nowhere, "stat", *["--nsqd-http-address", broker.http_address] * 2)
    assert (twice.code, f"'--nsqd-http-address': it names {broker.http_address} twice." in twice.err) == (
        ExitCode.USAGE,
        True,
    )


def test_lists_combine_all_brokers(both: Both, broker: Broker, other: Broker, topic: str) -> None:
    for each, bodies in ((broker, [b"a", b"c"]), (other, [b"b"])):
        each.create(topic, "shared")
        for body in bodies:
            each.post("/pub", body, topic=topic)
    broker.create(f"{topic}.here")
    other.create(topic, "there")
    depths = {row["channel"]: row["depth"] for row in both("stat", topic, "--format", "json").records}
    assert depths == {None: 0, "shared": 3, "there": 0}
    assert both("stat", topic, "--format", "json").records[0]["message_count"] == 3
    assert both("channel", "list", topic).out.decode() == f"{topic}/shared\n{topic}/there\n"
    listed = [line.split() for line in both("topic", "list").out.decode().splitlines()]
    assert [topic, "shared", "there"] in listed
    assert [f"{topic}.here"] in listed


def test_tail_receives_from_all(qcli: Cli, broker: Broker, other: Broker, topic: str) -> None:
    for each, body in ((broker, b"here"), (other, b"there")):
        each.create(topic, "c")
        each.post("/pub", body, topic=topic)
    addresses = ["--nsqd-tcp-address", broker.tcp_address, "--nsqd-tcp-address", other.tcp_address]
    received = qcli("tail", f"{topic}/c", "-n", "2", *addresses)
    assert (received.code, sorted(received.out.split())) == (0, [b"here", b"there"])
    none = qcli("tail", f"{topic}/c", "--nsqd-tcp-address", "127.0.0.1:1,127.0.0.2:1")
    assert none.code == ExitCode.UNREACHABLE
    assert "127.0.0.1:1" in none.err
    assert "127.0.0.2:1" in none.err


def test_tail_names_an_unreachable_broker(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    broker.post("/pub", b"here", topic=topic)
    received = qcli("tail", f"{topic}/c", "-n", "1", f"--nsqd-tcp-address={broker.tcp_address},127.0.0.1:1")
    assert (received.code, received.out) == (0, b"here\n")
    assert "127.0.0.1:1" in received.err


def test_tail_that_ends_without_a_broker_is_incomplete(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    broker.post("/pub", b"here", topic=topic)
    args = ["tail", f"{topic}/c", "--idle-timeout", "500ms", "--nsqd-tcp-address"]
    received = qcli(*args, f"{broker.tcp_address},127.0.0.1:1")
    assert (received.code, received.out) == (ExitCode.PARTIAL, b"here\n")
    assert received.err.splitlines()[-1] == (
        "Error: The idle timeout expired while 1 of 2 brokers was unreachable; the warnings say which. "
        "Messages may be missing."
    )
    assert any("127.0.0.1:1" in line for line in received.err.splitlines()[:-1])
    assert qcli(*args, broker.tcp_address).code == 0


def test_tail_does_not_wait_for_a_hung_broker(qcli: Cli, broker: Broker, topic: str, tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as hung:
        for each in (broker, hung):
            each.create(topic, "c")
            each.post("/pub", b"here", topic=topic)
        hung.process.send_signal(signal.SIGSTOP)
        try:
            received = qcli(
                "tail", f"{topic}/c", "-n", "1", f"--nsqd-tcp-address={hung.tcp_address},{broker.tcp_address}"
            )
        finally:
            hung.process.send_signal(signal.SIGCONT)
        assert (received.code, received.out) == (0, b"here\n")
        assert broker.channel_stats(topic, "c")["depth"] == 0


@pytest.mark.parametrize("given", ["options", "environment", "no HTTP addresses"])
def test_pub_publishes_everything_to_all(
    nowhere: Cli, broker: Broker, other: Broker, topic: str, given: str
) -> None:
    for each in (broker, other):
        each.create(topic, "c")
    cli, args = nowhere, ["--nsqd-tcp-address", broker.tcp_address, "--nsqd-tcp-address", other.tcp_address]
    if given == "options":
        args += ["--nsqd-http-address", broker.http_address, "--nsqd-http-address", other.http_address]
    elif given == "environment":
        tcp, http = (
            f"{broker.tcp_address},{other.tcp_address}",
            f"{broker.http_address},{other.http_address}",
        )
        cli, args = Cli(tcp, http), []
    bodies = [b"%d" % number for number in range(30_000)]
    published = cli("pub", topic, *args, stdin=lines(bodies))
    assert published.code == 0
    assert published.err.startswith(f"30,000 messages (135.6 KiB) published to {topic} on 2 brokers in ")
    for each in (broker, other):
        assert each.channel_stats(topic, "c")["depth"] == len(bodies)
        received = cli("tail", f"{topic}/c", "-n", str(len(bodies)), "--nsqd-tcp-address", each.tcp_address)
        assert received.out == lines(bodies)


def test_pub_publishes_nothing_if_one_is_unreachable(nowhere: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    refused = nowhere("pub", topic, f"--nsqd-tcp-address={broker.tcp_address},127.0.0.1:1", stdin=b"a\n")
    assert (refused.code, refused.err) == (
        ExitCode.UNREACHABLE,
        "Error: No broker answers at 127.0.0.1:1: connection refused. Start a broker with 'qcli serve', or use another "
        "address: --nsqd-tcp-address. 'qcli stat --once --wait 10s' waits for a broker that is starting."
        " Nothing was published to any broker.\n",
    )
    assert broker.channel_stats(topic, "c")["message_count"] == 0


TCP, HTTP = "--nsqd-tcp-address", "--nsqd-http-address"


@pytest.mark.parametrize(
    ("cli", "args", "complaint"),
    [
        (Cli("h:1", "h:2"), [TCP, "h:3,h:4", HTTP, "h:5"], f"{TCP} names 2 brokers and {HTTP} 1."),
        (Cli("h:1", "h:2"), [TCP, "h:3", HTTP, "h:4,h:5"], f"{TCP} names 1 broker and {HTTP} 2."),
        (
            Cli("h:1,h:2", "h:3"),
            [],
            "QCLI_NSQD_TCP_ADDRESS names 2 brokers and QCLI_NSQD_HTTP_ADDRESS 1.",
        ),
        (Cli("h:1", "h:2,h:3"), [TCP, "h:4"], f"{TCP} names 1 broker and QCLI_NSQD_HTTP_ADDRESS 2."),
    ],
)
def test_pub_needs_an_http_address_for_each_broker_or_none(
    run_here: Run, cli: Cli, args: list[str], complaint: str
) -> None:
    refused = run_here(cli, "pub", "t", *args)
    assert refused.code == ExitCode.USAGE
    told = f"Error: {complaint} Give an HTTP address for each broker, in the same order, or none.\n"
    assert refused.err.endswith(told)


@only_ours
def test_pub_reports_each_broker_if_one_refuses(
    nowhere: Cli, run_here: Run, broker: Broker, other: Broker, topic: str
) -> None:
    for each in (broker, other):
        each.create(topic, "c")
    assert run_here(nowhere, "topic", "set", topic, "max_messages=2", HTTP, other.http_address).code == 0
    args = ["-q", TCP, broker.tcp_address, TCP, other.tcp_address]
    result = nowhere("pub", topic, *args, stdin=b"1\n2\n3\n")
    assert result.code == ExitCode.PARTIAL
    assert result.err.startswith(
        f"Error: The broker at {other.tcp_address} refused: topic {topic} cannot take 3 "
    )
    assert result.err.endswith(
        f" {broker.tcp_address}: 3 messages acknowledged; "
        f"{other.tcp_address}: 0 messages acknowledged, 3 more had been read.\n"
    )
    assert [each.channel_stats(topic, "c")["depth"] for each in (broker, other)] == [3, 0]


@only_ours
def test_logs_of_all_are_read(both: Both, broker: Broker, other: Broker, topic: str) -> None:
    for each, body in ((broker, b"a"), (other, b"b"), (broker, b"c")):
        each.create(topic, "shared")
        each.post("/pub", body, topic=topic)
    here, there = both.addresses
    newest = both("peek", topic, "--format", "json").records
    assert [(each["body"], each["broker"]) for each in newest] == [("a", here), ("b", there), ("c", here)]
    assert both("peek", topic, "-n", "1", "--format", "raw").out == b"c\n"
    assert both("peek", f"{topic}/shared", "-n", "2").out.count(b"fresh") == 2
    sequence = both("peek", topic, "--from", "1")
    assert (sequence.code, "is a sequence" in sequence.err) == (ExitCode.USAGE, True)
    moved = both("channel", "seek", f"{topic}/shared", "--to", "latest", "--yes", "--format", "json").records
    assert [(each["broker"], each["skipped"]) for each in moved] == [(here, 2), (there, 1)]
    other.post("/topic/delete", b"", topic=topic)
    assert both("peek", topic, "--format", "raw").out == b"a\nc\n"
    broker.post("/topic/delete", b"", topic=topic)
    missing = both("peek", topic)
    assert (missing.code, without_suggestion(missing.err)) == (
        1,
        does_not_exist(topic, f"{here} or {there}", f" --nsqd-http-address {here},{there}"),
    )


@only_ours
def test_tail_reads_the_logs_of_all(both: Both, broker: Broker, other: Broker, topic: str) -> None:
    here, there = both.addresses
    for each, bodies in ((broker, (b"a", b"b")), (other, (b"c",))):
        for body in bodies:
            each.post("/pub", body, topic=topic)
    found = both("tail", topic, "--from", "earliest", "--to", "latest", "--format", "json")
    assert found.code == 0, found.err
    assert sorted((each["body"], each["broker"], each["sequence"]) for each in found.records) == [
        ("a", here, 0),
        ("b", here, 1),
        ("c", there, 0),
    ]
    assert len(both("tail", topic, "--since", "1h", "-n", "2").out.splitlines()) == 2
    sequence = both("tail", topic, "--from", "1")
    assert (sequence.code, "each broker has its own sequences" in sequence.err) == (ExitCode.USAGE, True)
    other.post("/topic/delete", b"", topic=topic)
    assert both("tail", topic, "--to", "latest").out == b"a\nb\n"


def bodies_of(broker: Broker, topic: str) -> list[str]:
    lines = broker.http("GET", "/topic/read", topic=topic).splitlines()
    return [json.loads(line)["body"] for line in lines]


@only_ours
def test_replay_returns_the_messages_of_each_broker_to_it(
    run_here: Run, broker: Broker, other: Broker, topic: str
) -> None:
    for each, bodies in ((broker, (b"a", b"b")), (other, (b"c",))):
        for body in bodies:
            each.post("/pub", body, topic=topic)
    cli, again = Cli("", f"{broker.http_address},{other.http_address}"), f"{topic}.again"
    result = run_here(cli, "replay", topic, again, "--format", "json")
    assert result.code == 0, result.err
    assert [(each["broker"], each["published"]) for each in result.records] == [
        (broker.http_address, 2),
        (other.http_address, 1),
    ]
    assert (bodies_of(broker, again), bodies_of(other, again)) == (["a", "b"], ["c"])
    limited = run_here(cli, "replay", topic, f"{topic}.two", "-n", "1")
    assert (limited.code, limited.err.count("published to")) == (0, 1)
    sequence = run_here(cli, "replay", topic, again, "--from", "1")
    assert (sequence.code, "each broker has its own sequences" in sequence.err) == (ExitCode.USAGE, True)


@only_ours
def test_replay_of_several_brokers_to_one_or_in_pairs(
    both: Both, run_here: Run, broker: Broker, other: Broker, topic: str
) -> None:
    for each, body in ((broker, b"a"), (other, b"b")):
        each.post("/pub", body, topic=topic)
    here, there = broker.tcp_address, other.tcp_address
    http = f"{broker.http_address},{other.http_address}"
    assert run_here(Cli(here, http), "replay", topic, f"{topic}.one").code == 0
    assert bodies_of(broker, f"{topic}.one") == ["a", "b"]
    assert run_here(Cli(f"{there},{here}", http), "replay", topic, f"{topic}.cross").code == 0
    assert (bodies_of(broker, f"{topic}.cross"), bodies_of(other, f"{topic}.cross")) == (["b"], ["a"])
    wrong = run_here(Cli("h:1,h:2,h:3", http), "replay", topic, "t")
    assert (wrong.code, "names 3 brokers" in wrong.err) == (ExitCode.USAGE, True)
    files = both("replay", "./nowhere", "t")
    assert (files.code, "Files are published to one broker" in files.err) == (ExitCode.USAGE, True)


@only_ours
def test_replay_goes_on_with_the_other_brokers(run_here: Run, broker: Broker, topic: str) -> None:
    broker.post("/pub", b"a", topic=topic)
    result = run_here(Cli("", f"127.0.0.1:1,{broker.http_address}"), "replay", topic, f"{topic}.again")
    assert result.code == ExitCode.PARTIAL
    assert "Error: No broker answers at 127.0.0.1:1: connection refused." in result.err
    assert bodies_of(broker, f"{topic}.again") == ["a"]


@only_ours
def test_tail_of_logs_names_a_broker_that_fails(run_here: Run, broker: Broker, topic: str) -> None:
    broker.post("/pub", b"a", topic=topic)
    cli = Cli("127.0.0.1:1", f"127.0.0.1:1,{broker.http_address}")
    found = run_here(cli, "tail", topic, "--to", "latest")
    assert (found.code, found.out) == (ExitCode.PARTIAL, b"a\n")
    assert found.err.startswith("Error: No broker answers at 127.0.0.1:1: connection refused.")


@only_ours
def test_settings_apply_to_all(both: Both, broker: Broker, other: Broker, topic: str) -> None:
    broker.create(topic)
    other.create(topic)
    assert both("topic", "set", topic, "max_messages=7").out.count(b"max_messages=7\n") == 2
    records = both("topic", "settings", topic, "--format", "json").records
    assert [(each["broker"], each["max_messages"]) for each in records] == [(a, 7) for a in both.addresses]


@only_ours
def test_dead_letters_and_deferred_messages_of_all(
    both: Both, broker: Broker, other: Broker, qcli: Cli, topic: str
) -> None:
    for each in (broker, other):
        each.create(topic, "c")
        each.post("/pub", b"later", topic=topic, defer=600_000)
    waiting = both("deferred", "list", f"{topic}/c", "--format", "json").records
    assert [each["broker"] for each in waiting] == list(both.addresses)
    cancelled = both("deferred", "cancel", f"{topic}/c", *(each["id"] for each in waiting))
    assert (cancelled.code, cancelled.err.count("1 cancelled on ")) == (0, 2)
    assert both("dlq", "list").code == 0


ONE_VALUE = [
    ("stat --format json --format csv", "--format"),
    ("tail t --from 1 --since 2", "--from / --since"),
    ("tail t --tls --no-tls", "--tls / --no-tls"),
    ("pub t --rate 1 --rate 2", "--rate"),
    ("channel seek t/c --to 1h --to 2h", "--to"),
    ("log dump folder -n 1 -n 2", "-n / --count"),
]


@pytest.mark.parametrize(("line", "option"), ONE_VALUE)
def test_second_value_is_refused(run_here: Run, nowhere: Cli, line: str, option: str) -> None:
    refused = run_here(nowhere, *line.split())
    assert refused.code == ExitCode.USAGE
    assert refused.err.endswith(f"Error: {option} is given 2 times, and takes one value.\n")


@pytest.mark.parametrize(("line", "says"), [("pub t", "messages go to"), ("tail t", "messages come from")])
def test_http_address_alone_is_noted(run_here: Run, tmp_path: Path, line: str, says: str) -> None:
    no_certificate = tmp_path / "garbage.pem"  # ends the command before it connects to the default address
    no_certificate.write_text("")
    args = [*line.split(), "--tls-cert", str(no_certificate), "--nsqd-http-address", "127.0.0.1:1"]
    note = (
        f"Note: --nsqd-http-address is not for all requests: {says} 127.0.0.1:4150, see --nsqd-tcp-address.\n"
    )
    for tcp_address, noted in (("", True), ("127.0.0.1:1", False)):
        result = run_here(Cli(tcp_address, "127.0.0.1:1"), *args)
        assert (result.code, note in result.err) == (1, noted), result.err


@pytest.mark.parametrize("address", ["prod.example.com:4151", "https://10.1.2.3:4152", "[2001:db8::1]:4151"])
@pytest.mark.parametrize(
    ("line", "says"),
    [("pub t", "messages go to"), ("tail t", "messages come from"), ("replay t other", "messages go to")],
)
def test_http_address_of_another_machine_needs_the_tcp_address(
    run_here: Run, line: str, says: str, address: str
) -> None:
    """Otherwise messages would go to the broker of this machine, or come from it."""
    result = run_here(Cli("", ""), *line.split(), "--nsqd-http-address", address)
    assert result.code == ExitCode.USAGE
    host = address.removeprefix("https://").rpartition(":")[0]
    assert result.err.endswith(
        f"Error: --nsqd-http-address is {address}, and without --nsqd-tcp-address {says} 127.0.0.1:4150. Give "
        f"--nsqd-tcp-address of the broker, such as {host}:4150.\n"
    )


def test_servers_use_the_last_value_as_in_go(tmp_path: Path) -> None:
    flags = ["-max-msg-size", "1000", "--max-msg-size=2000", "--snappy", "--snappy=false"]
    with qcli_serve(tmp_path / "data", *flags) as broker:
        told = [line.partition(" WARNING: ")[2] for line in broker.log() if " WARNING: " in line]
        assert json.loads(broker.http("GET", "/config/max_msg_size")) == 2000
    assert told == [
        "--max-msg-size is given 2 times: the last value is used",
        "--snappy is given 2 times: the last value is used",
    ]


def test_flag_may_be_repeated(run_here: Run, qcli: Cli, topic: str) -> None:
    run_here(qcli, "topic", "create", topic)
    assert run_here(qcli, "topic", "delete", "-y", "--yes", topic).code == 0


def test_no_command_ignores_a_value() -> None:
    """Each command except the servers refuses a second value or keeps it."""

    def commands(ctx: click.Context) -> Iterator[click.Context]:
        yield ctx
        if isinstance(ctx.command, click.Group):
            for name in ctx.command.list_commands(ctx):
                command = ctx.command.get_command(ctx, name)
                assert command is not None
                yield from commands(click.Context(command, parent=ctx, info_name=name))

    for ctx in commands(click.Context(root)):
        if isinstance(ctx.command, GoFlagsCommand):
            continue
        for option in ctx.command.params:
            if not isinstance(option, click.Option) or option.multiple or option.is_flag:
                continue
            with pytest.raises(click.UsageError, match=r"is given 2 times"):
                ctx.command.parse_args(ctx, [f"{max(option.opts, key=len)}=1"] * 2)
