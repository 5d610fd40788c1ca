"""Tests for RFC 3339 times beside Unix nanoseconds in JSON records."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.support import Cli, fail_messages, only_ours
from interop.peers import Broker
from qcli.framework.output import json_lines
from qcli.framework.positions import BrokerPosition
from trio_nsq.protocol.message_json import rfc3339

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def check_times(record: dict[str, Any]) -> int:
    """Check that each Unix time is followed by its RFC 3339 form; return how many there are."""
    names, found = list(record), 0
    for place, name in enumerate(names):
        if isinstance(record[name], dict):
            found += check_times(record[name])
        if name.endswith("_ns"):
            assert names[place + 1] == name.removesuffix("_ns")
            assert record[names[place + 1]] == (record[name] and rfc3339(record[name]))
            found += 1
    return found


@given(st.integers(0, 2**63 - 1))
def test_time_is_exact_in_utc(time_ns: int) -> None:
    text = rfc3339(time_ns)
    assert text is not None
    assert len(text) == len("2026-11-23T00:34:50.123456789Z")
    assert datetime.fromisoformat(text) == EPOCH + timedelta(microseconds=time_ns // 1000)
    assert text.endswith(f"{time_ns % 10**9:09d}Z")
    seconds, ns = divmod(time_ns, 10**9)
    assert BrokerPosition().convert(text, None, None) == f"@{seconds}.{ns:09d}"


def test_known_times() -> None:
    assert rfc3339(0) == "1970-01-01T00:00:00.000000000Z"
    assert rfc3339(1795393583256494171) == "2026-11-23T00:26:23.256494171Z"
    assert rfc3339(10**24) is None  # past the year 9999: a hostile broker's


def test_records_get_times_and_keep_everything_else() -> None:
    record = {"a": 1, "x_ns": 5 * 10**9, "inner": {"y_ns": None, "z": "äß\u2028"}, "body": "due_ns"}
    found = json.loads(json_lines([record]))
    assert list(found) == ["a", "x_ns", "x", "inner", "body"]
    assert found["x"] == "1970-01-01T00:00:05.000000000Z"
    assert found["inner"] == {"y_ns": None, "y": None, "z": "äß\u2028"}
    assert {name: value for name, value in found.items() if name in ("a", "x_ns", "body")} == {
        name: value for name, value in record.items() if name != "inner"
    }


@only_ours
@pytest.mark.parametrize("form", ["deferred", "peek", "tail", "dead"])
def test_commands_write_both_forms(qcli: Cli, broker: Broker, topic: str, form: str) -> None:
    broker.create(topic, "c")
    qcli("pub", topic, "-q", "--defer", "1h" if form == "deferred" else "0", stdin=b"a\n")
    if form == "dead":
        qcli("channel", "set", f"{topic}/c", "max_attempts=1", f"dead_letter_topic={topic}.dead")
        fail_messages(broker.tcp_address, topic, "c", 1)
        qcli.wait_until(f"{topic}.dead", lambda record: record["message_count"] == 1)
    commands = {
        "deferred": [(2, ["deferred", "list", f"{topic}/c"]), (2, ["tail", topic, "--to", "latest"])],
        "peek": [(2, ["peek", f"{topic}/c"]), (2, ["peek", topic])],
        "tail": [(1, ["tail", f"{topic}/c", "-n", "1"])],
        "dead": [(2, ["dlq", "list", f"{topic}.dead"]), (3, ["dlq", "show", f"{topic}.dead"])],
    }
    for count, args in commands[form]:
        (record,) = qcli(*args, "--format", "json").records
        assert check_times(record) == count
        assert (record.get("due") is not None) == (form == "deferred")
