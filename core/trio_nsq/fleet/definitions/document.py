"""The document with the definitions of brokers, in JSON.

    {
      "version": 1,
      "topics": {
        "clicks": {
          "settings": {"retention_time": "7d", "max_messages": 1000000},
          "channels": {
            "archive": {"settings": {"max_attempts": 5, "dead_letter_topic": "clicks.dead"}, "paused": true},
            "alerts": {}
          }
        },
        "clicks.dead": {}
      }
    }

Settings have the names and values of `qcli topic set` and `qcli channel set`; `default` is the broker's default. What
is not named stays as it is. `paused` is `true` or `false`.
"""

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from ...text.settings import DEFAULT, SETTINGS, Setting
from .model import Defined, DefinedTopic, DefinitionsError, Topics

VERSION = 1


def matching(topics: Topics, patterns: Sequence[str]) -> Topics:
    """Return the topics whose names match a shell's pattern, such as `log*`; without patterns, all."""
    return {
        name: topic
        for name, topic in topics.items()
        if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def to_text(topics: Topics) -> str:
    """Return the document, sorted by name. Raises DefinitionsError: this version does not know a setting."""
    problems: list[str] = []
    described = {
        name: _shown("topic", f'topic "{name}"', topic, problems)
        | _if_any("channels", _channels(name, topic, problems))
        for name, topic in sorted(topics.items())
    }
    if problems:
        raise DefinitionsError(problems)
    return json.dumps({"version": VERSION, "topics": described}, indent=2) + "\n"


def _channels(topic: str, defined: DefinedTopic, problems: list[str]) -> dict[str, Any]:
    return {
        name: _shown("channel", f'channel "{topic}/{name}"', channel, problems)
        for name, channel in sorted(defined.channels.items())
    }


def _shown(kind: str, name: str, defined: Defined, problems: list[str]) -> dict[str, Any]:
    known = {setting.key: setting for setting in SETTINGS[kind]}
    problems += [
        f"{name} has the setting {key}, which this version does not know."
        for key in sorted(defined.settings.keys() - known.keys())
    ]
    settings = {
        setting.name: shown_value(setting, defined.settings[setting.key])
        for setting in known.values()
        if setting.key in defined.settings
    }
    return _if_any("settings", settings) | ({"paused": True} if defined.paused else {})


def _if_any(key: str, value: dict[str, Any]) -> dict[str, Any]:
    return {key: value} if value else {}


def shown_value(setting: Setting, value: Any) -> str | int:
    """Return a value of the broker as the document has it: a number, or text; None: `default`."""
    if value is None:
        return DEFAULT
    text = setting.show(value)
    return value if type(value) is int and text == str(value) else text
