"""Values of the arguments and options of `qcli replay`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...broker.name_completion import complete_topic
from ...framework.errors import Failure
from ...framework.params import Source, source, topic_name

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Speed(click.ParamType[float]):
    """How many times as fast, such as `2x` or `0.5x`."""

    name = "speed"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)x?", str(value))
        if found is None or not float(found[1]):
            self.fail(f"{value!r} is not a speed such as 1x, 2x or 0.5x.", param, ctx)
        return float(found[1])


class Pattern(click.ParamType["re.Pattern[bytes]"]):
    """A regular expression for bytes."""

    name = "regex"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> re.Pattern[bytes]:
        """Compiled."""
        try:
            return re.compile(os.fsencode(value))
        except re.error as error:
            self.fail(f"{value!r} is not a regular expression: {error}.", param, ctx)


def is_place(text: str) -> bool:
    """Whether it names files, and not a topic, whose name never has a slash."""
    return "/" in text or text in (".", "..")


def refuse_channel(place: str, topic: str) -> None:
    """Raises Failure if a place that is not there looks like a channel.

    Args:
        place: What is to be replayed.
        topic: Where to.
    """
    if place.startswith(".") or Path(place).exists():
        return
    try:
        found: Source = source(place)
    except click.BadParameter:
        return
    raise Failure(
        f"There is no folder and no file {place}. If it is a channel: topics are replayed, such as with 'qcli replay "
        f"{found.topic} {topic}', and 'qcli channel seek' has messages delivered to a channel again."
    )


def replayed(text: str) -> str:
    """The name of a topic, or a place of files."""
    return text if is_place(text) else topic_name(text)


def complete_replayed(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The broker's topics, or files once it is clear that these are meant."""
    from click.shell_completion import CompletionItem

    if incomplete.startswith(".") or "/" in incomplete:
        return [CompletionItem(incomplete, type="file")]
    return complete_topic(ctx, param, incomplete)


def job_name(text: str) -> str:
    """The name of a job."""
    from trio_nsq.spark.replay.request import JOB_NAME

    if JOB_NAME.fullmatch(text) is None:
        raise click.BadParameter(
            f"{text!r} is no name of a job: 1 to 40 of the characters A-Z a-z 0-9 . _ -, a letter or digit first."
        )
    return text


def destination(text: str) -> str:
    """The name of a topic."""
    found: Source = source(text)
    if found.channel is not None:
        raise click.BadParameter(
            f"{text!r} is a channel: to have messages delivered to it again, see 'qcli channel seek'."
        )
    return found.topic
