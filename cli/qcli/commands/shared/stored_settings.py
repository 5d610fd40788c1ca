"""`set` and `settings` of `qcli topic` and `qcli channel`: the settings that the broker stores for each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from trio_nsq.wording import count_of

from ...broker.brokers import Brokers, broker_http_options
from ...broker.requests import request_json
from ...framework.command import DocumentedCommand, did_you_mean
from ...framework.errors import ExitCode
from ...framework.options import Decorator, all_of, option, output_format
from ...framework.output import json_lines, write
from ...framework.params import BYTES_PER_UNIT, Source, byte_size, duration_text, retention_time
from ...terminal.confirm import UNCONFIRMED, confirm
from .admin_action import name_argument

DEFAULT = "default"
_WHAT = "has no settings of topics and channels"


def _whole_number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise click.BadParameter(
            f"{text!r} is not an integer of 0 or more; 'default' is the broker's default."
        )
    return int(text)


def _time_text(value_ms: int) -> str:
    """Return a value that `retention_time` parses."""
    return "forever" if value_ms < 0 else duration_text(value_ms)


def _size_text(size: int) -> str:
    """Return a value that `byte_size` parses."""
    if size < 0:
        return "unlimited"
    units = sorted(BYTES_PER_UNIT, key=lambda unit: BYTES_PER_UNIT[unit], reverse=True)
    unit = next(unit for unit in units if size % BYTES_PER_UNIT[unit] == 0)
    return f"{size // BYTES_PER_UNIT[unit]}{unit}" if size else "0"


class Setting(NamedTuple):
    """A setting of topics or channels.

    Attributes:
        name: The name on the command line.
        key: The broker's name, with the unit.
        parse, show: Convert text to the broker's value, and back.
        about: The description for the help.
        words: Values that are words, without `DEFAULT`.
    """

    name: str
    key: str
    parse: Callable[[str], int | str]
    show: Callable[[Any], str]
    about: str
    words: tuple[str, ...] = ()


_FOR_TOPICS = (
    Setting(
        "retention_time",
        "retention_time_ms",
        retention_time,
        _time_text,
        "keep messages that every channel has passed for this long, such as 12h or 7d; forever",
        ("forever",),
    ),
    Setting(
        "retention_bytes",
        "retention_bytes",
        byte_size,
        _size_text,
        "keep at most this much of them, such as 10GiB; unlimited",
        ("unlimited",),
    ),
    Setting("ttl", "ttl_ms", retention_time, _time_text, "do not deliver messages that are older than this"),
    Setting("max_messages", "max_messages", _whole_number, str, "limit the number of waiting messages"),
    Setting("max_bytes", "max_bytes", byte_size, _size_text, "limit the bytes of waiting messages"),
    Setting(
        "when_full",
        "when_full",
        str,
        str,
        "at one of these two limits: reject new messages, or drop-oldest",
        ("reject", "drop-oldest"),
    ),
)
_FOR_CHANNELS = (
    Setting(
        "max_attempts",
        "max_attempts",
        _whole_number,
        str,
        "do not deliver a message again after this many deliveries",
    ),
    Setting(
        "dead_letter_topic",
        "dead_letter_topic",
        str,
        str,
        "publish such messages to this topic; empty (dead_letter_topic=): drop them",
    ),
)
SETTINGS = {"topic": _FOR_TOPICS, "channel": _FOR_CHANNELS}

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
        "use the broker's default": "qcli topic set clicks retention_time=default",
    },
    "channel": {
        "dead-letter messages after five attempts": "qcli channel set clicks/archive max_attempts=5 "
        "dead_letter_topic=clicks.dead",
        "drop them instead": "qcli channel set clicks/archive dead_letter_topic=",
        "deliver them without limit, as NSQ does": "qcli channel set clicks/archive max_attempts=default",
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
        except click.BadParameter as error:
            self.fail(f"{name}: {error.message}", param, ctx)

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
            lambda address: request_json(
                "PUT", address, wanted, f"/{kind}/settings", {}, _WHAT, value=dict(assignments)
            ),
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
        lambda address: request_json(
            "PUT", address, topic, "/topic/settings", {"dry_run": "true"}, _WHAT, value=changes
        )["dropped"]
    ).results
    if total := sum(dropped.values()):
        messages = count_of(total, "waiting message")
        where = " and ".join(address for address in dropped if dropped[address])
        confirm(f"Drop {messages} of topic {topic} on {where}?", f"This would drop {messages}")


def _settings_command(kind: str) -> DocumentedCommand:
    def run(wanted: Source, brokers: Brokers, form: str) -> None:
        answers = brokers.read(
            lambda address: request_json("GET", address, wanted, f"/{kind}/settings", {}, _WHAT)
        )
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
    )


def _print(kind: str, values: dict[str, Any], form: str, address: str, brokers: Brokers) -> None:
    if form == "json":
        write(json_lines(brokers.records([values], address)))
        return
    heading = f"# {address}\n" if brokers.is_fleet else ""
    write(heading + "".join(_lines(kind, values)))


def _lines(kind: str, values: Mapping[str, Any]) -> list[str]:
    return [f"{setting.name}={setting.show(values[setting.key])}\n" for setting in SETTINGS[kind]]
