"""Charts as SVG and HTML, made by the server: sparklines for rows of tables, and charts with axes.

Labels are HTML beside the SVG, so that they keep their size while the drawing fills any width. Nothing here uses inline
styles, which the content security policy forbids: classes name the colours. NaN in a series is a gap.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

_NICE = (1.0, 2.0, 2.5, 5.0, 10.0)
_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3600.0, 86400.0
_NICE_TIMES_S = (
    *(2.0, 4.0, 10.0, 20.0, 30.0),
    *(count * _MINUTE_S for count in (1, 2, 4, 10, 20, 30)),
    *(count * _HOUR_S for count in (1, 2, 4, 8, 12)),
    *(count * _DAY_S for count in (1, 2, 4, 10, 20)),
)
SPARK_WIDTH, SPARK_HEIGHT = 96, 22
_WIDTH, _HEIGHT = 600, 120


@dataclass(frozen=True)
class Line:
    """One line of a chart. `css_class` picks its colour: `in`, `out`, `depth` or `age`."""

    name: str
    values: Sequence[float]
    css_class: str = "in"


def nice_top(largest: float) -> float:
    """Return the end of an axis from 0 that shows `largest`: 1, 2, 2.5 or 5 times a power of ten; 1 if it shows 0."""
    if not largest > 0 or math.isinf(largest):
        return 1.0
    power = 10.0 ** math.floor(math.log10(largest))
    return next(power * step for step in _NICE if power * step >= largest * (1 - 1e-9))


def nice_time_top_s(largest_s: float) -> float:
    """Return the end of an axis of durations that shows `largest_s`, so that the end and its half read well."""
    if not largest_s > 1:
        return nice_top(largest_s)
    return next((top for top in _NICE_TIMES_S if top >= largest_s), nice_top(largest_s / _DAY_S) * _DAY_S)


def sparkline(values: Sequence[float], label: str, css_class: str = "in") -> Markup:
    """Draw a small line without axes. A series of zeros is a flat line at the bottom; only gaps draw nothing.

    Args:
        values: Evenly spaced in time, oldest first.
        label: What screen readers say.
        css_class: The colour, as for a `Line`.
    """
    width, height = SPARK_WIDTH, SPARK_HEIGHT
    points = _halved(values, width // 2)
    top = max((v for v in points if not math.isnan(v)), default=0.0)
    line = "".join(
        _path(
            [
                (
                    round(i * width / max(1, len(points) - 1)),
                    height - 1 - round(v / top * (height - 3)) if top else height - 1,
                )
                for i, v in run
            ]
        )
        for run in _runs(points)
    )
    drawn = Markup('<path{} d="{}"/>').format(Markup("" if top else ' class="z"'), line) if line else ""
    return Markup('<svg class="spark{}" width="{}" height="{}" role="img" aria-label="{}">{}</svg>').format(
        "" if css_class == "in" else f" line-{css_class}", width, height, label, drawn
    )


def chart(
    title: str,
    lines: Sequence[Line],
    *,
    step_s: float,
    text: Callable[[float], str],
    top: Callable[[float], float] = nice_top,
) -> Markup:
    """Draw lines with an axis from 0 and the newest values in the caption. A gap at the beginning is left out.

    Args:
        title: The heading, and the beginning of what screen readers say.
        lines: Of equal length, oldest value first; the last value is of now.
        step_s: Seconds between two values.
        text: Formats a value for axis, caption and tooltip.
        top: Returns the end of the axis for the largest value.
    """
    lines = _without_beginning(lines)
    largest = max((v for line in lines for v in line.values if not math.isnan(v)), default=0.0)
    end = top(largest)
    count = max((len(line.values) for line in lines), default=0)
    shapes = Markup("").join(_shape(line, end, filled=len(lines) == 1) for line in lines)
    grid = Markup('<path class="grid" d="M0 .5H{w}M0 {m}H{w}M0 {b}H{w}"/>').format(
        w=_WIDTH, m=_HEIGHT // 2, b=_HEIGHT - 0.5
    )
    spans = Markup("").join(
        Markup("<span>{}</span>").format(each) for each in (text(end), text(end / 2), text(0.0))
    )
    minutes = count * step_s / 60
    times = Markup("").join(
        Markup("<span>{}</span>").format(each)
        for each in (*(f"\N{MINUS SIGN}{minutes * part / 4:g} min" for part in (4, 3, 2, 1)), "now")
    )
    return Markup(
        '<figure class="chart" data-key="{title}" data-step="{step:g}">'
        '<figcaption><span class="chart-title">{title}</span><span class="keys-of-lines">{legend}</span></figcaption>'
        '<div class="plot"><div class="axis-y" aria-hidden="true">{y}</div>'
        '<svg viewBox="0 0 {w} {h}" preserveAspectRatio="none" role="img" aria-label="{title}: {about}">'
        "<title>{title}</title><desc>{about}</desc>{grid}{shapes}</svg>"
        '<div class="axis-x" aria-hidden="true">{x}</div></div></figure>'
    ).format(
        step=step_s,
        title=title,
        legend=Markup("").join(_legend(line, text) for line in lines),
        y=spans,
        x=times,
        w=_WIDTH,
        h=_HEIGHT,
        about="; ".join(describe(line, text) for line in lines),
        grid=grid,
        shapes=shapes,
    )


def describe(line: Line, text: Callable[[float], str]) -> str:
    """Say what a line shows, for readers without the picture: its newest, least and greatest values."""
    known = [v for v in line.values if not math.isnan(v)]
    if not known:
        return f"{line.name}: no data"
    newest = "unknown" if math.isnan(line.values[-1]) else text(line.values[-1])
    return f"{line.name}: now {newest}, from {text(min(known))} to {text(max(known))}"


def _without_beginning(lines: Sequence[Line]) -> list[Line]:
    """Leave out the time before the first value of any line: show a sixth, a third, two thirds, or all.

    Of an hour these are 10, 20, 40 and 60 minutes, so that the labels of the axis are round.
    """
    count = max((len(line.values) for line in lines), default=0)
    gaps = (next((i for i, v in enumerate(line.values) if not math.isnan(v)), count) for line in lines)
    wanted = count - min(gaps, default=0)
    start = count - next(part for part in (count // 6, count // 3, count * 2 // 3, count) if part >= wanted)
    return [replace(line, values=line.values[start:]) for line in lines]


def _legend(line: Line, text: Callable[[float], str]) -> Markup:
    newest = next((v for v in reversed(line.values) if not math.isnan(v)), None)
    shown = "\N{EM DASH}" if newest is None else text(newest)
    return Markup('<span class="key line-{}">{} <b>{}</b></span>').format(line.css_class, line.name, shown)


def _shape(line: Line, top: float, *, filled: bool) -> Markup:
    last = max(1, len(line.values) - 1)
    drawn, area = [], []
    for run in _runs(line.values):
        at = [(round(i * _WIDTH / last), round((1 - min(v, top) / top) * (_HEIGHT - 2)) + 1) for i, v in run]
        drawn.append(_path(at))
        area.append(f"{_path(at)}V{_HEIGHT}H{at[0][0]}z")
    values = ",".join("" if math.isnan(v) else f"{v:.4g}" for v in line.values)
    below = Markup('<path class="area" d="{}"/>').format("".join(area)) if filled and area else Markup("")
    return Markup(
        '<g class="line-{}" data-name="{}" data-values="{}">{}<path class="stroke" d="{}"/></g>'
    ).format(line.css_class, line.name, values, below, "".join(drawn))


def _runs(values: Sequence[float]) -> Iterator[list[tuple[int, float]]]:
    """Split a series at its gaps, into runs of (index, value)."""
    run: list[tuple[int, float]] = []
    for index, value in enumerate(values):
        if math.isnan(value):
            if run:
                yield run
            run = []
        else:
            run.append((index, max(0.0, value)))
    if run:
        yield run


def _path(points: Sequence[tuple[int, int]]) -> str:
    """Write points as a path with relative steps, the shortest form: a page has a hundred sparklines."""
    (x, y), *others = points
    parts = [f"M{x} {y}"]
    if not others:
        return f"{parts[0]}h1"
    flat = 0
    for next_x, next_y in others:
        if next_y == y:
            flat += next_x - x
        else:
            if flat:
                parts.append(f"h{flat}")
                flat = 0
            dy = next_y - y
            parts.append(f"l{next_x - x}{'' if dy < 0 else ' '}{dy}")
        x, y = next_x, next_y
    return "".join(parts) + (f"h{flat}" if flat else "")


def _halved(values: Sequence[float], at_most: int) -> list[float]:
    """Merge neighbours into means until at most this many are left. A gap beside a value disappears."""
    points = list(values)
    while len(points) > at_most:
        pairs = [points[i : i + 2] for i in range(len(points) % 2, len(points), 2)]
        known = [[v for v in pair if not math.isnan(v)] for pair in pairs]
        points = points[: len(points) % 2] + [sum(k) / len(k) if k else math.nan for k in known]
    return points
