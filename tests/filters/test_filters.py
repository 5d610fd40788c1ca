"""Filters of message bodies: conditions, fields, patterns, and bodies that are not JSON."""

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.filters.bodies import Filter, OtherBodies, compile_pattern
from trio_nsq.filters.conditions import (
    has_member,
    member_equals,
    parse_condition,
    parse_path,
)
from trio_nsq.filters.fields import FieldList
from trio_nsq.filters.json_text import NotJSON, body_of, text_of, whole_object

BIG = 9007199254740993  # 2**53 + 1: no float has this value

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def passes(condition: str, body: str) -> bool:
    return bool(Filter(conditions=[parse_condition(condition)]).apply([body.encode()]).passed)


def select(fields: list[str], body: str) -> str:
    (found,) = Filter(fields=FieldList([*map(parse_path, fields)])).apply([body.encode()]).passed
    return found.decode()


# ---------------------------------------------------------------------- JSON text


@given(st.dictionaries(st.text(), json_values), st.sampled_from([None, 0, 1, "\t"]), st.booleans())
def test_the_members_of_every_object(value: dict[str, Any], indent: int | str | None, ascii_: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_)
    found = whole_object(f" {text}\n")
    assert {name: json.loads(each) for name, each in found.items()} == value
    assert all(each in text for each in found.values())


@given(st.text(alphabet='{}[],:"\\ntrue0-1.5eE u', max_size=12))
def test_only_json_objects_are_accepted(text: str) -> None:
    def as_python_reads_it() -> bool:
        try:
            return isinstance(json.loads(text, parse_constant=lambda name: 1 // 0), dict)
        except (ValueError, ZeroDivisionError):
            return False

    try:
        whole_object(text)
        accepted = True
    except NotJSON:
        accepted = False
    assert accepted == as_python_reads_it()


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "{", '{"a"', '{"a":', '{"a":1', '{"a":1,', '{"a":1,}', '{,"a":1}', "{1:2}", '{"a" 1}', '{"a":1 "b":2}',
        "{}x", "{}{}", "[]", "1", "null", '"a"', "\ufeff{}", '{"a":NaN}',
        '{"a":Infinity}', '{"a":-Infinity}', "{'a':1}",
        '{"a":01}', '{"a":"\n"}', '{"\n":1}', r'{"\x":1}', '{"a":' + "[" * 100_000, '{"a":' * 100_000,
        '{"a":' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
    ids=range(30),
)  # fmt: skip
def test_not_a_json_object(text: str) -> None:
    with pytest.raises(NotJSON):
        whole_object(text)


def test_bytes_that_are_not_utf_8_stay() -> None:
    body = b'{"a":"\xff\xfe","b":1}'
    (found,) = Filter(fields=FieldList([("a",)])).apply([body]).passed
    assert found == b'{"a":"\xff\xfe"}'
    assert body_of(text_of(body)) == body


# ---------------------------------------------------------------------- conditions


@pytest.mark.parametrize(
    ("condition", "passing", "failing"),
    [
        ("level=error", ['{"level":"error"}', r'{"l\u0065vel":"err\u006fr"}'], ['{"level":"warn"}', "{}"]),
        ("level == error ", ['{"level":"error"}'], ['{"level":"== error"}']),
        ("level!=debug", ['{"level":"error"}', '{"level":1}'], ['{"level":"debug"}', "{}"]),
        ("status>=500", ['{"status":500}', '{"status":5.1e2}'], ['{"status":499.9}', '{"status":"500"}', "{}"]),
        ("n<0", ['{"n":-1}', '{"n":-1e999999999}'], ['{"n":0}', '{"n":"-1"}']),
        ("n<=1.0", ['{"n":1}', '{"n":0.5}'], ['{"n":1.0000000000000000001}']),
        ("n>1", ['{"n":1e400}'], ['{"n":1}', '{"n":1e99999999999999999999}', '{"n":[2]}']),
        (f"id={BIG}", [f'{{"id":{BIG}}}', f'{{"id":{BIG}.0}}', f'{{"id":"{BIG}"}}'], [f'{{"id":{BIG - 1}}}']),
        ('id="5"', ['{"id":"5"}'], ['{"id":5}']),
        (r'id="\u0035"', ['{"id":"5"}'], ['{"id":5}']),
        ("ok=true", ['{"ok":true}', '{"ok":"true"}'], ['{"ok":false}', '{"ok":1}']),
        ("x=null", ['{"x":null}'], ["{}", '{"x":0}']),
        ("x=", ['{"x":""}'], ['{"x":null}', "{}"]),
        ("user.id=5", ['{"user":{"id":5}}'], ['{"user.id":5}', '{"user":5}', '{"user":[{"id":5}]}']),
        (r"user\.id=5", ['{"user.id":5}'], ['{"user":{"id":5}}']),
        (r"a\=b=c", ['{"a=b":"c"}'], ["{}"]),
        ("user.name", ['{"user":{"name":null}}'], ['{"user":{}}', "{}"]),
        ("!error", ["{}", '{"errors":1}'], ['{"error":null}']),
        ("time>=2026-01-02", ['{"time":"2026-01-02T00:00:00Z"}'], ['{"time":"2026-01-01"}', '{"time":3000}']),
        ("n=5", ['{"n":1,"n":5}'], ['{"n":5,"n":1}']),  # the last one counts
        ("a<\">\"", ['{"a":"="}'], ['{"a":">"}']),  # a quoted value may be anything
    ],
)  # fmt: skip
def test_condition(condition: str, passing: list[str], failing: list[str]) -> None:
    assert [body for body in passing if not passes(condition, body)] == []
    assert [body for body in failing if passes(condition, body)] == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "=1",
        "!",
        "!a=1",
        ".a=1",
        "a.=1",
        "a..b",
        'a="x',
        'a="x"y',
        "\\",
        "!!a",
        "<5",
        "a=>1",
        "total>>",
        "a>>1",
        "a<>1",
        "a===1",
        "a!==1",
        "a>",
        "a<= ",
    ],
)
def test_not_a_condition(text: str) -> None:
    with pytest.raises(ValueError, match=r"condition|field|JSON string|is no operator|is missing"):
        parse_condition(text)


def test_several_conditions_must_all_hold() -> None:
    both = Filter(conditions=[parse_condition("a=1"), parse_condition("b=2")])
    found = both.apply([b'{"a":1,"b":2}', b'{"a":1}', b'{"b":2}'])
    assert (found.passed, found.dropped) == ([b'{"a":1,"b":2}'], 2)


def test_names_of_nsq_to_nsq_have_no_nesting() -> None:
    members = whole_object('{"a.b": 1, "c": "x"}')
    assert has_member("a.b").holds(members)
    assert member_equals("a.b", "1.0").holds(members)
    assert not member_equals("c", "y").holds(members)
    assert not has_member("b").holds(members)


@given(st.integers(), st.integers())
def test_integers_are_compared_with_all_digits(left: int, right: int) -> None:
    body = json.dumps({"n": left})
    assert passes(f"n={right}", body) == (left == right)
    assert passes(f"n<{right}", body) == (left < right)


# ---------------------------------------------------------------------- fields


def test_the_text_of_values_does_not_change() -> None:
    body = f'{{"id": {BIG}, "x": 1.10, "e": 1E5, "s": "\\u00e9\\/", "o": {{ "a" : [1 , 2] }}, "z": 0}}'
    assert select(["id", "x", "e", "s", "o"], body) == (
        f'{{"id":{BIG},"x":1.10,"e":1E5,"s":"\\u00e9\\/","o":{{ "a" : [1 , 2] }}}}'
    )
    huge = "9" * 10_000
    assert select(["n"], f'{{"n":{huge},"m":1}}') == f'{{"n":{huge}}}'


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (["b", "a"], '{"b":{"c":2,"d":{"e":3}},"a":1}'),
        (["b.c"], '{"b":{"c":2}}'),
        (["b.d.e", "b.c"], '{"b":{"d":{"e":3},"c":2}}'),
        (["b", "b.c"], '{"b":{"c":2,"d":{"e":3}}}'),
        (["b.c", "b"], '{"b":{"c":2,"d":{"e":3}}}'),
        (["b.x", "a.x", "x"], "{}"),
        (["x", "a"], '{"a":1}'),
    ],
)
def test_field_lists(fields: list[str], expected: str) -> None:
    assert select(fields, '{"a":1,"b":{"c":2,"d":{"e":3}},"f":4}') == expected


@given(st.dictionaries(st.text(min_size=1, max_size=3), json_values, min_size=1), st.data())
def test_fields_of_every_object(value: dict[str, Any], data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(value)), min_size=1, unique=True))
    (found,) = (
        Filter(fields=FieldList([(name,) for name in names])).apply([json.dumps(value).encode()]).passed
    )
    expected = json.dumps({name: value[name] for name in names})
    assert json.loads(found, parse_float=Decimal) == json.loads(expected, parse_float=Decimal)


# ---------------------------------------------------------------------- patterns and other bodies


def test_pattern() -> None:
    with_pattern = Filter(pattern=compile_pattern(rb'"status": *5..|\xff'))
    found = with_pattern.apply([b'{"status": 503}', b'{"status":404}', b"not JSON \xff", b""])
    assert (found.passed, found.not_json, found.dropped) == ([b'{"status": 503}', b"not JSON \xff"], [], 2)


def test_pattern_and_condition() -> None:
    both = Filter(compile_pattern(b"x"), [parse_condition("a=1")])
    found = both.apply([b'{"a":1}', b'{"a":1,"b":"x"}', b"x", b"y"])
    assert (found.passed, found.not_json, found.dropped) == ([b'{"a":1,"b":"x"}'], [2], 2)


def test_invalid_pattern(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"missing \): \("):
        compile_pattern(b"(")
    assert capfd.readouterr().err == ""


def test_pattern_that_python_would_need_ages_for() -> None:
    assert not Filter(pattern=compile_pattern(b"(a+)+$")).apply([b"a" * 50_000 + b"b"]).passed


@pytest.mark.parametrize("others", OtherBodies)
def test_bodies_that_are_not_json_are_counted(others: OtherBodies) -> None:
    bodies = [b"x", b'{"a":1}', b"[" * 1_000_000, b"\xff", b"{}"]
    found = Filter(conditions=[parse_condition("a")], others=others).apply(bodies)
    assert (found.not_json, found.dropped) == ([0, 2, 3], 1)
    assert found.passed == ([bodies[i] for i in (0, 1, 2, 3)] if others is OtherBodies.PASS else [bodies[1]])


def test_without_filters_all_pass() -> None:
    assert Filter().passes_all
    assert Filter().apply([b"x", b""]).passed == [b"x", b""]
    assert not Filter(fields=FieldList([("a",)])).passes_all
