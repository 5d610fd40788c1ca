"""nsq_to_http and `qcli to-http` send the same requests, but for the named differences."""

import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import pytest

from cli.support import Cli, run_in_process
from fleet.support import wait_until
from interop.connectors import (
    Answers,
    Call,
    Receiver,
    await_finished,
    connector,
    drain,
    publish,
    receiving,
    stop,
)
from interop.peers import Broker, Child, nsqd, qcli_serve

pytestmark = [pytest.mark.interop, pytest.mark.slow]

CHANNEL = "nsq_to_http"
PROGRAMS = {"nsq_to_http": 0, "to-http": 143}
"""The programs, and their exit codes after SIGTERM."""
OWN_HEADERS = {"host", "user-agent", "accept", "accept-encoding", "connection"}
"""Each program has its own of these, if the user gives none."""
RETRY_AT_ONCE = {
    "nsq_to_http": ("--consumer-opt=default_requeue_delay,10ms", "--consumer-opt=max_backoff_duration,0s"),
    "to-http": ("--retry-delay=10ms",),
}
_numbers = itertools.count()


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Broker]]:
    """The source of each program."""
    folder = tmp_path_factory.mktemp("brokers")
    with nsqd(folder / "nsqd") as theirs, qcli_serve(folder / "ours") as ours:
        yield {"nsq_to_http": theirs, "to-http": ours}


@dataclass(frozen=True)
class Sent:
    """What a program did.

    Attributes:
        topic: The topic.
        receivers: The receivers.
        requeued: How often a message was requeued.
    """

    topic: str
    receivers: Sequence[Receiver]
    requeued: int

    @property
    def calls(self) -> list[Call]:
        """The requests that the first receiver got."""
        return self.receivers[0].calls


def send(
    brokers: dict[str, Broker],
    program: str,
    bodies: Sequence[bytes],
    *flags: str,
    answers: Sequence[Answers] = (lambda number, call: 200,),
) -> Sent:
    """Run a program until all messages are finished.

    Args:
        flags: `URL` stands for the address of a receiver: a flag with it is repeated for each.
        answers: What the receivers answer.
    """
    broker, topic = brokers[program], f"requests{next(_numbers)}"
    broker.create(topic, CHANNEL)
    broker.create(f"{topic}.dead", "c")
    publish(broker, topic, bodies)
    with ExitStack() as stack:
        receivers = [stack.enter_context(receiving(each)) for each in answers]
        given = [f"--topic={topic}"]
        for flag in flags:
            given += [flag.replace("URL", one.address) for one in receivers] if "URL" in flag else [flag]
        child = stack.enter_context(connector(program, broker, *given))
        await_finished(broker, topic, CHANNEL, child)
        requeued = broker.channel_stats(topic, CHANNEL)["requeue_count"]
        assert stop(child) == PROGRAMS[program]
    return Sent(topic, receivers, requeued)


# ---------------------------------------------------------------------- requests

BODIES = [b"a", b"he\0llo &%+\n\xc3\xa9\xff", bytes(range(256)), b"x" * 100_000]
CASES: dict[str, tuple[str, ...]] = {
    "POST": ("--post=URL/p?q=1&r=%20",),
    "content type": ("--post=URL/", "--content-type=application/json"),
    "headers": (
        *("--post=URL/", "--header=X-A: 1", "--header=x-b:2:3", "--header=X-C:  blanks  in  it  "),
        *("--header=user-agent: me", "--header=Content-Type: text/plain"),
    ),
    "GET, query": ("--get=URL/?m=%s&z=",),
    "GET, path": ("--get=URL/a/%s/b",),
    "short flags": ("-post=URL/", "-n", "2", "-max-in-flight", "7"),
    "sample": ("--post=URL/", "--sample=0"),
}


def requests(sent: Sent) -> Counter[tuple[object, ...]]:
    """Return the requests, in any order, without what each program has its own of."""
    assert {call.headers["host"] for call in sent.calls} <= {
        sent.receivers[0].address.removeprefix("http://")
    }
    return Counter(
        (
            call.method,
            call.target,
            call.body,
            *sorted(
                (name, value)
                for name, value in call.headers.items()
                if name not in OWN_HEADERS or value == "me"
            ),
        )
        for call in sent.calls
    )


@pytest.mark.parametrize("name", CASES)
def test_same_requests(brokers: dict[str, Broker], name: str) -> None:
    bodies = BODIES[:3] if name.startswith("GET") else BODIES
    theirs, ours = (requests(send(brokers, program, bodies, *CASES[name])) for program in PROGRAMS)
    assert ours == theirs
    assert theirs.total() == (0 if name == "sample" else len(bodies))


def test_own_headers(brokers: dict[str, Broker]) -> None:
    """Row `to-http-agent`."""
    theirs, ours = (send(brokers, program, [b"a"], "--post=URL/").calls[0].headers for program in PROGRAMS)
    assert theirs["user-agent"] == "nsq_to_http v1.3.0"
    assert ours["user-agent"].startswith("trio-nsq/")


# ---------------------------------------------------------------------- statuses

STATUSES = (200, 201, 204, 299, 301, 302, 307, 304, 400, 404, 408, 410, 429, 500, 501, 503)
SUCCESS = "finished"
RETRIED = "sent again"
FOLLOWED = "redirection followed"
DEAD = "dead letter"
DIFFERENT: dict[tuple[str, int], tuple[str, str]] = {
    **{("get", status): (RETRIED, SUCCESS) for status in (201, 204, 299)},
    **{(method, status): (FOLLOWED, DEAD) for method in ("post", "get") for status in (301, 302, 307)},
    **{
        (method, status): (RETRIED, DEAD)
        for method in ("post", "get")
        for status in (304, 400, 404, 410, 501)
    },
}
"""What nsq_to_http does, and what `to-http` does: the rows `to-http-get`, `to-http-redirect` and `to-http-final`."""


def fates(brokers: dict[str, Broker], program: str, method: str) -> dict[tuple[str, int], str]:
    """Return what happens to a message that is answered with a status once, and with 200 from then on."""
    seen: Counter[str] = Counter()
    lock = threading.Lock()

    def answer(number: int, call: Call) -> int:
        wanted = call.body.decode() if method == "post" else call.target.removeprefix("/")
        if call.target == "/elsewhere":
            return 200
        with lock:
            seen[wanted] += 1
        return int(wanted) if seen[wanted] == 1 else 200

    bodies = [b"%d" % status for status in STATUSES]
    url = "--post=URL/" if method == "post" else "--get=URL/%s"
    sent = send(brokers, program, bodies, url, *RETRY_AT_ONCE[program], answers=[answer])
    dead: set[int] = set()
    if program == "to-http":
        count = brokers[program].channel_stats(f"{sent.topic}.dead", "c")["depth"]
        dead = {int(body) for body in drain(brokers[program], f"{sent.topic}.dead", "c", count)}
    followed = Counter(call.target for call in sent.calls)["/elsewhere"]
    assert followed in (0, 3)
    found = {}
    for status in STATUSES:
        again = seen[str(status)] == 2
        fate = DEAD if status in dead else RETRIED if again else SUCCESS
        found[method, status] = FOLLOWED if followed and status in (301, 302, 307) else fate
    return found


@pytest.mark.parametrize("method", ["post", "get"])
def test_same_statuses(brokers: dict[str, Broker], method: str) -> None:
    theirs, ours = (fates(brokers, program, method) for program in PROGRAMS)
    different = {key: (theirs[key], ours[key]) for key in theirs if theirs[key] != ours[key]}
    assert different == {key: fate for key, fate in DIFFERENT.items() if key[0] == method}


def test_message_that_always_fails(brokers: dict[str, Broker]) -> None:
    """Row `to-http-lost`: after the last attempt nsq_to_http drops the message."""
    refuse: Answers = lambda number, call: 500  # noqa: E731  # its type is declared
    for program in PROGRAMS:
        flags = ("--post=URL/", "--consumer-opt=max_attempts,2", *RETRY_AT_ONCE[program])
        sent = send(brokers, program, [b"a"], *flags, answers=[refuse])
        assert [call.body for call in sent.calls] == [b"a", b"a"]
        if program == "to-http":
            assert drain(brokers[program], f"{sent.topic}.dead", "c", 1) == [b"a"]


def test_receiver_that_cannot_be_reached(brokers: dict[str, Broker]) -> None:
    """Row `to-http-waits`: nsq_to_http requeues messages, which counts as an attempt; `to-http` keeps them."""
    for program, broker in brokers.items():
        topic = f"unreachable-{program}"
        broker.create(topic, CHANNEL)
        publish(broker, topic, [b"a"])
        with connector(program, broker, f"--topic={topic}", "--post=http://127.0.0.1:1/") as child:
            wait_until(partial(has_failed, child), "a request has failed")
            if program == "nsq_to_http":
                wait_until(partial(has_requeued, broker, topic), "the message is requeued")
            else:
                assert not has_requeued(broker, topic)
            assert stop(child) == PROGRAMS[program]


def has_failed(child: Child) -> bool:
    return any("127.0.0.1:1/" in line for line in child.stderr.seen)


def has_requeued(broker: Broker, topic: str) -> bool:
    return bool(broker.channel_stats(topic, CHANNEL)["requeue_count"] > 0)


# ---------------------------------------------------------------------- several receivers, several requests


@pytest.mark.parametrize("mode", ["hostpool", "round-robin"])
def test_same_shares(brokers: dict[str, Broker], mode: str) -> None:
    bodies = [b"%d" % number for number in range(60)]
    for program in PROGRAMS:
        flags = ("--post=URL/", f"--mode={mode}", "--n=1")
        sent = send(brokers, program, bodies, *flags, answers=[lambda number, call: 200] * 3)
        assert [len(receiver.calls) for receiver in sent.receivers] == [20, 20, 20]
        assert sorted(call.body for receiver in sent.receivers for call in receiver.calls) == sorted(bodies)


def test_same_receiver_left_out(brokers: dict[str, Broker]) -> None:
    bodies = [b"%d" % number for number in range(60)]
    answers: list[Answers] = [lambda number, call: 500, lambda number, call: 200]
    for program in PROGRAMS:
        flags = ("--post=URL/", "--n=1", *RETRY_AT_ONCE[program])
        sent = send(brokers, program, bodies, *flags, answers=answers)
        refusing, working = sent.receivers
        assert len(refusing.calls) == 1
        assert sorted(call.body for call in working.calls) == sorted(bodies)


def test_same_concurrency(brokers: dict[str, Broker]) -> None:
    for program in PROGRAMS:
        together = threading.Barrier(3)

        def answer(number: int, call: Call) -> int:
            together.wait(30)  # noqa: B023
            return 200

        bodies = [b"%d" % number for number in range(12)]
        sent = send(brokers, program, bodies, "--post=URL/", "--n=3", answers=[answer])
        assert sent.receivers[0].most == 3


# ---------------------------------------------------------------------- the command line

WRONG: dict[str, Sequence[str]] = {
    "no receiver": (),
    "POST and GET": ("--post=http://127.0.0.1:1/", "--get=http://127.0.0.1:1/%s"),
    "GET without %s": ("--get=http://127.0.0.1:1/",),
    "GET with two %s": ("--get=http://127.0.0.1:1/%s%s",),
    "sample": ("--post=http://127.0.0.1:1/", "--sample=2"),
    "header": ("--post=http://127.0.0.1:1/", "--header=a"),
    "empty header": ("--post=http://127.0.0.1:1/", "--header=a:"),
    "content type of GET": ("--get=http://127.0.0.1:1/%s", "--content-type=a/b"),
    "option of the client": ("--post=http://127.0.0.1:1/", "--consumer-opt=nonsense,1"),
    "no publishers": ("--post=http://127.0.0.1:1/", "--n=0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_same_refusals(
    brokers: dict[str, Broker], capfdbinary: pytest.CaptureFixture[bytes], name: str
) -> None:
    """Row `connector-usage`."""
    with connector("nsq_to_http", brokers["nsq_to_http"], "--topic=t", *WRONG[name]) as child:
        assert child.wait(30) in (1, 2)
    ours = brokers["to-http"]
    cli = Cli(ours.tcp_address, ours.http_address)
    assert run_in_process(capfdbinary, cli, "to-http", "--topic=t", *WRONG[name]).code == 2
