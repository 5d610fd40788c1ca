"""The settings of a topic or channel on several brokers: shows, previews and changes them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...setting_texts import DEFAULT, SETTINGS, Setting
from ..fleet.stats import number
from ..upstream.client import Results, Upstream, UpstreamError

DIFFERENT = "(different)"
"""In the form: the brokers differ; a change applies to all."""
_MAX_TEXT = 100


def kind_of(channel: str) -> str:
    """Return the kind of settings: of a topic, or of a channel."""
    return "channel" if channel else "topic"


@dataclass(frozen=True, slots=True)
class Row:
    """One setting: its texts in force by broker, and where they come from.

    Attributes:
        texts: As people write them.
        is_set: Whether the value differs from the broker's default, by broker; without those that did not tell.
    """

    setting: Setting
    texts: Mapping[str, str]
    is_set: Mapping[str, bool] = field(default_factory=dict)

    @property
    def is_equal(self) -> bool:
        """Whether all brokers have the same value."""
        return len(set(self.texts.values())) <= 1

    @property
    def text(self) -> str:
        """The value in the form."""
        return next(iter(self.texts.values()), "") if self.is_equal else DIFFERENT


@dataclass(frozen=True, slots=True)
class Preview:
    """What a change would do on one broker.

    Attributes:
        dropped: Messages that it drops at once.
        texts: The settings that would be in force, by name.
    """

    dropped: int
    texts: Mapping[str, str]


async def read(
    upstream: Upstream, addresses: Sequence[str], token: str | None, topic: str, channel: str
) -> tuple[list[Row], Results[Mapping[str, str]]]:
    """Return the settings in force, and what each broker answered."""
    path, params, settings = _request(topic, channel)

    async def ask(address: str) -> Mapping[str, str]:
        return _texts(address, settings, await upstream.json("GET", address, path, params, token=token))

    async def ask_defaults(address: str) -> Mapping[str, str]:
        """The settings that would be in force if none were set."""
        changes = dict.fromkeys([setting.key for setting in settings])
        answer = await _put(upstream, address, token, topic, channel, changes, dry_run=True)
        return _texts(address, settings, answer)

    results = await upstream.on_all(addresses, ask)
    defaults = (await upstream.on_all(list(results.values), ask_defaults)).values
    rows = []
    for setting in settings:
        texts = {address: values[setting.name] for address, values in results.values.items()}
        is_set = {
            address: text != defaults[address][setting.name]
            for address, text in texts.items()
            if address in defaults
        }
        rows.append(Row(setting, texts, is_set))
    return rows, results


def changes_of(channel: str, form: Mapping[str, str]) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Return what a form changes, as names and texts, and the errors by name.

    A field whose text is that of the hidden field `was_NAME` does not change. An empty one does not either, unless it
    is an allowed value.
    """
    assignments: list[tuple[str, str]] = []
    errors: dict[str, str] = {}
    for setting in SETTINGS[kind_of(channel)]:
        text = form.get(setting.name, "").strip()
        if text == form.get(f"was_{setting.name}", "").strip() or (
            not text and setting.name != "dead_letter_topic"
        ):
            continue
        try:
            values([(setting.name, text)], channel)
        except ValueError as exc:
            errors[setting.name] = str(exc)
        else:
            assignments.append((setting.name, text))
    return assignments, errors


def values(assignments: Sequence[tuple[str, str]], channel: str) -> dict[str, Any]:
    """Return the values for the broker, by its keys; None for the default. Raises ValueError."""
    by_name = {setting.name: setting for setting in SETTINGS[kind_of(channel)]}
    found: dict[str, Any] = {}
    for name, text in assignments:
        if (setting := by_name.get(name)) is None:
            raise ValueError(f"there is no setting {name[:_MAX_TEXT]!r}")
        if len(text) > _MAX_TEXT:
            raise ValueError("the value is too long")
        found[setting.key] = None if text == DEFAULT else setting.parse(text)
    return found


async def preview(
    upstream: Upstream,
    addresses: Sequence[str],
    token: str | None,
    topic: str,
    channel: str,
    changes: Mapping[str, Any],
) -> Results[Preview]:
    """Return what a change would do on each broker."""

    async def ask(address: str) -> Preview:
        answer = await _put(upstream, address, token, topic, channel, changes, dry_run=True)
        texts = _texts(address, SETTINGS[kind_of(channel)], answer)
        return Preview(number(answer, "dropped"), texts)

    return await upstream.on_all(addresses, ask)


async def change(
    upstream: Upstream,
    addresses: Sequence[str],
    token: str | None,
    topic: str,
    channel: str,
    changes: Mapping[str, Any],
) -> Results[str]:
    """Change settings on all these brokers."""

    async def ask(address: str) -> str:
        await _put(upstream, address, token, topic, channel, changes, dry_run=False)
        return "changed"

    return await upstream.on_all(addresses, ask)


def _request(topic: str, channel: str) -> tuple[str, dict[str, str], tuple[Setting, ...]]:
    kind = kind_of(channel)
    return f"/{kind}/settings", {"topic": topic} | ({"channel": channel} if channel else {}), SETTINGS[kind]


async def _put(
    upstream: Upstream,
    address: str,
    token: str | None,
    topic: str,
    channel: str,
    changes: Mapping[str, Any],
    *,
    dry_run: bool,
) -> Any:
    path, params, _ = _request(topic, channel)
    params |= {"dry_run": "true"} if dry_run else {}
    return await upstream.json("PUT", address, path, params, json.dumps(changes).encode(), token=token)


def _texts(address: str, settings: Sequence[Setting], answer: Any) -> dict[str, str]:
    """Return settings as people write them. Raises UpstreamError: the answer has other types."""
    texts = {}
    for setting in settings:
        value = answer.get(setting.key) if isinstance(answer, dict) else None
        wants_text = setting.key in ("when_full", "dead_letter_topic")
        if not isinstance(value, str if wants_text else int) or isinstance(value, bool):
            raise UpstreamError(address, "its answer has no such settings")
        texts[setting.name] = setting.show(value)[:_MAX_TEXT]
    return texts
