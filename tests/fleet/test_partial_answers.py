"""Every command on a fleet where one broker is hung, one is down and one refuses.

Each shows or changes what it can, names the brokers that failed with the reason, and ends in time with the exit code of
a partial answer. The commands run at the same time, because each one waits for the hung broker.
"""

import itertools
import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from cli.support import Result, fail_messages
from cli.support import Run as RunHere
from fleet.support import SECRET, Wreck, cli_of, wrecked_fleet
from interop.peers import Broker
from qcli.framework.errors import ExitCode
from soak import in_soak

pytestmark = [pytest.mark.interop, pytest.mark.slow]

AT_ONCE = 16
"""Commands that run at the same time. Nearly all their time, they wait for the hung broker."""
ANSWER_S = 2.0 + 5.0
"""A command's limits for a connection and for an answer."""
PATIENCE_S = 45.0
"""For the start of the command's process, on a machine that is busy."""
BODIES = [b"a", b"b", b"c"]

PARTIAL = ExitCode.PARTIAL


@dataclass(frozen=True)
class Case:
    """A command line on the broken fleet, and what it must do.

    Attributes:
        line: The command line, with TOPIC for the name of a topic that all brokers have, with channel `c`.
        out: Texts on standard output, with WELL, NSQD and so on for HTTP addresses.
        err: Texts on standard error, besides those of failing brokers.
        code: The exit code.
        by_discovery: Whether the command has the addresses of discovery services, which do not list the broker that is
            down; otherwise it has those of all brokers.
        no_nsqd: What standard error says of the nsqd, if it cannot do this.
        answers: How many answers the command waits for, one after the other.
        after: Checks the broker `well` or `nsqd` afterwards, by its `/stats` of the topic.
    """

    line: str
    out: Sequence[str] = ()
    err: Sequence[str] = ()
    code: int = PARTIAL
    by_discovery: bool = False
    no_nsqd: str = ""
    answers: int = 1
    after: Callable[[dict[str, Any] | None], bool] | None = None

    @property
    def id(self) -> str:
        """The name of the test."""
        return f"{self.line}{' (discovery)' * self.by_discovery}"


def channel(stats: dict[str, Any] | None) -> dict[str, Any]:
    """Return the channel `c` of a topic."""
    assert stats is not None
    (found,) = (each for each in stats["channels"] if each["channel_name"] == "c")
    return dict(found)


NO_SETTINGS = "has no settings of topics and channels"
NO_POSITIONS = "cannot be read by sequence or time"
NO_PEEK = "cannot show the messages of a channel"
NO_DEAD_LETTERS = "has no dead letters"
NO_DEFERRED = "has no list of deferred messages"

CASES = [
    # numbers: the sum of two brokers with three messages each
    Case("stat TOPIC --format csv", [",TOPIC,c,6,"]),
    Case("stat TOPIC --format csv", [",TOPIC,c,6,"], by_discovery=True),
    Case("stat TOPIC --by-broker --format csv", [",TOPIC,c,6,", ",TOPIC,c,3,", ",WELL,", ",NSQD,"]),
    Case("stat TOPIC --once", ["TOPIC  c "]),
    Case("nodes", ["WELL ", "NSQD ", "SILENT ", "DOWN ", "REFUSING "]),
    Case("nodes --format json", ['"address": "REFUSING", "status": "refused"'], by_discovery=True),
    Case("nodes --check", ["CRITICAL: 3 problems (5 brokers, 0 nsqlookupds)\n"], err=()),
    Case("clients TOPIC", err=["There are no connected clients in TOPIC."], answers=2),
    # topics
    Case("topic list", ["\nsource "]),
    Case("topic list --format json", ['{"topic": "source", "channels": ["c"], "paused": false}'], by_discovery=True),
    Case("topic create TOPIC.new", err=["topic TOPIC.new created on WELL", "topic TOPIC.new created on NSQD"]),
    Case("topic create TOPIC.new", err=["topic TOPIC.new created on WELL"], by_discovery=True),
    Case("topic pause TOPIC", err=["topic TOPIC paused on WELL", "topic TOPIC paused on NSQD"],
         after=lambda stats: stats is not None and stats["paused"]),
    Case("topic unpause TOPIC", err=["topic TOPIC unpaused on WELL", "topic TOPIC unpaused on NSQD"]),
    Case("topic empty TOPIC --yes", err=["on WELL", "on NSQD"]),
    Case("topic delete TOPIC --yes", err=["topic TOPIC deleted on WELL", "topic TOPIC deleted on NSQD"],
         after=lambda stats: stats is None),
    Case("topic delete TOPIC --yes --everywhere", by_discovery=True, answers=2,
         err=["topic TOPIC deleted on WELL", "topic TOPIC deleted on NSQD", "hidden from consumers at LOOKUPD",
              "deleted in nsqlookupd LOOKUPD"], after=lambda stats: stats is None),
    Case("topic settings TOPIC", ["# WELL\n", "max_messages=0\n"], no_nsqd=NO_SETTINGS),
    Case("topic set TOPIC max_messages=5", ["# WELL\n", "max_messages=5\n"], no_nsqd=NO_SETTINGS, answers=2),
    # channels
    Case("channel list TOPIC", ["TOPIC/c\n"]),
    Case("channel create TOPIC/d", err=["channel TOPIC/d created on WELL", "channel TOPIC/d created on NSQD"]),
    Case("channel pause TOPIC/c", err=["channel TOPIC/c paused on WELL", "channel TOPIC/c paused on NSQD"],
         after=lambda stats: bool(channel(stats)["paused"])),
    Case("channel unpause TOPIC/c", err=["channel TOPIC/c unpaused on WELL"]),
    Case("channel empty TOPIC/c --yes", err=["channel TOPIC/c emptied on WELL", "emptied on NSQD"],
         after=lambda stats: channel(stats)["depth"] == 0),
    Case("channel delete TOPIC/c --yes", err=["channel TOPIC/c deleted on WELL", "deleted on NSQD"],
         after=lambda stats: stats is not None and stats["channels"] == []),
    Case("channel seek TOPIC/c --to latest --yes", ["channel TOPIC/c on WELL: moved from sequence 0 to 3;"],
         no_nsqd=NO_POSITIONS),
    Case("channel settings TOPIC/c", ["# WELL\n", "max_attempts=0\n"], no_nsqd=NO_SETTINGS),
    Case("channel set TOPIC/c max_attempts=3", ["# WELL\n", "max_attempts=3\n"], no_nsqd=NO_SETTINGS, answers=2),
    # messages
    Case("peek TOPIC -n 3 --format raw", ["a\nb\nc\n"], no_nsqd=NO_POSITIONS),
    Case("peek TOPIC/c -n 3 --format raw", ["a\nb\nc\n"], no_nsqd=NO_PEEK, by_discovery=True),
    Case("tail TOPIC --from earliest --to latest", ["a\nb\nc\n"], no_nsqd=NO_POSITIONS),
    Case("tail TOPIC --from earliest --to latest", ["a\nb\nc\n"], no_nsqd=NO_POSITIONS, by_discovery=True),
    Case("replay TOPIC TOPIC.copy --from earliest --to latest --nsqd-tcp-address WELLTCP",
         no_nsqd=NO_POSITIONS),
    Case("deferred list TOPIC/c", ["later"], no_nsqd=NO_DEFERRED),
    Case("deferred list TOPIC/c --format json", ['"body": "later"'], no_nsqd=NO_DEFERRED, by_discovery=True),
    Case("deferred cancel TOPIC/c 0cb2f1a3c9400001", no_nsqd=NO_DEFERRED),
    Case("dlq list", ["failed"], no_nsqd=NO_DEAD_LETTERS),
    Case("dlq list failed --format json", ['"broker": "WELL"'], no_nsqd=NO_DEAD_LETTERS),
    Case("dlq show failed", ["source/c", "bad"], no_nsqd=NO_DEAD_LETTERS),
    Case("dlq requeue failed2", no_nsqd=NO_DEAD_LETTERS, answers=2),
]  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A command that has ended."""

    topic: str
    result: Result
    seconds: float


def prepare(brokers: Sequence[Broker]) -> None:
    """Create the topics of all cases on all brokers, each with three messages and a deferred one."""
    with ThreadPoolExecutor(len(brokers)) as threads:
        for each in threads.map(_prepare, brokers):
            assert each is None
    for broker in brokers[:2]:  # those of ours that need no secret
        # The cases run at the same time: one that requeues has dead letters of its own.
        for source, failed in (("source", "failed"), ("source2", "failed2")):
            broker.create(source, "c")
            broker.create(failed, "dead-letters")
            cli = cli_of(broker)
            rule = ("max_attempts=1", f"dead_letter_topic={failed}")
            assert cli("channel", "set", f"{source}/c", *rule).code == 0
            broker.post("/pub", b"bad", topic=source)
            fail_messages(broker.tcp_address, source, "c", 1)
            cli.wait_until(f"{failed}/dead-letters", lambda record: bool(record["depth"]))


def _prepare(broker: Broker) -> None:
    for number, case in enumerate(CASES):
        if "TOPIC" in case.line:
            topic = topic_of(number)
            broker.create(topic, "c")
            broker.post("/mpub", b"\n".join(BODIES), topic=topic)
            if case.line.startswith("deferred"):
                broker.post("/pub", b"later", topic=topic, defer=3_600_000)


def topic_of(number: int) -> str:
    return f"topic{number:02}"


@pytest.fixture(scope="module")
def wreck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wreck]:
    with wrecked_fleet(tmp_path_factory.mktemp("wreck"), prepare) as running:
        yield running


@pytest.fixture(scope="module")
def runs(wreck: Wreck) -> dict[str, Run]:
    """All cases, run at the same time, by their ids."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        done = threads.map(lambda number: _run(wreck, number), range(len(CASES)))
        return {case.id: run for case, run in zip(CASES, done, strict=True)}


def _run(wreck: Wreck, number: int) -> Run:
    case, topic = CASES[number], topic_of(number)
    cli = wreck.discovering if case.by_discovery else wreck.cli
    words = [_filled(word, wreck, topic) for word in shlex.split(case.line)]
    began = time.monotonic()
    result = cli(*words)
    return Run(topic, result, time.monotonic() - began)


def _filled(text: str, wreck: Wreck, topic: str) -> str:
    """Replace the placeholders in a text."""
    names = {"WELLTCP": wreck.well.tcp_address, "TOPIC": topic, "WELL": wreck.well.http_address}
    names |= {"NSQD": wreck.nsqd.http_address, "SILENT": wreck.silent.http_address}
    names |= {"DOWN": wreck.down.http_address, "REFUSING": wreck.refusing.http_address}
    for name, value in names.items():
        text = text.replace(name, value)
    return text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_partial_answer(wreck: Wreck, runs: dict[str, Run], case: Case) -> None:
    run = runs[case.id]
    out, err = run.result.out.decode(), run.result.err
    print(f"{run.seconds:.1f} s")  # shown by pytest -rP
    assert run.result.code == case.code, f"{out}\n{err}"
    for text in case.out:
        assert _filled(text, wreck, run.topic) in out, out
    for text in case.err:
        expected = _filled(text, wreck, run.topic)
        assert expected in err or _lookupd_text(text, wreck, run.topic, err), err
    told = out if case.line == "nodes --check" else err
    assert (
        f"The broker at {wreck.silent.http_address} does not answer: connected, but no answer within 5 s"
        in told
    )
    assert f"The broker at {wreck.refusing.http_address} requires a secret." in told
    assert (
        f"No broker answers at {wreck.down.http_address}: connection refused." in told
    ) != case.by_discovery
    assert (f"The broker at {wreck.nsqd.http_address} " in told) == bool(case.no_nsqd)
    if case.no_nsqd:
        assert f"The broker at {wreck.nsqd.http_address} {case.no_nsqd}: it is an nsqd" in told
    assert f"{wreck.well.http_address} does not" not in told
    assert "Traceback" not in err
    if case.after is not None:
        for broker in (wreck.well, wreck.nsqd):
            found = json.loads(broker.http("GET", "/stats", format="json", topic=run.topic))["topics"]
            assert case.after(found[0] if found else None), broker.http_address
    limit_s = case.answers * ANSWER_S + PATIENCE_S
    assert run.seconds < limit_s, f"it took {run.seconds:.1f} s"


def _lookupd_text(text: str, wreck: Wreck, topic: str, err: str) -> bool:
    return "LOOKUPD" in text and all(
        _filled(text.replace("LOOKUPD", lookupd.http_address), wreck, topic) in err
        for lookupd in wreck.lookupds
    )


LIMIT = "qcli.broker.admin_client.REQUEST_TIMEOUT_S"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait a second for an answer, where no broker answers."""
    monkeypatch.setattr(LIMIT, 1.0)


FAULTS = {
    "silent": (
        "The broker at {} does not answer: connected, but no answer within {} s.",
        ExitCode.UNREACHABLE,
    ),
    "down": ("No broker answers at {}: connection refused.", ExitCode.UNREACHABLE),
    "refusing": ("The broker at {} requires a secret.", ExitCode.FAILURE),
}
"""What a command says of a broker with a fault, and its exit code if no other broker answers."""
LINES = ["stat", "topic create TOPIC", "peek topic00", "nodes", "clients"]
EACH = list(itertools.product(LINES, FAULTS))
SHORT = [
    *(("stat", "silent"), ("stat", "down"), ("stat", "refusing")),
    *(("topic create TOPIC", "down"), ("peek topic00", "refusing")),
]


@pytest.mark.parametrize(("line", "fault"), [*SHORT, *in_soak(*(each for each in EACH if each not in SHORT))])
def test_one_fault(
    run_here: RunHere, wreck: Wreck, topic: str, line: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason, alone = FAULTS[fault]
    words = line.replace("TOPIC", f"{topic}.{fault}").split()
    failing: Broker = getattr(wreck, fault)
    if fault == "silent":
        monkeypatch.setattr(LIMIT, 4.0)  # the other broker must answer in time, on a busy machine, too
    some = run_here(cli_of(wreck.well, failing), *words)
    assert some.code == PARTIAL
    assert some.err.count("Error: ") == 1
    assert reason.format(failing.http_address, 4) in some.err
    monkeypatch.setattr(LIMIT, 1.0)
    none = run_here(cli_of(failing), *words)
    assert (none.code, reason.format(failing.http_address, 1) in none.err) == (alone, True)


def test_drain_of_a_hung_broker_ends_in_time(wreck: Wreck) -> None:
    def drain(options: str) -> tuple[Result, float]:
        began = time.monotonic()
        return cli_of(wreck.well)("drain", *options.split()), time.monotonic() - began

    lines = (
        f"--nsqd-http-address {wreck.silent.http_address}",
        f"--nsqd-http-address {wreck.well.http_address} --move-to {wreck.silent.http_address}",
    )
    with ThreadPoolExecutor(len(lines)) as threads:
        runs = list(threads.map(drain, lines))
    for result, seconds in runs:
        assert seconds < ANSWER_S + PATIENCE_S
        assert result.code == ExitCode.UNREACHABLE
        reason = (
            f"The broker at {wreck.silent.http_address} does not answer: connected, but no answer within 5 s."
        )
        assert reason in result.err
    assert not json.loads(wreck.well.http("GET", "/info")).get("draining")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("line", ["stat", "topic create other", *in_soak("peek topic00", "nodes", "clients")])
def test_no_broker_answers(run_here: RunHere, wreck: Wreck, line: str) -> None:
    none = run_here(cli_of(wreck.silent, wreck.down), *line.split())
    assert none.code == ExitCode.UNREACHABLE
    assert none.err.splitlines() == [
        "Error: 2 failures:",
        f"  The broker at {wreck.silent.http_address} does not answer: connected, but no answer within 1 s.",
        f"  No broker answers at {wreck.down.http_address}: connection refused.",
    ]


def test_secret_that_one_broker_needs(run_here: RunHere, wreck: Wreck) -> None:
    """A broker without authentication accepts any secret, so that one command reaches all."""
    both = cli_of(wreck.well, wreck.refusing)
    answered = run_here(both, "stat", "topic00", "--format", "json", env={"QCLI_CLIENT_AUTH_SECRET": SECRET})
    assert (answered.code, answered.err) == (0, "")
    assert [record["depth"] for record in answered.records] == [0, 6]
