"""Tests for the names of output files."""

import locale
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from trio_nsq.connectors.to_file.names import FILENAME_FORMAT, FileNameError, NameFormat, host_identifier

NOW = datetime(2026, 11, 3, 4, 5, 6, tzinfo=UTC).timestamp()


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def names(
    template: str = FILENAME_FORMAT, datetime_format: str = "%Y-%m-%d_%H", **changes: object
) -> NameFormat:
    made: dict[str, object] = {"topic": "clicks", "host": "web1", "pid": 42, "suffix": "", "revised": True}
    return NameFormat.of_topic(template, datetime_format, **made | changes)  # type: ignore[arg-type]


def name(*args: str, revision: int = 0, **changes: Any) -> str:
    found = names(*args, **changes)
    return found.name(found.key(NOW), revision)


def test_default_name_is_that_of_nsq_to_file() -> None:
    assert name(revised=False) == "clicks.web1.2026-11-03_04.log"
    assert name() == "clicks.web1-000000.2026-11-03_04.log"
    assert name(revision=12) == "clicks.web1-000012.2026-11-03_04.log"
    assert name(suffix=".gz") == "clicks.web1-000000.2026-11-03_04.log.gz"


def test_suffix_is_not_repeated() -> None:
    assert name("<TOPIC><REV>.gz", suffix=".gz") == "clicks-000000.gz"


def test_every_placeholder_is_replaced_everywhere() -> None:
    assert name("<PID>/<TOPIC>/<TOPIC>.<HOST>.<PID><REV>.<DATETIME>.<DATETIME>", "%d") == (
        "42/clicks/clicks.web1.42-000000.03.03"
    )


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("%Y-%m-%d %H:%M:%S", "2026-11-03 04:05:06"),
        ("%a %A %b %B", "Tue Tuesday Nov November"),
        ("%I%p %y", "04AM 26"),
        ("%Z %z", "UTC +0000"),
        ("%%", "%"),
        ("%j", "307"),
    ],
)
def test_datetime_format_is_strftime(form: str, text: str) -> None:
    assert name("<DATETIME><REV>", form, revised=False) == text


def test_names_do_not_depend_on_the_locale() -> None:
    assert locale.setlocale(locale.LC_TIME) == "C"


def test_datetime_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    assert name("<DATETIME><REV>", "%H", revised=False) == "13"


def test_host_identifier() -> None:
    assert host_identifier("", "web1.example.org") == "web1"
    assert host_identifier("a-<SHORT_HOST>-<HOSTNAME>", "web1.example.org") == "a-web1-web1.example.org"


def test_revision_is_required_where_names_would_repeat() -> None:
    with pytest.raises(FileNameError, match="has no <REV>"):
        name("<TOPIC>.log")
    assert name("<TOPIC>.log", revised=False) == "clicks.log"


def test_topic_cannot_lead_out_of_the_folder() -> None:
    with pytest.raises(FileNameError, match="not the path of a file"):
        names("<TOPIC>/<DATETIME>", topic="..", revised=False)
    assert names("<TOPIC>.log", topic="..", revised=False)


@pytest.mark.parametrize("template", ["/etc/<TOPIC>", "../<TOPIC>", "a/../../<TOPIC>", ""])
def test_format_cannot_lead_out_of_the_folder(template: str) -> None:
    with pytest.raises(FileNameError, match="not the path of a file"):
        names(template, revised=False)


def test_datetime_cannot_lead_out_of_the_folder() -> None:
    with pytest.raises(FileNameError, match="not the path of a file"):
        names("<DATETIME>/log", "..", revised=False)
