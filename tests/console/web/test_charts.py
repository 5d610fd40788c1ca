"""Charts show the numbers that they are given, and gaps where there are none."""

import math
import xml.etree.ElementTree as ET

import pytest

from trio_nsq.console.web.charts import (
    SPARK_HEIGHT,
    SPARK_WIDTH,
    Line,
    chart,
    nice_time_top_s,
    nice_top,
    sparkline,
)
from trio_nsq.console.web.formats import short

GAP = math.nan
MINUS = "\N{MINUS SIGN}"


def points_of(path: str) -> list[tuple[int, int]]:
    """Return the points of a path of M, l and h."""
    found, x, y, at = [], 0, 0, 0
    while at < len(path):
        end = next((i for i in range(at + 1, len(path)) if path[i].isalpha()), len(path))
        numbers = [int(each) for each in path[at + 1 : end].replace("-", " -").split()]
        if path[at] == "M":
            x, y = numbers
        elif path[at] == "h":
            x += numbers[0]
        elif path[at] == "l":
            x, y = x + numbers[0], y + numbers[1]
        else:
            break
        found.append((x, y))
        at = end
    return found


def spark_points(*values: float) -> list[tuple[int, int]]:
    svg = ET.fromstring(sparkline(values, "label"))
    return points_of(svg[0].attrib["d"]) if len(svg) else []


@pytest.mark.parametrize(
    ("largest", "top"),
    [
        (0, 1),
        (math.nan, 1),
        (math.inf, 1),
        (1, 1),
        (1.1, 2),
        (2.2, 2.5),
        (3, 5),
        (7, 10),
        (10, 10),
        (10.1, 20),
        (180, 200),
        (0.03, 0.05),
    ],
)
def test_axis_ends_at_a_round_number(largest: float, top: float) -> None:
    assert nice_top(largest) == pytest.approx(top)


@pytest.mark.parametrize(
    ("largest_s", "top_s"),
    [
        (0, 1),
        (math.nan, 1),
        (0.3, 0.5),
        (45, 60),
        (61, 120),
        (2500, 3600),
        (5 * 3600, 8 * 3600),
        (90 * 86400, 100 * 86400),
    ],
)
def test_axis_of_durations_ends_at_a_round_one(largest_s: float, top_s: float) -> None:
    assert nice_time_top_s(largest_s) == pytest.approx(top_s)


def test_sparkline_goes_up_to_its_largest_value() -> None:
    assert spark_points(0, 5, 10) == [(0, SPARK_HEIGHT - 1), (SPARK_WIDTH // 2, 11), (SPARK_WIDTH, 2)]


def test_sparkline_of_zeros_is_flat() -> None:
    assert spark_points(0, 0, 0) == [(0, SPARK_HEIGHT - 1), (SPARK_WIDTH, SPARK_HEIGHT - 1)]


def test_sparkline_of_gaps_draws_nothing() -> None:
    assert spark_points(GAP, GAP) == []


def test_sparkline_interrupts_its_line_at_a_gap() -> None:
    svg = ET.fromstring(sparkline([1, 1, GAP, 2, 2], "label"))
    assert svg[0].attrib["d"].count("M") == 2


def test_sparkline_has_a_label_that_cannot_be_markup() -> None:
    svg = ET.fromstring(sparkline([1, 2], '"><script>'))
    assert svg.attrib["aria-label"] == '"><script>'
    assert svg.attrib["role"] == "img"


def test_sparkline_of_an_hour_is_small() -> None:
    values = [abs(math.sin(i * 1.7)) * 1000 for i in range(120)]
    assert len(sparkline(values, "messages in, last hour")) < 400


def figure(*lines: Line, step_s: float = 60, top: float = 0) -> ET.Element:
    return ET.fromstring(
        chart(
            "Depth",
            lines,
            step_s=step_s,
            text=lambda value: f"{value:g} m",
            top=(lambda largest: top) if top else nice_top,
        )
    )


def texts(element: ET.Element, css_class: str) -> list[str]:
    return [
        "".join(span.itertext()) for each in element.iter() if each.get("class") == css_class for span in each
    ]


def test_chart_has_axes_from_zero_to_a_round_number() -> None:
    found = figure(Line("now", [0, 60, 120]))
    assert texts(found, "axis-y") == ["200 m", "100 m", "0 m"]
    assert texts(found, "axis-x") == [
        f"{MINUS}3 min",
        f"{MINUS}2.25 min",
        f"{MINUS}1.5 min",
        f"{MINUS}0.75 min",
        "now",
    ]


def test_chart_draws_values_between_its_axes() -> None:
    found = figure(Line("now", [0, 50, 100]))
    stroke = next(each for each in found.iter() if each.get("class") == "stroke")
    assert points_of(stroke.attrib["d"]) == [(0, 119), (300, 60), (600, 1)]


def test_chart_keeps_values_above_its_end_inside() -> None:
    found = figure(Line("now", [0, 500]), top=100)
    stroke = next(each for each in found.iter() if each.get("class") == "stroke")
    assert points_of(stroke.attrib["d"])[-1] == (600, 1)


def test_chart_tells_its_numbers_to_readers_without_the_picture() -> None:
    found = figure(Line("In", [3, GAP, 7]), Line("Out", [GAP, GAP, GAP]))
    (svg,) = (each for each in found.iter() if each.tag == "svg")
    assert svg.get("role") == "img"
    assert svg.findtext("title") == "Depth"
    assert svg.findtext("desc") == "In: now 7 m, from 3 m to 7 m; Out: no data"


def test_chart_has_its_values_for_the_tooltip() -> None:
    found = figure(Line("In", [1.5, GAP, 12345]))
    (line,) = (each for each in found.iter() if each.get("data-values"))
    assert line.get("data-values") == "1.5,,1.234e+04"


def test_chart_leaves_out_the_time_before_the_first_value() -> None:
    found = figure(Line("In", [GAP] * 90 + [1.0] * 30))
    assert texts(found, "axis-x")[0] == f"{MINUS}40 min"


@pytest.mark.parametrize("known", [1, 21, 47, 94, 120])
def test_labels_of_the_time_axis_are_round(known: int) -> None:
    found = figure(Line("In", [GAP] * (120 - known) + [1.0] * known), step_s=30)
    minutes = [float(text.removeprefix(MINUS).split()[0]) for text in texts(found, "axis-x")[:-1]]
    assert all(each * 2 == int(each * 2) for each in minutes)


def test_chart_without_values_shows_some_time() -> None:
    found = figure(Line("In", [GAP] * 120))
    assert texts(found, "axis-x")[0] == f"{MINUS}20 min"


def test_charts_text_cannot_be_markup() -> None:
    found = ET.fromstring(chart("<b>", [Line("<i>", [1.0])], step_s=1, text=lambda value: "<u>"))
    assert not [each for each in found.iter() if each.tag in ("i", "u")]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (0.5, "0.5"),
        (2.5, "2.5"),
        (40, "40"),
        (250, "250"),
        (2500, "2.5k"),
        (1e6, "1M"),
    ],
)
def test_short_numbers(value: float, text: str) -> None:
    assert short(value) == text
