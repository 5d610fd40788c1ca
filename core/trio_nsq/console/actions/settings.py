"""The settings of a topic or channel on several brokers: shows, previews and changes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...api import broker as api
from ...text.settings import DEFAULT, SETTINGS, Setting
from ..upstream.client import Results, Upstream, UpstreamError

DIFFERENT = "(different)"
"""In the form: the brokers differ; a change applies to all."""
_MAX_TEXT = 100


def kind_of(channel: str) -> str:
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
    upstream: Upstream, addresses: Sequence[str], topic: str, channel: str
) -> tuple[list[Row], Results[Mapping[str, str]]]:
    """Return the settings in force, and what each broker answered."""
    settings = SETTINGS[kind_of(channel)]

    def show(address: str, answer: Mapping[str, Any]) -> Mapping[str, str]:
        return _texts(address, settings, answer)

    results = (await upstream.ask_all(addresses, api.settings(topic, channel or None))).map(show)
    # The settings that would be in force if none were set.
    changes = dict.fromkeys([setting.key for setting in settings])
    request = api.settings(topic, channel or None, changes, dry_run=True)
    defaults = (await upstream.ask_all(results.values, request)).map(show).values
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
        if text == form.get(f"was_{setting.name}", "").strip() or (not text and not setting.may_be_empty):
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
    topic: str,
    channel: str,
    changes: Mapping[str, Any],
) -> Results[Preview]:
    """Return what a change would do on each broker."""
    request = api.settings(topic, channel or None, changes, dry_run=True)

    def show(address: str, answer: Mapping[str, Any]) -> Preview:
        return Preview(answer.get("dropped") or 0, _texts(address, SETTINGS[kind_of(channel)], answer))

    return (await upstream.ask_all(addresses, request)).map(show)


def _texts(address: str, settings: Sequence[Setting], answer: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as people write them. Raises UpstreamError: the broker does not have all of them."""
    if any(answer.get(setting.key) is None for setting in settings):
        raise UpstreamError(address, "its answer has no such settings")
    return {setting.name: setting.show(answer[setting.key])[:_MAX_TEXT] for setting in settings}
