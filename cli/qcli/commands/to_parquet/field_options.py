"""The values of the options that name fields of bodies."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import click
from click.shell_completion import CompletionItem

from ...framework.params import parsed

if TYPE_CHECKING:
    from trio_nsq.spark.schemas.column_types import ColumnType

TIME_LEVELS = ("date", "hour")
_AS = re.compile(r"(.+?)\s+AS\s+(.+)", re.IGNORECASE | re.DOTALL)
_AS_NOTHING = re.compile(r"\sAS$", re.IGNORECASE)
_ORDER = re.compile(r"(.+?)(?:\s+(ASC|DESC))?", re.IGNORECASE | re.DOTALL)


class Column(NamedTuple):
    """An element of `--columns`.

    Attributes:
        field: The name of the field, or the one that it gets.
        type: None: it is inferred.
        path: Where bodies have the value, if that is not the field; otherwise empty.
    """

    field: str
    type: ColumnType | None
    path: str = ""


def column_list(text: str) -> list[Column]:
    """Parse `FIELD[ AS NAME][:TYPE],...`."""
    from trio_nsq.filters.conditions import parse_path
    from trio_nsq.spark.schemas.column_types import TYPE_NAMES, parse_column, split_columns

    found: list[Column] = []
    for part in split_columns(text):
        try:
            name, chosen = parse_column(part)
        except ValueError:
            kind = part.rpartition(":")[2]
            raise click.BadParameter(f"{kind!r} is not one of {TYPE_NAMES}.") from None
        path = ""
        if renamed := _AS.fullmatch(name):
            path, name = renamed.groups()
            parsed(parse_path, path)
        elif _AS_NOTHING.search(name):
            raise click.BadParameter(f"{part.strip()!r} has no name after AS.")
        if not name:
            raise click.BadParameter(f"{text!r} contains an empty name.")
        if any(name == each.field for each in found):
            raise click.BadParameter(f"{name!r} is given twice.")
        found.append(Column(name, chosen, path))
    return found


def order_list(text: str) -> tuple[tuple[str, bool], ...]:
    """Parse `COLUMN[ DESC],...`."""
    found: dict[str, bool] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        matched = _ORDER.fullmatch(part)
        assert matched is not None  # it takes any text
        name, way = matched.groups()
        if name in found:
            raise click.BadParameter(f"{name!r} is given twice.")
        found[name] = (way or "").upper() == "DESC"
    return tuple(found.items())


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
    """`none`, or levels of folders: `date`, `hour`, fields and transforms; the value has them, outermost first."""

    name = "levels"

    def convert(
        self, value: str | tuple[str, ...], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):  # converted before
            return value
        if value.strip() == "none":
            return ()
        from trio_nsq.spark.export.levels import parse_level, split_levels

        try:
            levels = tuple(str(parse_level(each)) for each in split_levels(value))
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)
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
    if len(found) != 1 or found[0].path:
        raise click.BadParameter(f"{text!r} is not one field.")
    return found[0][:2]


def time_level(levels: tuple[str, ...]) -> str:
    """Return `date`, `hour` or `none`."""
    return next((level for level in levels if level in TIME_LEVELS), "none")
