"""Tests for settings of topics and channels: valid values and changes."""

import json
from dataclasses import asdict, fields
from typing import Any

import pytest

from trio_nsq.broker.state.settings import ChannelSettings, SettingsError, TopicSettings, change
from trio_nsq.protocol.tables import DeclaredTable


def test_missing_keys_do_not_change() -> None:
    settings, said = change(TopicSettings(), {}, {"ttl_ms": 5, "when_full": "drop-oldest"})
    assert settings == TopicSettings(ttl_ms=5, when_full="drop-oldest")
    assert said == {"ttl_ms": 5, "when_full": "drop-oldest"}
    settings, said = change(TopicSettings(), said, {"max_bytes": 7})
    assert settings == TopicSettings(ttl_ms=5, when_full="drop-oldest", max_bytes=7)
    assert change(TopicSettings(), said, {}) == (settings, said)


def test_null_restores_the_default() -> None:
    defaults = TopicSettings(ttl_ms=9)
    assert change(defaults, {"ttl_ms": 5}, {"ttl_ms": None}) == (defaults, {})
    assert change(defaults, {}, {"ttl_ms": None}) == (defaults, {})


def test_zero_overrides_a_default() -> None:
    settings, said = change(TopicSettings(ttl_ms=9), {}, {"ttl_ms": 0})
    assert (settings.ttl_ms, said) == (0, {"ttl_ms": 0})


@pytest.mark.parametrize("settings", [TopicSettings(), ChannelSettings()])
def test_json_round_trip(settings: Any) -> None:
    assert list(asdict(settings)) == [field.name for field in fields(settings)]
    assert change(type(settings)(), {}, json.loads(json.dumps(asdict(settings))))[0] == settings


@pytest.mark.parametrize(
    ("settings", "changes", "text"),
    [
        (TopicSettings(), {"tll_ms": 1}, "unknown setting tll_ms; the settings are retention_time_ms, "),
        (TopicSettings(), {"ttl_ms": -1}, "ttl_ms is -1; it must be a whole number, 0 or more"),
        (
            TopicSettings(),
            {"retention_bytes": -2},
            "retention_bytes is -2; it must be a whole number, -1 or more",
        ),
        (
            TopicSettings(),
            {"ttl_ms": 2**60},
            "ttl_ms is 1152921504606846976; the maximum is 9007199254740992",
        ),
        (TopicSettings(), {"ttl_ms": True}, "whole number"),
        (TopicSettings(), {"ttl_ms": 1.0}, "whole number"),
        (TopicSettings(), {"ttl_ms": "1"}, "whole number"),
        (TopicSettings(), {"when_full": "drop"}, "when_full is 'drop'; it must be reject or drop-oldest"),
        (TopicSettings(), {"when_full": ["reject"]}, "must be reject"),
        (TopicSettings(), {"table": 5}, "table is 5; it must be a string"),
        (
            TopicSettings(),
            {"table": "orc:/a"},
            "it must be delta:URL, iceberg:CATALOG/NAMESPACE.TABLE or parquet:URL",
        ),
        (TopicSettings(), {"table": "delta:"}, "it must be delta:URL"),
        (TopicSettings(), {"table": "delta:clicks"}, "the folder must be an absolute path or a URL"),
        (TopicSettings(), {"table": "iceberg:prod/clicks"}, "is not CATALOG/NAMESPACE.TABLE"),
        (TopicSettings(), {"table": "parquet:s3://key:secret@bucket/a"}, "no secrets and no options"),
        (TopicSettings(), {"table": "parquet:s3://bucket/a?sas=secret"}, "no secrets and no options"),
        (TopicSettings(), {"table": "delta:/a b"}, "a blank or a control character"),
        (TopicSettings(), {"table": "delta:/a\n"}, "a blank or a control character"),
        (TopicSettings(), {"table": "delta:/" + "a" * 1024}, "the maximum is 1024 characters"),
        (ChannelSettings(), {"max_attempts": 65536}, "max_attempts is 65536; the maximum is 65535"),
        (ChannelSettings(), {"dead_letter_topic": "a|b"}, "must be the name of a topic"),
        (ChannelSettings(), {"dead_letter_topic": 5}, "must be the name of a topic"),
        (ChannelSettings(), {"ttl_ms": 1}, "the settings are max_attempts, dead_letter_topic"),
    ],
)
def test_invalid_settings(settings: Any, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        change(settings, {}, changes)


@pytest.mark.parametrize(
    "table",
    [
        "",
        "delta:/srv/tables/clicks",
        "delta:s3://bucket/clicks",
        "parquet:abfss://container@account.dfs.core.windows.net/clicks",
        "iceberg:prod/events.clicks",
        "iceberg:prod/a.b.clicks",
    ],
)
def test_tables(table: str) -> None:
    assert change(TopicSettings(), {}, {"table": table})[0] == TopicSettings(table=table)
    assert not table or str(DeclaredTable.parse(table)) == table


def test_unlimited() -> None:
    settings, _ = change(TopicSettings(), {}, {"retention_time_ms": -1, "retention_bytes": -1})
    assert (settings.retention_time_ms, settings.retention_bytes) == (-1, -1)
    assert change(ChannelSettings(), {}, {"dead_letter_topic": ""})[0] == ChannelSettings()
