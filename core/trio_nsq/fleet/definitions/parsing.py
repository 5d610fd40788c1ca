"""Reads the document of `document`, and checks all of it, so that nothing is changed if a part is wrong."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from ...broker.state.settings import ChannelSettings, SettingsError, TopicSettings, change
from ...protocol.names import is_ephemeral, is_valid_name
from ...text.settings import DEFAULT, SETTINGS, Setting
from .document import VERSION
from .model import Defined, DefinedTopic, DefinitionsError, Topics, cycles_of

_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "topic": lambda settings: change(TopicSettings(), {}, settings),
    "channel": lambda settings: change(ChannelSettings(), {}, settings),
}
"""The broker's own checks, which raise SettingsError."""


def from_text(text: str | bytes) -> Topics:
    """Return what a document wants. Raises DefinitionsError: as `parse`, or it is not JSON, or names a key twice."""
    try:
        document = json.loads(text, object_pairs_hook=_without_repeated)
    except RecursionError as error:
        raise DefinitionsError(["The document has too many levels."]) from error
    except UnicodeDecodeError as error:
        raise DefinitionsError(["The document is not UTF-8 text."]) from error
    except ValueError as error:
        if isinstance(error, DefinitionsError):
            raise
        raise DefinitionsError([f"The document is not JSON: {error}."]) from error
    return parse(document)


def _without_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise DefinitionsError([f"The document has {name!r} twice in one object."])
        found[name] = value
    return found


def parse(document: Any) -> Topics:
    """Return what a document wants, from its decoded JSON.

    Raises DefinitionsError: it is not such a document, or has a bad name or setting.
    """
    problems: list[str] = []
    top = _object("The document", document, ("version", "topics"), problems)
    if problems:
        raise DefinitionsError(problems)
    if missing := [name for name in ("version", "topics") if name not in top]:  # topics: it may be cut off
        hints = {"version": f' Add "version": {VERSION}.'}
        raise DefinitionsError([f'The document has no "{name}".{hints.get(name, "")}' for name in missing])
    version = top["version"]
    if type(version) is not int or version != VERSION:
        raise DefinitionsError(
            [f"The version of the document is {json.dumps(version)}; this trio-nsq reads version {VERSION}."]
        )
    topics = {
        name: _parsed_topic(name, value, problems)
        for name, value in _object("topics", top["topics"], None, problems).items()
    }
    problems += cycles_of(topics)
    if problems:
        raise DefinitionsError(problems)
    return topics


def _parsed_topic(name: str, value: Any, problems: list[str]) -> DefinedTopic:
    where = f'topic "{name}"'
    _check_name(where, name, problems)
    fields = _object(where, value, ("settings", "paused", "channels"), problems)
    channels: dict[str, Defined] = {}
    for channel, defined in _object(
        f"channels of {where}", fields.get("channels", {}), None, problems
    ).items():
        of_channel = f'channel "{name}/{channel}"'
        _check_name(of_channel, channel, problems)
        its_fields = _object(of_channel, defined, ("settings", "paused"), problems)
        channels[channel] = Defined(*_parsed("channel", of_channel, its_fields, problems))
    return DefinedTopic(*_parsed("topic", where, fields, problems), channels)


def _parsed(
    kind: str, where: str, fields: Mapping[str, Any], problems: list[str]
) -> tuple[dict[str, Any], bool | None]:
    """Return the settings and whether it is to be paused."""
    paused = fields.get("paused")
    if paused is not None and not isinstance(paused, bool):
        problems.append(f"{where}: paused is {json.dumps(paused)}; it must be true or false.")
    known = {setting.name: setting for setting in SETTINGS[kind]}
    given = _object(f"settings of {where}", fields.get("settings", {}), tuple(known), problems)
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if (setting := known.get(name)) is None:
            continue  # it is one of the problems
        try:
            settings[setting.key] = _parsed_value(setting, value)
            _CHECKS[kind]({setting.key: settings[setting.key]})
        except ValueError as error:
            problems.append(f"{where}: {name}: {error}.")
        except SettingsError as error:  # names the setting
            problems.append(f"{where}: {error}.")
    return settings, paused if isinstance(paused, bool) else None


def _parsed_value(setting: Setting, value: Any) -> Any:
    if value == DEFAULT:
        return None
    if type(value) is not int and not isinstance(value, str):
        raise ValueError(f"{json.dumps(value)} is neither text nor an integer")
    return setting.parse(str(value))


def _check_name(where: str, name: str, problems: list[str]) -> None:
    if not is_valid_name(name):
        problems.append(f"{where}: a name has 1 to 64 of the characters A-Z a-z 0-9 . _ -.")
    elif is_ephemeral(name):
        problems.append(f"{where} is ephemeral: it ends with its last client, and cannot be defined.")


def _object(where: str, value: Any, known: tuple[str, ...] | None, problems: list[str]) -> Mapping[str, Any]:
    """Return a JSON object; if it is none, or has other members than the known ones, this is a problem."""
    if not isinstance(value, dict):
        problems.append(f"{where}: this is not a JSON object.")
        return {}
    if known is not None:
        unknown = [name for name in value if name not in known]
        problems += [f"{where}: {name!r} is unknown; there are {', '.join(known)}." for name in unknown]
    return value
