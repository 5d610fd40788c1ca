"""The values of the options that name fields of bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from ...framework.params import parsed

if TYPE_CHECKING:
    from trio_nsq.spark.schemas.column_types import ColumnType

TIME_LEVELS = ("date", "hour")


def column_list(text: str) -> list[tuple[str, ColumnType | None]]:
    """Parse `FIELD[:TYPE],...`."""
    from trio_nsq.spark.schemas.column_types import TYPE_NAMES, parse_column, split_columns

    found: list[tuple[str, ColumnType | None]] = []
    for part in split_columns(text):
        try:
            name, chosen = parse_column(part)
        except ValueError:
            kind = part.rpartition(":")[2]
            raise click.BadParameter(f"{kind!r} is not one of {TYPE_NAMES}.") from None
        if not name:
            raise click.BadParameter(f"{text!r} contains an empty name.")
        if name in dict(found):
            raise click.BadParameter(f"{name!r} is given twice.")
        found.append((name, chosen))
    return found


def mask_list(text: str) -> tuple[tuple[str, str], ...]:
    """Parse `FIELD[=MASK],...`."""
    from trio_nsq.filters.masks import Mask, parse_masks

    found = parsed(lambda text: parse_masks(filter(None, text.split(",")), Mask.NULL), text)
    return tuple((field, str(mask)) for field, mask in found)


def field_names(text: str) -> tuple[str, ...]:
    """Parse `FIELD,...`."""
    names = tuple(each.strip() for each in text.split(",")) if text else ()
    for name in names:
        if not name:
            raise click.BadParameter(f"{text!r} contains an empty name.")
        if names.count(name) > 1:
            raise click.BadParameter(f"{name!r} is given twice.")
    return names


class PartitionLevels(click.ParamType[tuple[str, ...]]):
    """`none`, or levels of folders: `date`, `hour` and fields; the value has the levels, outermost first."""

    name = "levels"

    def convert(
        self, value: str | tuple[str, ...], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):  # converted before
            return value
        levels = tuple(each.strip() for each in value.split(","))
        if levels == ("none",):
            return ()
        for level in levels:
            if not level or level == "none":
                self.fail(f"{value!r} contains {'none' if level else 'an empty name'}.", param, ctx)
            if levels.count(level) > 1:
                self.fail(f"{level!r} is given twice.", param, ctx)
        if set(TIME_LEVELS) <= set(levels):
            self.fail("hour has a folder of the date, too: leave out date.", param, ctx)
        return levels

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(each) for each in ("none", *TIME_LEVELS) if each.startswith(incomplete)]


def event_time(text: str) -> tuple[str, ColumnType | None]:
    """Parse `FIELD[:TYPE]`."""
    found = column_list(text)
    if len(found) != 1:
        raise click.BadParameter(f"{text!r} has several fields.")
    return found[0]


def time_level(levels: tuple[str, ...]) -> str:
    """Return `date`, `hour` or `none`."""
    return next((level for level in levels if level in TIME_LEVELS), "none")
