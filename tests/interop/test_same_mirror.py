"""nsq_to_nsq and `qcli to-nsq` copy the same messages, but for the named differences."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from cli.support import Cli, run_in_process
from interop.connectors import await_finished, connector, drain, publish, stop
from interop.peers import Broker, nsqd, qcli_serve
from interop.same.table import rows

pytestmark = [pytest.mark.interop, pytest.mark.slow]

CHANNEL = "nsq_to_nsq"
PROGRAMS = {"nsq_to_nsq": 0, "to-nsq": 143}
"""The programs, and their exit codes after SIGTERM."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Brokers:
    """Where a program copies from, and where to."""

    source: Broker
    destination: Broker


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Brokers]]:
    """Real brokers for nsq_to_nsq, ours for `to-nsq`."""
    folder = tmp_path_factory.mktemp("brokers")
    with (
        nsqd(folder / "nsqd-a", "--mem-queue-size=100000", "--node-id=1000") as a,
        nsqd(folder / "nsqd-b", "--mem-queue-size=100000", "--node-id=1001") as b,
        qcli_serve(folder / "ours-a", "--node-id=1") as c,
        qcli_serve(folder / "ours-b", "--node-id=2") as d,
    ):
        yield {"nsq_to_nsq": Brokers(a, b), "to-nsq": Brokers(c, d)}


def mirror(program: str, brokers: Brokers, bodies: Sequence[bytes], *flags: str) -> list[bytes]:
    """Copy messages, and return what arrived.

    `to-nsq` gets the HTTP address of the destination too: otherwise it looks for it for seconds beside the TCP port.
    """
    topic = f"mirror{next(_numbers)}"
    brokers.source.create(topic, CHANNEL)
    brokers.destination.create(topic, "c")
    publish(brokers.source, topic, bodies)
    to = [f"--destination-nsqd-tcp-address={brokers.destination.tcp_address}"]
    if program == "to-nsq":
        to.append(f"--destination-nsqd-http-address={brokers.destination.http_address}")
    with connector(program, brokers.source, f"--topic={topic}", *to, *flags) as child:
        await_finished(brokers.source, topic, CHANNEL, child)
        assert stop(child) == PROGRAMS[program]
    count = brokers.destination.channel_stats(topic, "c")["depth"]
    return drain(brokers.destination, topic, "c", count)


# ---------------------------------------------------------------------- bodies


@pytest.mark.parametrize("other", ["own brokers", "from nsqd", "to nsqd", "nsqd to nsqd"])
def test_same_messages(brokers: dict[str, Brokers], other: str) -> None:
    bodies = [b"a", b"\0\xff\n", b'{"a":1}', b"x" * 100_000, *(b"%d" % number for number in range(1000))]
    theirs, ours = brokers.values()
    used = {
        "own brokers": ours,
        "from nsqd": Brokers(theirs.source, ours.destination),
        "to nsqd": Brokers(ours.source, theirs.destination),
        "nsqd to nsqd": theirs,
    }[other]
    assert mirror("to-nsq", used, bodies) == bodies
    if other == "own brokers":
        assert mirror("nsq_to_nsq", theirs, bodies) == bodies


# ---------------------------------------------------------------------- JSON options

NO_OBJECTS = [b'[{"a":1}]', b"not json", b'"a"', b'{"a":1} x', b"1", b"\xff"]
VALUES = [
    *(b'{"a":"1"}', b'{"a":1}', b'{"a":1.0}', b'{"a":10e-1}', b'{"a":"1.0"}', b'{"a":null}', b'{"a":[1]}'),
    *(b'{"a":2}', b'{"a":"\\u0031"}', b'{"a":" 1"}', b'{"a":-1}', b'{"a":{"a":1}}'),
]
FIELDS = ("--whitelist-json-field=a", "--whitelist-json-field=b")


@dataclass(frozen=True)
class Different:
    """A message that the programs treat differently, for the reason in a row of differences.md.

    Attributes:
        theirs: What nsq_to_nsq makes of it; None: it is left out.
        ours: What `to-nsq` makes of it.
    """

    row: str
    body: bytes
    theirs: bytes | None
    ours: bytes | None


@dataclass(frozen=True)
class Filter:
    """Options, and messages that both programs treat equally, or not."""

    flags: tuple[str, ...]
    same: Sequence[bytes]
    different: Sequence[Different] = ()


BIG = b'{"a":9007199254740993,"b":12345678901234567890}'
FILTERS = {
    "field": Filter(
        ("--require-json-field=a",),
        [
            *(b'{"a":1,"b":2}', b'{"b":2}', b'{"a":null}', b'{"a":{"x":1}}', b'{"A":1}', b'{"a":1,"a":2}'),
            *(b' { "a" : 1 }\n', b'{"a":""}', b'{"a":"\\ud800"}', b"{}", b"null"),
        ],
        [Different("to-nsq-numbers", b'{"a":1e400}', None, b'{"a":1e400}')],
    ),
    "field with a dot": Filter(("--require-json-field=a.b",), [b'{"a.b":1}', b'{"a":{"b":1}}']),
    "value 1": Filter(("--require-json-field=a", "--require-json-value=1"), VALUES),
    "value 1.0": Filter(("--require-json-field=a", "--require-json-value=1.0"), VALUES),
    "value true": Filter(
        ("--require-json-field=a", "--require-json-value=true"),
        [b'{"a":"true"}', b'{"a":false}', b'{"a":1}'],
        [Different("to-nsq-words", b'{"a":true}', None, b'{"a":true}')],
    ),
    "value above 2^53": Filter(
        ("--require-json-field=a", "--require-json-value=9007199254740993"),
        [b'{"a":9007199254740993}', b'{"a":1}'],
        [Different("to-nsq-exact", b'{"a":9007199254740992}', b'{"a":9007199254740992}', None)],
    ),
    "field list": Filter(
        FIELDS,
        [
            *(b'{"a":2,"b":1,"c":3}', b'{"c":3}', b'{"a":true,"b":[]}', b'{"A":1}', b'{"a":"x"}'),
            *(b'{"a":{"x":1,"y":[1,{"z":null}]},"b":0.5}', b'{"a":"\xc3\xa9"}', b'{"a":"\\b\\f\\n\\u0001"}'),
        ],
        [
            Different("to-nsq-integers", BIG, b'{"a":9007199254740992,"b":12345678901234567000}', BIG),
            Different("to-nsq-text", b'{"a":1.0}', b'{"a":1}', b'{"a":1.0}'),
            Different("to-nsq-text", b'{"a":"<\\u00e9"}', b'{"a":"\\u003c\xc3\xa9"}', b'{"a":"<\\u00e9"}'),
            Different(
                "to-nsq-text", b'{"b":{"z":1,"y" : 2}}', b'{"b":{"y":2,"z":1}}', b'{"b":{"z":1,"y" : 2}}'
            ),
            Different("to-nsq-text", b'{"a":"\\ud800"}', b'{"a":"\xef\xbf\xbd"}', b'{"a":"\\ud800"}'),
        ],
    ),
    "field list and value": Filter(
        ("--require-json-field=a", "--require-json-value=1", *FIELDS[::-1]),
        [b'{"a":2,"b":3}', b'{"a":1}'],
        [Different("to-nsq-order", b'{"a":1,"b":2}', b'{"a":1,"b":2}', b'{"b":2,"a":1}')],
    ),
}


@pytest.mark.parametrize("name", FILTERS)
def test_same_filters(brokers: dict[str, Brokers], name: str) -> None:
    case = FILTERS[name]
    assert {each.row for each in case.different} <= rows().keys()
    bodies = [*case.same, *(each.body for each in case.different)]
    theirs, ours = (mirror(program, used, bodies, *case.flags) for program, used in brokers.items())
    for expected, found in (
        ([each.theirs for each in case.different if each.theirs is not None], theirs),
        ([each.ours for each in case.different if each.ours is not None], ours),
    ):
        assert found[len(found) - len(expected) :] == expected
        del found[len(found) - len(expected) :]
    assert ours == theirs
    assert theirs


def test_bodies_that_are_no_objects_are_kept(brokers: dict[str, Brokers]) -> None:
    """Row `to-nsq-not-json`: nsq_to_nsq drops them."""
    target = brokers["to-nsq"].destination
    topic = "kept"
    target.create(f"{topic}.not-json", "c")
    bodies = [*NO_OBJECTS, b'{"a":1}']
    flags = ["--require-json-field=a", f"--destination-topic={topic}"]
    assert mirror("nsq_to_nsq", brokers["nsq_to_nsq"], bodies, flags[0]) == [b'{"a":1}']
    mirror("to-nsq", brokers["to-nsq"], bodies, *flags)
    assert drain(target, f"{topic}.not-json", "c", len(NO_OBJECTS)) == NO_OBJECTS


# ---------------------------------------------------------------------- destinations


@pytest.mark.parametrize("mode", ["hostpool", "round-robin"])
def test_same_shares(brokers: dict[str, Brokers], mode: str) -> None:
    """Each of two destinations gets half of the messages; `to-nsq` may send them in batches."""
    bodies = [b"%d" % number for number in range(100)]
    for program, used in brokers.items():
        topic = f"shares-{mode}-{program}"
        both = [used.source, used.destination]
        used.source.create(topic, CHANNEL)
        for broker in both:
            broker.create(f"{topic}.copy", "c")
        publish(used.source, topic, bodies)
        flags = [f"--destination-nsqd-tcp-address={broker.tcp_address}" for broker in both]
        # `hostpool` shows that the flags of nsq_to_nsq are enough.
        if program == "to-nsq" and mode == "round-robin":
            flags += [f"--destination-nsqd-http-address={broker.http_address}" for broker in both]
        flags += [f"--topic={topic}", f"--destination-topic={topic}.copy", f"--mode={mode}"]
        with connector(program, used.source, *flags) as child:
            await_finished(used.source, topic, CHANNEL, child)
            assert stop(child) == PROGRAMS[program]
        counts = [broker.channel_stats(f"{topic}.copy", "c")["depth"] for broker in both]
        arrived = [
            drain(broker, f"{topic}.copy", "c", count) for broker, count in zip(both, counts, strict=True)
        ]
        assert sorted(body for each in arrived for body in each) == sorted(bodies)
        assert program == "to-nsq" or counts == [50, 50]


# ---------------------------------------------------------------------- the command line

TO = "--destination-nsqd-tcp-address=127.0.0.1:1"
WRONG: dict[str, list[str]] = {
    "no destination": ["--topic=t"],
    "no topic": [TO],
    "bad topic": [TO, "--topic=b d"],
    "bad destination": [TO, "--topic=t", "--destination-topic=b d"],
    "bad channel": [TO, "--topic=t", "--channel=b d"],
    "option of the consumer": [TO, "--topic=t", "--consumer-opt=nonsense,1"],
    "option of the producer": [TO, "--topic=t", "--producer-opt=write_timeout,-1s"],
}


@pytest.mark.parametrize("name", WRONG)
def test_same_refusals(
    brokers: dict[str, Brokers], capfdbinary: pytest.CaptureFixture[bytes], name: str
) -> None:
    """Row `connector-usage`."""
    with connector("nsq_to_nsq", brokers["nsq_to_nsq"].source, *WRONG[name]) as child:
        assert child.wait(30) in (1, 2)
    ours = brokers["to-nsq"].source
    cli = Cli(ours.tcp_address, ours.http_address)
    assert run_in_process(capfdbinary, cli, "to-nsq", *WRONG[name]).code == 2


def test_value_without_field(brokers: dict[str, Brokers]) -> None:
    """Row `to-nsq-value`: nsq_to_nsq ignores the value, and copies everything."""
    assert mirror("nsq_to_nsq", brokers["nsq_to_nsq"], [b"x"], "--require-json-value=1") == [b"x"]
    with connector("to-nsq", brokers["to-nsq"].source, "--topic=t", TO, "--require-json-value=1") as child:
        assert child.wait(30) == 2
