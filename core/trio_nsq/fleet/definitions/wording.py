"""What a change does, for people."""

from ...text.settings import SETTINGS, SettingChange
from ...text.wording import count_of
from .changes import DefinitionChange
from .document import shown_value


def shown_settings(change: DefinitionChange) -> dict[str, SettingChange]:
    """Return the settings of a change by their names, with both values."""
    return {
        setting.name: {
            "from": shown_value(setting, change.before[setting.key]),
            "to": shown_value(setting, change.settings[setting.key]),
        }
        for setting in SETTINGS[change.kind]
        if setting.key in change.settings
    }


def details_of(change: DefinitionChange) -> str:
    """Return the settings and the messages of a change in one line; empty: it has none."""
    details = [f"{name}: {each['from']} -> {each['to']}" for name, each in shown_settings(change).items()]
    if change.messages:
        loses = "deletes" if change.verb == "delete" else "drops"
        details.append(f"{loses} {count_of(change.messages, 'message')}")
    return ", ".join(details)
