"""Whatever a public class takes, returns or raises can be imported from `trio_nsq.client`."""

import builtins
import inspect
import re
import types
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest

import trio_nsq
import trio_nsq.sync
from trio_nsq import client
from trio_nsq.client import errors

CLASSES = {
    f"{module.__name__}.{name}": each
    for module in (client, trio_nsq.sync)
    for name in module.__all__
    if inspect.isclass(each := getattr(module, name))
}


def named_in(annotation: Any) -> Iterator[type]:
    """Yield the classes in an annotation, at any depth."""
    for part in get_args(annotation):
        yield from named_in(part)
    if inspect.isclass(annotation) and not isinstance(annotation, types.GenericAlias):
        yield annotation


def annotations_of(kind: type) -> Iterator[Any]:
    for name, member in inspect.getmembers(kind):
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function) and (name == "__init__" or not name.startswith("_")):
            yield from get_type_hints(function).values()


@pytest.mark.parametrize("name", CLASSES)
def test_classes_in_signatures_are_public(name: str) -> None:
    public = {*CLASSES.values(), trio_nsq.NSQError}
    internal = {
        "Acknowledger",
        "MessageRun",
        "Portal",
        "PublishFuture",
        "PublishLimits",
        "Secret",
    }  # in what programs do not call
    for annotation in annotations_of(CLASSES[name]):
        for each in named_in(annotation):
            if each.__module__.startswith("trio_nsq") and each.__name__ not in internal:
                assert each in public, f"{each.__qualname__} of {name}"


@pytest.mark.parametrize("name", CLASSES)
def test_documented_errors_are_public(name: str) -> None:
    documents = [inspect.getdoc(member) or "" for _, member in inspect.getmembers(CLASSES[name])]
    for document in [inspect.getdoc(CLASSES[name]) or "", *documents]:
        _, _, raises = document.partition("\nRaises:\n")
        for line in re.findall(r"^    (\w[\w., ]*):", raises, re.MULTILINE):
            for error in line.split(", "):
                assert error in client.__all__ or hasattr(builtins, error), f"{error} of {name}"


def test_all_errors_are_public() -> None:
    own = {
        name
        for name, each in vars(errors).items()
        if inspect.isclass(each) and each.__module__ == errors.__name__
    }
    assert own <= set(client.__all__)


def test_all_names_can_be_imported() -> None:
    for module in (client, trio_nsq, trio_nsq.sync):
        for name in module.__all__:
            found = getattr(module, name)
            assert not inspect.isclass(found) or found.__name__ == name


def test_the_package_has_all_names_of_the_client() -> None:
    assert set(client.__all__) < set(trio_nsq.__all__)
    assert all(getattr(trio_nsq, name) is getattr(client, name) for name in client.__all__)
