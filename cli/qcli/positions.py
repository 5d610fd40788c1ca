"""Places in a topic's log, for commands that ask a broker for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from .commands import option
from .log_positions import position
from .params import retention_time

_F = TypeVar("_F", bound=Callable[..., Any])

_WORDS = ("earliest", "latest")
_NS_PER_S = 1_000_000_000

NOTE = (
    "A position is a sequence, such as 1000 (messages of a topic are counted from 0); a time, such as 2026-11-21T04:14 "
    "or 2026-11-21T04:14:05.5Z, local unless it says otherwise, or @1700000000.5, which is Unix seconds; how long ago, "
    "such as 15m, 2h or 7d; earliest, the oldest message that is kept; or latest, the end. A time is that of the "
    "publish; "
    "where the clock was set back, it is one of the places that fit."
)
"""What the help of such commands says about them."""


class BrokerPosition(click.ParamType[str]):
    """A position as the broker's HTTP interface takes it, from one as people write it."""

    name = "position"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text to be sent. How long ago something was is for the broker to say, by its own clock."""
        text = str(value)
        if text in _WORDS or (text.isascii() and text.isdigit()):
            return text
        try:
            if text != "forever":
                return f"-{retention_time(text.removeprefix('-'))}ms"  # which takes days, too
        except click.BadParameter:
            pass
        try:
            time_ns = position(text).value
        except click.BadParameter as error:
            self.fail(f"{error.message.rstrip('.')}, nor earliest or latest.", param, ctx)
        seconds, ns = divmod(time_ns, _NS_PER_S)
        return f"@{seconds}.{ns:09d}"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """The words."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(word) for word in _WORDS if word.startswith(incomplete)]


def from_option(section: str, text: str) -> Callable[[_F], _F]:
    """`--from`, and `--since`."""
    return option(section, "--from", "--since", "first", type=BrokerPosition(), metavar="POSITION", help=text)


def to_option(section: str, text: str) -> Callable[[_F], _F]:
    """`--to`, and `--until`."""
    return option(section, "--to", "--until", "end", type=BrokerPosition(), metavar="POSITION", help=text)
