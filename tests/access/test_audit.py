"""The state of the audit log: fields, and the bounds of its size."""

import json
import math
from typing import Any

from trio_nsq.access.audit import (
    MAX_QUEUED_LINES,
    MAX_REFUSALS,
    MAX_REFUSALS_OF_CLIENT,
    MAX_TEXT_BYTES,
    WINDOW_S,
    AuditLog,
)
from trio_nsq.access.policy import Identity

WEB = Identity("web", "token", (), key="sha256:00")
BACKUP = Identity("backup", "certificate", (), key="CN=backup")


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def make_log(clock: Clock | None = None) -> AuditLog:
    return AuditLog(enabled=True, unix_time=lambda: 1_700_000_000.25, clock_s=clock or Clock())


def taken(log: AuditLog) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.take().splitlines()]


def test_fields_and_their_order() -> None:
    log = make_log()
    log.record("action", "127.0.0.1:5", WEB, action="POST /topic/delete", topic="t", status=200, error="")
    assert log.take() == (
        b'{"time":"2023-11-14T22:13:20.250000Z","event":"action","address":"127.0.0.1:5","name":"web",'
        b'"source":"token","action":"POST /topic/delete","topic":"t","status":200}\n'
    )
    assert log.take() == b""


def test_certificate_is_recorded_by_its_subject() -> None:
    log = make_log()
    log.record("action", "[::1]:5", BACKUP)
    log.record("refused", "[::1]:6", None, subject="CN=unknown")
    log.record("action", "[::1]:7", WEB, subject="CN=both")
    assert [(each.get("name"), each.get("subject")) for each in taken(log)] == [
        ("backup", "CN=backup"),
        (None, "CN=unknown"),
        ("web", "CN=both"),
    ]


def test_disabled_log_records_nothing() -> None:
    log = AuditLog()
    log.record("action", "127.0.0.1:5", WEB)
    assert (log.take(), log.recorded) == (b"", 0)


def test_texts_of_clients_are_short_and_ascii() -> None:
    log = make_log()
    for text in ("x" * 5000, "\U0001f600" * 5000, "\x1b\n\r\x00" * 5000, "\udcff" * 5000):
        log.record("action", "127.0.0.1:5", None, topic=text)
    lines = log.take().splitlines()
    assert len(lines) == 4
    for line in lines:
        assert line.isascii()
        assert b"\x1b" not in line
        assert len(line) < MAX_TEXT_BYTES + 150
        assert json.loads(line)["topic"]


def test_flood_of_one_client_is_counted_and_hides_no_other_client() -> None:
    clock = Clock()
    log = make_log(clock)
    for port in range(1000):
        log.record("login_failed", f"10.0.0.1:{port}", None)
    log.record("login_failed", "10.0.0.2:1", None)
    first = taken(log)
    assert [each["address"].rpartition(":")[0] for each in first] == [
        *["10.0.0.1"] * MAX_REFUSALS_OF_CLIENT,
        "10.0.0.2",
    ]
    assert log.seconds_to_summary() == WINDOW_S
    clock.now_s += WINDOW_S
    assert log.seconds_to_summary() == 0
    (summary,) = taken(log)
    assert (summary["event"], summary["address"], summary["count"]) == (
        "suppressed",
        "10.0.0.1",
        1000 - MAX_REFUSALS_OF_CLIENT,
    )
    assert log.suppressed == 1000 - MAX_REFUSALS_OF_CLIENT
    assert log.seconds_to_summary() == math.inf
    log.record("login_failed", "10.0.0.1:1", None)
    assert len(taken(log)) == 1


def test_flood_from_many_addresses_is_bounded() -> None:
    clock = Clock()
    log = make_log(clock)
    for number in range(20_000):
        log.record("refused", f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:1", None)
    assert len(taken(log)) == MAX_REFUSALS
    clock.now_s += WINDOW_S
    (summary,) = taken(log)
    assert summary.keys() == {"time", "event", "count"}
    assert summary["count"] == 20_000 - MAX_REFUSALS


def test_flood_of_strangers_does_not_hide_refusals_of_authenticated_clients() -> None:
    log = make_log()
    for port in range(1000):
        log.record("refused", f"10.0.0.1:{port}", None)
    log.record("refused", "10.0.0.1:5", WEB)
    assert taken(log)[-1]["name"] == "web"


def test_every_refusal_is_recorded_or_counted() -> None:
    clock = Clock()
    log = make_log(clock)
    lines: list[dict[str, Any]] = []
    for number in range(5000):
        log.record("refused", f"10.0.0.{number % 7}:1", WEB if number % 3 else None)
        clock.now_s += 0.1
        if number % 50 == 0:
            lines += taken(log)
    log.finish()
    lines += taken(log)
    counted = sum(each.get("count", 1) for each in lines)
    assert counted == 5000
    assert len(lines) < 5000 / 2


def test_actions_have_no_limit_but_the_queue() -> None:
    log = make_log()
    for _ in range(MAX_QUEUED_LINES + 7):
        log.record("action", "10.0.0.1:5", WEB)
    lines = taken(log)
    assert len(lines) == MAX_QUEUED_LINES + 1
    assert (lines[-1]["event"], lines[-1]["count"]) == ("dropped", 7)
    assert (log.recorded, log.dropped) == (MAX_QUEUED_LINES, 7)
    log.record("action", "10.0.0.1:5", WEB)
    assert [each["event"] for each in taken(log)] == ["action"]


def test_writer_is_told_of_lines_and_of_the_first_suppressed_refusal() -> None:
    log = make_log()
    calls = []
    log.on_change = lambda: calls.append(log.suppressed)
    for _ in range(MAX_REFUSALS_OF_CLIENT + 5):
        log.record("refused", "10.0.0.1:5", None)
    assert calls == [*[0] * MAX_REFUSALS_OF_CLIENT, 1]
