"""`set` and `settings` of `qcli topic` and `qcli channel`: the settings that the broker stores for each."""

from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from trio_nsq.api import broker as api
from trio_nsq.text.settings import DEFAULT, SETTINGS
from trio_nsq.text.wording import count_of

from ...broker.brokers import Brokers, broker_http_options
from ...broker.requests import ask
from ...framework.command import DocumentedCommand, did_you_mean
from ...framework.errors import ExitCode
from ...framework.options import Decorator, all_of, option, output_format
from ...framework.output import json_lines, write, write_lines
from ...framework.params import Source
from ...records.topics import ChannelSettingsRecord, TopicSettingsRecord
from ...terminal.confirm import UNCONFIRMED, confirm
from .admin_action import name_argument

_ASKS = {
    "topic": " If the change would drop waiting messages, as a short ttl or a low limit with drop-oldest can, asks "
    "for confirmation on a terminal; elsewhere --yes is required.",
    "channel": "",
}
_SET_EXAMPLES = {
    "topic": {
        "retain a week of messages": "qcli topic set clicks retention_time=7d",
        "limit the backlog to the newest million messages": "qcli topic set clicks max_messages=1000000 "
        "when_full=drop-oldest",
        "delete the topic when nothing has used it for a week": "qcli topic set clicks expire_idle=7d",
        "use the broker's default": "qcli topic set clicks retention_time=default",
        "declare the table that 'qcli pipeline run' keeps": "qcli topic set clicks table=delta:s3://bucket/clicks",
    },
    "channel": {
        "dead-letter messages after five attempts": "qcli channel set clicks/archive max_attempts=5 "
        "dead_letter_topic=clicks.dead",
        "drop them instead": "qcli channel set clicks/archive dead_letter_topic=",
        "deliver at most 100 messages per second": "qcli channel set clicks/archive rate_limit=100/s",
        "deliver them without limit, as NSQ does": "qcli channel set clicks/archive max_attempts=default",
        "deliver the messages of a user one after the other": "qcli channel set clicks/archive order_by=json:user.id",
    },
}
_SETTINGS_EXAMPLES = {
    "topic": {
        "show a topic's settings": "qcli topic settings clicks",
        "copy them to another topic": "qcli topic set orders $(qcli topic settings clicks)",
    },
    "channel": {
        "show a channel's settings": "qcli channel settings clicks/archive",
        "copy them to another channel": "qcli channel set clicks/alerts $(qcli channel settings clicks/archive)",
    },
}


_RECORDS = {"topic": TopicSettingsRecord, "channel": ChannelSettingsRecord}


class Assignment(click.ParamType[tuple[str, Any]]):
    """`NAME=VALUE` of a topic or channel, by `kind`: the broker's key and its value; None for the default."""

    name = "assignment"

    def __init__(self, kind: str) -> None:
        self._settings = {setting.name: setting for setting in SETTINGS[kind]}

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Any]:
        name, equals, text = str(value).partition("=")
        setting = self._settings.get(name)
        if setting is None or not equals:
            known = ", ".join(self._settings)
            near = did_you_mean(name, list(self._settings)) if setting is None else ""
            self.fail(f"{value!r} is not NAME=VALUE, NAME being one of {known}{near}.", param, ctx)
        if text == DEFAULT:
            return setting.key, None
        try:
            return setting.key, setting.parse(text)
        except ValueError as error:
            self.fail(f"{name}: {error}.", param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete names, without a blank after them as a value follows, and values that are words."""
        setting = self._settings.get(incomplete.partition("=")[0])
        if setting is not None and "=" in incomplete:
            values = [f"{setting.name}={word}" for word in (*setting.words, DEFAULT)]
            return [CompletionItem(value) for value in values if value.startswith(incomplete)]
        return [
            CompletionItem(f"{setting.name}=", type="unfinished", help=setting.about)
            for setting in self._settings.values()
            if setting.name.startswith(incomplete)
        ]


def settings_commands(kind: str) -> list[DocumentedCommand]:
    """Make `set` and `settings` of `qcli topic` or `qcli channel`, by `kind`."""
    return [_set_command(kind), _settings_command(kind)]


def _set_command(kind: str) -> DocumentedCommand:
    def run(
        wanted: Source,
        assignments: Sequence[tuple[str, Any]],
        brokers: Brokers,
        form: str,
        yes: bool = True,
    ) -> None:
        if not yes:
            _ask(wanted, dict(assignments), brokers)

        brokers.change(
            lambda address: ask(address, api.settings(*wanted, dict(assignments))),
            lambda address, values: _print(kind, values, form, address, brokers),
        )

    options = [
        name_argument("wanted", kind),
        click.argument(
            "assignments", metavar="NAME=VALUE...", nargs=-1, required=True, type=Assignment(kind)
        ),
        broker_http_options,
        _format(kind),
    ]
    if kind == "topic":
        options.append(
            option("Options", "--yes", "-y", is_flag=True, help="Drop messages without confirmation.")
        )
    about = "; ".join(f"{setting.name}: {setting.about}" for setting in SETTINGS[kind])
    return click.command(
        "set",
        cls=DocumentedCommand,
        help=f"Change settings of a {kind}, and show its settings.\n\nThe change takes effect at once and survives "
        "a restart of the broker. Other settings do not change." + _ASKS[kind],
        examples=_SET_EXAMPLES[kind],
        exits={
            ExitCode.FAILURE: f"Nothing was changed: there is no such {kind}, "
            f"{'you did not confirm, ' if _ASKS[kind] else ''}or the broker refused.",
            ExitCode.PARTIAL: "Settings were changed on some brokers only; standard error says what failed elsewhere.",
            **(UNCONFIRMED if _ASKS[kind] else {}),
        },
        notes={"Settings": f"{about}. 0 turns a rule off, and {DEFAULT} selects the broker's default."},
    )(all_of(*options)(run))


def _ask(topic: Source, changes: Mapping[str, Any], brokers: Brokers) -> None:
    """Ask the user if a change drops messages; raises as `confirm`."""
    dropped = brokers.read(
        lambda address: ask(address, api.settings(topic.topic, None, changes, dry_run=True))["dropped"]
    ).results
    if total := sum(dropped.values()):
        messages = count_of(total, "waiting message")
        where = " and ".join(address for address in dropped if dropped[address])
        confirm(f"Drop {messages} of topic {topic} on {where}?", f"This would drop {messages}")


def _settings_command(kind: str) -> DocumentedCommand:
    def run(wanted: Source, brokers: Brokers, form: str) -> None:
        answers = brokers.read(lambda address: ask(address, api.settings(*wanted)))
        for address, values in answers.results.items():
            _print(kind, values, form, address, brokers)
        answers.check()

    return click.command(
        "settings",
        cls=DocumentedCommand,
        help=f"Show the settings of a {kind}.",
        examples=_SETTINGS_EXAMPLES[kind],
        exits={
            ExitCode.FAILURE: f"There is no such {kind}, or standard output cannot be written.",
        },
    )(all_of(name_argument("wanted", kind), broker_http_options, _format(kind))(run))


def _format(kind: str) -> Decorator:
    return output_format(
        f"text: NAME=VALUE per line, as '{kind} set' takes it. json: an object, times in milliseconds.",
        "text",
        "json",
        records=[_RECORDS[kind]],
    )


def _print(kind: str, values: dict[str, Any], form: str, address: str, brokers: Brokers) -> None:
    if form == "json":
        write(json_lines(brokers.records([values], address)))
        return
    heading = [f"# {address}"] if brokers.is_fleet else []
    write_lines(heading + _lines(kind, values))


def _lines(kind: str, values: Mapping[str, Any]) -> list[str]:
    known = [setting for setting in SETTINGS[kind] if values.get(setting.key) is not None]
    return [f"{setting.name}={setting.show(values[setting.key])}" for setting in known]
