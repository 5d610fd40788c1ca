"""`set` and `settings` of `qcli topic` and `qcli channel`: settings that the broker stores for one of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from trio_nsq.wording import count_of

from ...broker.address_options import broker_http_options
from ...broker.requests import change_each, read_each, request_json, with_broker
from ...framework.command import DocumentedCommand, did_you_mean
from ...framework.errors import ExitCode
from ...framework.options import Decorator, all_of, option, output_format
from ...framework.output import json_lines, write
from ...framework.params import BYTES_PER_UNIT, Source, byte_size, duration_text, retention_time
from ...terminal.confirm import confirm
from .admin_action import name_argument

DEFAULT = "default"
_WHAT = "has no settings of topics and channels"


def _whole_number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise click.BadParameter(
            f"{text!r} is not a whole number of 0 or more; 'default' is the broker's own."
        )
    return int(text)


def _time_text(value_ms: int) -> str:
    """As `retention_time` takes it."""
    return "forever" if value_ms < 0 else duration_text(value_ms)


def _size_text(size: int) -> str:
    """As `byte_size` takes it."""
    if size < 0:
        return "unlimited"
    units = sorted(BYTES_PER_UNIT, key=lambda unit: BYTES_PER_UNIT[unit], reverse=True)
    unit = next(unit for unit in units if size % BYTES_PER_UNIT[unit] == 0)
    return f"{size // BYTES_PER_UNIT[unit]}{unit}" if size else "0"


class Setting(NamedTuple):
    """One of them.

    Attributes:
        name: As it is written here.
        key: As the broker has it, with the unit.
        parse, show: From text to the broker's value, and back.
        about: For the help.
        words: What is no number among its values, but for `DEFAULT`.
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
        "for how long messages stay readable that every channel has passed, such as 12h or 7d; forever",
        ("forever",),
    ),
    Setting(
        "retention_bytes",
        "retention_bytes",
        byte_size,
        _size_text,
        "how much of them at most, such as 10GiB; unlimited",
        ("unlimited",),
    ),
    Setting(
        "ttl", "ttl_ms", retention_time, _time_text, "a message older than this is not delivered any more"
    ),
    Setting("max_messages", "max_messages", _whole_number, str, "how many messages may wait"),
    Setting("max_bytes", "max_bytes", byte_size, _size_text, "how many bytes of messages may wait"),
    Setting(
        "when_full",
        "when_full",
        str,
        str,
        "what happens at one of these two limits: reject (a publish is refused) or drop-oldest",
        ("reject", "drop-oldest"),
    ),
)
_FOR_CHANNELS = (
    Setting(
        "max_attempts",
        "max_attempts",
        _whole_number,
        str,
        "a message that comes back after so many deliveries is not delivered again",
    ),
    Setting(
        "dead_letter_topic",
        "dead_letter_topic",
        str,
        str,
        "where such a message goes; nothing, as in 'dead_letter_topic=': it is dropped",
    ),
)
SETTINGS = {"topic": _FOR_TOPICS, "channel": _FOR_CHANNELS}

_ASKS = {
    "topic": " If the change drops waiting messages at once, as a short ttl or a low limit with drop-oldest can, it "
    "says how many and asks first, on a terminal; elsewhere that needs --yes.",
    "channel": "",
}
_SET_EXAMPLES = {
    "topic": {
        "keep a week of messages to be read again": "qcli topic set clicks retention_time=7d",
        "let no more than a million wait, the newest ones": "qcli topic set clicks max_messages=1000000 "
        "when_full=drop-oldest",
        "as the broker has it for all topics": "qcli topic set clicks retention_time=default",
    },
    "channel": {
        "put messages aside that fail five times": "qcli channel set clicks/archive max_attempts=5 "
        "dead_letter_topic=clicks.dead",
        "throw them away instead": "qcli channel set clicks/archive dead_letter_topic=",
        "deliver them for ever, as NSQ does": "qcli channel set clicks/archive max_attempts=default",
    },
}
_SETTINGS_EXAMPLES = {
    "topic": {
        "what holds": "qcli topic settings clicks",
        "the same for another topic": "qcli topic set orders $(qcli topic settings clicks)",
    },
    "channel": {
        "what holds": "qcli channel settings clicks/archive",
        "the same for another channel": "qcli channel set clicks/alerts $(qcli channel settings clicks/archive)",
    },
}


class Assignment(click.ParamType[tuple[str, Any]]):
    """`NAME=VALUE` of a topic or channel, as `kind` says: the broker's key, and its value; None for the default."""

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
        """The names. No blank comes after them, for the value is still to come; then those values that are words."""
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
    """Make `set` and `settings` of `qcli topic` or `qcli channel`, as `kind` says."""
    return [_set_command(kind), _settings_command(kind)]


def _set_command(kind: str) -> DocumentedCommand:
    def run(
        wanted: Source,
        assignments: Sequence[tuple[str, Any]],
        nsqd_http_addresses: tuple[str, ...],
        form: str,
        yes: bool = True,
    ) -> None:
        if not yes:
            _ask(wanted, dict(assignments), nsqd_http_addresses)

        def put(address: str) -> None:
            values = request_json(
                "PUT", address, wanted, f"/{kind}/settings", {}, _WHAT, value=dict(assignments)
            )
            _print(kind, values, form, address, nsqd_http_addresses)

        change_each(nsqd_http_addresses, put)

    options = [
        name_argument("wanted", kind),
        click.argument(
            "assignments", metavar="NAME=VALUE...", nargs=-1, required=True, type=Assignment(kind)
        ),
        broker_http_options,
        _format(kind),
    ]
    if kind == "topic":
        options.append(option("Options", "--yes", "-y", is_flag=True, help="Drop messages without asking."))
    about = "; ".join(f"{setting.name}: {setting.about}" for setting in SETTINGS[kind])
    return click.command(
        "set",
        cls=DocumentedCommand,
        help=f"Change settings of a {kind}, and show those that are now in force.\n\nThey hold from now on, also after "
        "a restart of the broker. Those that are not named stay as they are." + _ASKS[kind],
        examples=_SET_EXAMPLES[kind],
        exits={
            ExitCode.FAILURE: f"Nothing was changed: no such {kind}, nobody agreed, or the broker refused.",
            ExitCode.PARTIAL: "It was changed on some of the brokers only; standard error says why not on the others.",
        },
        notes={"Settings": f"{about}. 0 is no such rule, and {DEFAULT} what the broker has for all."},
    )(all_of(*options)(run))


def _ask(topic: Source, changes: Mapping[str, Any], addresses: Sequence[str]) -> None:
    """Let the user agree if a change drops messages at once; raises what `confirm` does."""
    dropped = read_each(
        addresses,
        lambda address: request_json(
            "PUT", address, topic, "/topic/settings", {"dry_run": "true"}, _WHAT, value=changes
        )["dropped"],
    )
    if total := sum(dropped.values()):
        messages = count_of(total, "waiting message")
        where = " and ".join(address for address in dropped if dropped[address])
        confirm(f"Drop {messages} of topic {topic} on {where}?", f"This would drop {messages} at once")


def _settings_command(kind: str) -> DocumentedCommand:
    def run(wanted: Source, nsqd_http_addresses: tuple[str, ...], form: str) -> None:
        for address in nsqd_http_addresses:
            values = request_json("GET", address, wanted, f"/{kind}/settings", {}, _WHAT)
            _print(kind, values, form, address, nsqd_http_addresses)

    return click.command(
        "settings",
        cls=DocumentedCommand,
        help=f"Show the settings of a {kind} that are in force.",
        examples=_SETTINGS_EXAMPLES[kind],
        exits={
            ExitCode.FAILURE: f"There is no such {kind}, or standard output cannot be written.",
        },
    )(all_of(name_argument("wanted", kind), broker_http_options, _format(kind))(run))


def _format(kind: str) -> Decorator:
    return output_format(
        f"text: NAME=VALUE per line, as '{kind} set' takes it. json: an object, times in milliseconds. "
        "Of several brokers: one after the other, below '# ADDRESS'; in objects the key broker.",
        "text",
        "json",
    )


def _print(kind: str, values: dict[str, Any], form: str, address: str, addresses: Sequence[str]) -> None:
    if form == "json":
        write(json_lines(with_broker([values], address, addresses)))
        return
    heading = f"# {address}\n" if len(addresses) > 1 else ""
    write(heading + "".join(_lines(kind, values)))


def _lines(kind: str, values: Mapping[str, Any]) -> list[str]:
    return [f"{setting.name}={setting.show(values[setting.key])}\n" for setting in SETTINGS[kind]]
