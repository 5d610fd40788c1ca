"""Documents of definitions for property tests."""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from trio_nsq.text.durations import MAX_DURATION_MS
from trio_nsq.text.settings import SETTINGS, Setting

_NAMES = ("clicks", "a", "-", "..", "x" * 64, "Topic_1")
_MAX = 2**53
_TEXTS = {
    "when_full": st.sampled_from(["reject", "drop-oldest"]),
    "order_by": st.sampled_from(["", "json:user.id", "header:user", "json:é\u2028"]),
}


def _value(setting: Setting, later_topics: tuple[str, ...]) -> st.SearchStrategy[Any]:
    """A value of a setting; dead-letter topics come later in the names, so that there is no cycle."""
    if setting.key == "dead_letter_topic":
        return st.sampled_from(["", "elsewhere", *later_topics, "default"])
    if setting.key in _TEXTS:
        return _TEXTS[setting.key] | st.just("default")
    most = (
        MAX_DURATION_MS if setting.key.endswith("_ms") else 65535 if setting.key == "max_attempts" else _MAX
    )
    numbers = st.integers(0, most).map(lambda value: setting.show(value))
    return numbers | st.sampled_from([setting.show(most), 0, "default", *_unlimited(setting)])


def _unlimited(setting: Setting) -> list[str]:
    return [setting.show(-1)] if setting.key.startswith("retention") else []


def _settings(kind: str, later_topics: tuple[str, ...] = ()) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {}, optional={each.name: _value(each, later_topics) for each in SETTINGS[kind] if each.name in KNOWN}
    )


KNOWN = frozenset(
    (
        *("retention_time", "retention_bytes", "ttl", "max_messages", "max_bytes", "when_full"),
        *("max_attempts", "dead_letter_topic", "order_by", "rate_limit"),
    )
)
"""The settings whose values are generated."""


def documents() -> st.SearchStrategy[Mapping[str, Any]]:
    """Valid documents with a few topics."""
    paused = st.booleans()
    topics = {
        name: st.fixed_dictionaries(
            {},
            optional={
                "settings": _settings("topic"),
                "paused": paused,
                "channels": st.dictionaries(
                    st.sampled_from(_NAMES),
                    st.fixed_dictionaries(
                        {}, optional={"settings": _settings("channel", _NAMES[place + 1 :]), "paused": paused}
                    ),
                    max_size=3,
                ),
            },
        )
        for place, name in enumerate(_NAMES)
    }
    return st.fixed_dictionaries({}, optional=topics).map(lambda found: {"version": 1, "topics": found})
