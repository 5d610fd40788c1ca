"""nsq_to_nsq and `qcli to-nsq` copy the same messages, but for the named differences."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

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
    """Copy messages, and return what arrived."""
    topic = f"mirror{next(_numbers)}"
    brokers.source.create(topic, CHANNEL)
    brokers.destination.create(topic, "c")
    publish(brokers.source, topic, bodies)
    to = f"--destination-nsqd-tcp-address={brokers.destination.tcp_address}"
    with connector(program, brokers.source, f"--topic={topic}", to, *flags) as child:
        await_finished(brokers.source, topic, CHANNEL, child)
        assert stop(child) == PROGRAMS[program]
    count = brokers.destination.channel_stats(topic, "c")["depth"]
    return drain(brokers.destination, topic, "c", count)


# ---------------------------------------------------------------------- bodies


@pytest.mark.parametrize("other", ["own brokers", "from nsqd", "to nsqd", "nsqd to nsqd"])
def test_same_messages(brokers: dict[str, Brokers], other: str) -> None:
    bodies = [b"a", b"\0\xff\n", b'{"a":1}', b"x" * 100_000, *(b"%d" % number for number in range(5000))]
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

REQUIRED = [
    *(b'{"a":1,"b":2}', b'{"b":2}', b'{"a":null}', b'{"a":{"x":1}}', b'{"A":1}', b'{"a":1,"a":2}'),
    *(b' { "a" : 1 }\n', b'{"a":""}', b'{"a":"\\ud800"}', b"{}"),
]
VALUES = [
    *(b'{"a":"1"}', b'{"a":1}', b'{"a":1.0}', b'{"a":10e-1}', b'{"a":"1.0"}', b'{"a":true}', b'{"a":null}'),
    *(b'{"a":[1]}', b'{"a":2}', b'{"a":"\\u0031"}', b'{"a":" 1"}', b'{"a":-1}', b'{"a":{"a":1}}'),
]
NO_OBJECTS = [b'[{"a":1}]', b"not json", b'"a"', b'{"a":1} x', b"1", b"\xff"]

SAME_FILTERS: dict[str, tuple[list[bytes], list[str]]] = {
    "field": (REQUIRED, ["--require-json-field=a"]),
    "value 1": (VALUES, ["--require-json-field=a", "--require-json-value=1"]),
    "value 1.0": (VALUES, ["--require-json-field=a", "--require-json-value=1.0"]),
    "field with a dot": ([b'{"a.b":1}', b'{"a":{"b":1}}'], ["--require-json-field=a.b"]),
    "no JSON objects": ([*NO_OBJECTS, b"null"], ["--require-json-field=a", "--not-json=drop"]),
    "field list": (
        [
            *(b'{"a":2,"b":1,"c":3}', b'{"c":3}', b'{"a":true,"b":[]}', b'{"A":1}', b'{"a":"x"}'),
            *(b'{"a":{"x":1,"y":[1,{"z":null}]},"b":0.5}', b'{"a":"\xc3\xa9"}', b'{"a":"\\b\\f\\n\\u0001"}'),
        ],
        ["--whitelist-json-field=a", "--whitelist-json-field=b"],
    ),
    "field list and value": (
        [b'{"a":1,"b":2}', b'{"a":2,"b":3}'],
        ["--require-json-field=a", "--require-json-value=1", "--whitelist-json-field=b"],
    ),
}


@pytest.mark.parametrize("name", SAME_FILTERS)
def test_same_filters(brokers: dict[str, Brokers], name: str) -> None:
    bodies, flags = SAME_FILTERS[name]
    theirs = mirror(
        "nsq_to_nsq", brokers["nsq_to_nsq"], bodies, *(each for each in flags if "not-json" not in each)
    )
    ours = mirror("to-nsq", brokers["to-nsq"], bodies, *flags)
    assert ours == theirs


BIG = b'{"a":9007199254740993,"b":12345678901234567890}'
FIELDS = ["--whitelist-json-field=a", "--whitelist-json-field=b"]
DIFFERENT: dict[str, tuple[list[str], list[bytes], list[bytes], list[bytes]]] = {
    # row: options; messages; what nsq_to_nsq makes of them; what to-nsq makes of them
    "to-nsq-integers": (FIELDS, [BIG], [b'{"a":9007199254740992,"b":12345678901234567000}'], [BIG]),
    "to-nsq-text": (
        FIELDS,
        [b'{"a":1.0,"b":"<\\u00e9>"}', b'{"b":{"z":1e3,"y" : 2}}', b'{"a":"\\ud800"}'],
        [b'{"a":1,"b":"\\u003c\xc3\xa9\\u003e"}', b'{"b":{"y":2,"z":1000}}', b'{"a":"\xef\xbf\xbd"}'],
        [b'{"a":1.0,"b":"<\\u00e9>"}', b'{"b":{"z":1e3,"y" : 2}}', b'{"a":"\\ud800"}'],
    ),
    "to-nsq-order": (FIELDS[::-1], [b'{"a":1,"b":2}'], [b'{"a":1,"b":2}'], [b'{"b":2,"a":1}']),
    "to-nsq-numbers": (["--require-json-field=a"], [b'{"a":1e400}'], [], [b'{"a":1e400}']),
    "to-nsq-exact": (
        ["--require-json-field=a", "--require-json-value=9007199254740993"],
        [b'{"a":9007199254740993}', b'{"a":9007199254740992}'],
        [b'{"a":9007199254740993}', b'{"a":9007199254740992}'],
        [b'{"a":9007199254740993}'],
    ),
    "to-nsq-words": (
        ["--require-json-field=a", "--require-json-value=true"],
        [b'{"a":true}', b'{"a":"true"}', b'{"a":false}'],
        [b'{"a":"true"}'],
        [b'{"a":true}', b'{"a":"true"}'],
    ),
}


@pytest.mark.parametrize("row", DIFFERENT)
def test_different_filters(brokers: dict[str, Brokers], row: str) -> None:
    assert row in rows()
    flags, bodies, theirs, ours = DIFFERENT[row]
    assert mirror("nsq_to_nsq", brokers["nsq_to_nsq"], bodies, *flags) == theirs
    assert mirror("to-nsq", brokers["to-nsq"], bodies, *flags) == ours


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
def test_same_refusals(brokers: dict[str, Brokers], name: str) -> None:
    codes = {}
    for program, used in brokers.items():
        with connector(program, used.source, *WRONG[name]) as child:
            codes[program] = child.wait(30)
    assert codes["nsq_to_nsq"] in (1, 2)
    assert codes["to-nsq"] == 2


def test_value_without_field(brokers: dict[str, Brokers]) -> None:
    """Row `to-nsq-value`: nsq_to_nsq ignores the value, and copies everything."""
    assert mirror("nsq_to_nsq", brokers["nsq_to_nsq"], [b"x"], "--require-json-value=1") == [b"x"]
    with connector("to-nsq", brokers["to-nsq"].source, "--topic=t", TO, "--require-json-value=1") as child:
        assert child.wait(30) == 2
