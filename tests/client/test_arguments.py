"""Each public class refuses arguments of another type or out of range when it is made, and names them."""

import inspect
import math
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from trio_nsq import sync
from trio_nsq.client import (
    Consumer,
    ConsumerSettings,
    IdempotentProducer,
    Producer,
    ProducerSettings,
    TopicReader,
)

NAN, TOO_LARGE = math.nan, 2**63
NOT: Mapping[Any, list[object]] = {
    Sequence: [None, b"a", 5, "a", [5]],
    int: [None, "1", 1.5, True, NAN, math.inf, TOO_LARGE, -TOO_LARGE, b"1", [1]],
    float: [None, "1", True, NAN, b"1", [1], -math.inf],
    bool: [None, "False", 0, 1],
    str: [None, b"a", 5, ["a"]],
}
"""For each type: values that are none of it."""
OTHERS: list[object] = [0, True, 1.5, b"x", object(), ssl]
"""Values that no other argument takes."""
MAKE: Mapping[str, tuple[Callable[..., object], type | None]] = {
    "Consumer": (partial(Consumer, "t", "c"), ConsumerSettings),
    "Producer": (Producer, ProducerSettings),
    "sync.Consumer": (partial(sync.Consumer, "t", "c"), ConsumerSettings),
    "sync.Producer": (sync.Producer, ProducerSettings),
    "IdempotentProducer": (partial(IdempotentProducer, address="h:1", topic="t", producer="p"), None),
    "TopicReader": (partial(TopicReader, nsqd_http_address="h:1", topic="t"), None),
}


def arguments(make: Callable[..., Any], settings: type | None) -> dict[str, object]:
    """Return the annotations of the arguments of a class, with those of its options."""
    made: Any = make.func if isinstance(make, partial) else make
    hints = get_type_hints(made.__init__)
    known = {
        name: hints[name]
        for name, each in inspect.signature(made).parameters.items()
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    }
    return known | (get_type_hints(settings) if settings else {})


CASES = [
    pytest.param(make, name, annotation, id=f"{label}-{name}")
    for label, (make, settings) in MAKE.items()
    for name, annotation in arguments(make, settings).items()
    if not (isinstance(make, partial) and make.args and name in ("topic", "channel"))
]


@pytest.mark.parametrize(("make", "name", "annotation"), CASES)
def test_argument_of_another_type_is_refused(make: Callable[..., object], name: str, annotation: Any) -> None:
    parts = (annotation,) if get_origin(annotation) is Sequence else get_args(annotation) or (annotation,)
    kinds = [get_origin(part) or part for part in parts]
    bad = next((values for kind, values in NOT.items() if kind in kinds), OTHERS)
    for value in bad:
        # A list of strings is given as one, too. NaN and large integers have the right type.
        if type(value) in kinds and value is not NAN and value not in (TOO_LARGE, -TOO_LARGE):
            continue
        if (isinstance(value, list) and "addresses" in name) or (
            name == "nsqd_tcp_addresses" and value is None
        ):
            continue
        with pytest.raises((TypeError, ValueError)) as caught:
            make(**{name: value})
        words = str(caught.value)
        assert name in words or name.removesuffix("_http_address") in words or name in (
            "address", "topic", "producer",
        ), words  # fmt: skip


@pytest.mark.parametrize("text", ["h:4150\n", "h:41 50", "\x1bh:4150", "h:4150\t"])
@pytest.mark.parametrize("name", ["nsqd_tcp_addresses", "lookupd_http_addresses"])
def test_address_with_blanks_or_control_characters_is_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=name):
        Producer(**{name: [text]})  # type: ignore[arg-type]  # other arguments have other types


@pytest.mark.parametrize(
    "bad",
    [
        {"producer": ""}, {"producer": "a b"}, {"producer": "x" * 65}, {"topic": ""}, {"topic": "a b"},
        {"patience_s": -1}, {"first_retry_s": 0}, {"keep_alive_s": -1}, {"max_resends": -1}, {"tls": "ca.pem"},
    ],
)  # fmt: skip
def test_idempotent_producer_refuses_values_out_of_range(bad: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        IdempotentProducer(**({"address": "h:1", "topic": "t", "producer": "p"} | bad))
