"""Errors keep their class, text and attributes when they are copied, pickled, or raised in another process."""

import copy
import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import trio_nsq
from trio_nsq.client import ConnectionFailed
from trio_nsq.sync import Producer

SAMPLES: dict[object, Any] = {
    "cause": PermissionError(13, "no"),
    "reason": "it is so",
    "errors": [ValueError("down"), OSError(111, "refused")],
    "names": ["one", "two"],
    "known": ["two"],
    "path": Path("/data/x"),
    str: "text",
    int: 4711,
    bool: True,
    bool | None: True,
    bytes: b"bytes\xff",
}
"""Arguments of constructors, by name or by type."""
OF_COMPILED: dict[str, tuple[Any, ...]] = {"LineTooLong": ()}
"""Arguments of constructors that do not tell their parameters once they are compiled."""
IN_ONE_TASK = {"LogTaken", "_NotApplied"}
"""Errors that have the objects to wait with, or what was read, and that a caller in the same task handles."""


def pickled(protocol: int, error: BaseException) -> Any:
    return pickle.loads(pickle.dumps(error, protocol))


WAYS: dict[str, Callable[[BaseException], BaseException]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
} | {
    f"pickle protocol {protocol}": partial(pickled, protocol)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
}


def all_errors() -> Iterator[type[trio_nsq.NSQError]]:
    for module in pkgutil.walk_packages(trio_nsq.__path__, "trio_nsq."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    classes = [trio_nsq.NSQError]
    for each in classes:
        if each.__module__.startswith("trio_nsq.") and each.__name__ not in IN_ONE_TASK:
            yield each
        classes += each.__subclasses__()


def example(kind: type[trio_nsq.NSQError]) -> trio_nsq.NSQError:
    if kind.__init__ is Exception.__init__ or not inspect.isfunction(kind.__init__):
        return kind(*OF_COMPILED.get(kind.__name__, ("a text", 2)))
    hints = get_type_hints(kind.__init__)
    args, named = [], {}
    for name, parameter in inspect.signature(kind).parameters.items():
        value = SAMPLES[name if name in SAMPLES else hints[name]]
        if parameter.kind is parameter.KEYWORD_ONLY:
            named[name] = value
        else:
            args.append(value)
    return kind(*args, **named)


def seen(error: BaseException) -> tuple[object, ...]:
    attributes = {name: repr(value) for name, value in vars(error).items()}
    return type(error), str(error), error.args, attributes, repr(error)


def test_all_errors_can_be_copied_and_pickled() -> None:
    kinds = set(all_errors())
    assert len(kinds) > 70
    for kind in kinds:
        error = example(kind)
        error.add_note("a note")
        for way, again in WAYS.items():
            assert seen(again(error)) == seen(error), f"{kind.__qualname__} by {way}"


def publish_without_a_broker() -> None:
    with Producer("127.0.0.1:1"):
        pass


def test_an_error_crosses_the_border_of_a_process() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.raises(ConnectionFailed) as caught:
            pool.submit(publish_without_a_broker).result()
    assert caught.value.address == "127.0.0.1:1"
    assert caught.value.reason
