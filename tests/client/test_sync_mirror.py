"""Check that the synchronous classes have the signatures and docstrings of the asynchronous ones."""

import inspect
import re
from typing import Any

import pytest

import trio_nsq
from trio_nsq import client, sync

PAIRS = [
    (client.Producer, sync.Producer),
    (client.Consumer, sync.Consumer),
    (client.Message, sync.Message),
    (client.MessageBatch, sync.MessageBatch),
    (client.Receipt, sync.Receipt),
]
NAMES = {"aclose": "close", "__aenter__": "__enter__", "__aiter__": "__iter__"}
ADDED = {(sync.Consumer, "idle_timeout_s")}
OWN_WORDS = {(client.Consumer, "run")}
MEMBERS = [
    (original, name, mirror)
    for original, mirror in PAIRS
    for name in vars(original)
    if (not name.startswith("_") or name in NAMES or name in ("__init__", "__len__", "__iter__"))
    and not inspect.ismemberdescriptor(vars(original)[name])
    and not (name == "__init__" and original in (client.Message, client.MessageBatch, client.Receipt))
]


def ids(value: Any) -> str:
    return value if isinstance(value, str) else value.__name__


def parameters(function: Any, own: type) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in found if (own, p.name) not in ADDED]


def annotations(function: Any, own: type) -> dict[str, str]:
    found = {}
    for name, annotation in inspect.get_annotations(function).items():
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        is_handler = "Callable[[trio_nsq" in text or name == "handler"  # one of which is async
        if (own, name) not in ADDED and not is_handler:
            for word in (
                "Async",
                "trio_nsq.",
                "client.",
                "consuming.",
                "publishing.",
                "receipt.",
                "sync.",
                "consumer.",
                "message.",
                "'",
            ):
                text = text.replace(word, "")
            found[name] = text
    return found


@pytest.mark.parametrize(("original", "name", "mirror"), MEMBERS, ids=ids)
def test_signatures_and_docstrings_are_equal(original: type, name: str, mirror: type) -> None:
    theirs, ours = vars(original)[name], inspect.getattr_static(mirror, NAMES.get(name, name))
    if (original, name) not in OWN_WORDS and name != "__init__":
        assert without_words_of_tasks(ours.__doc__) == without_words_of_tasks(theirs.__doc__)
    if isinstance(theirs, property):
        assert (theirs.fset is None) == (ours.fset is None)
        theirs, ours = theirs.fget, ours.fget
    assert parameters(ours, mirror) == parameters(theirs, original)
    if name != "__aiter__":  # each is its own iterator
        assert annotations(ours, mirror) == annotations(theirs, original)


@pytest.mark.parametrize("mirror", [mirror for _, mirror in PAIRS], ids=ids)
def test_docstrings_do_not_speak_of_tasks(mirror: type) -> None:
    """The caller of these classes has no trio and no tasks."""
    documented = [mirror, *(inspect.getattr_static(mirror, name) for name in dir(mirror) if name[0] != "_")]
    documented += [inspect.getattr_static(mirror, name, None) for name in NAMES.values()]
    for each in documented:
        text = (inspect.getdoc(each) or "").replace("trio_nsq", "")
        assert re.findall(r"\w*(?:trio|task|async|await|cancel|nursery|aclose)\w*", text, re.IGNORECASE) == []


def without_words_of_tasks(text: str | None) -> str:
    """Remove what differs between the docstrings of both kinds of classes."""
    differs = (
        r"(The caller is not a task of trio or asyncio, or )?the\b|(from another|a) (task|thread)\b|close|aclose"
        r"|(if (the task|this) is|if) cancelled|after a KeyboardInterrupt|, on the event loop's clock"
        r"|, in seconds; compare it with other messages of the same consumer only"
    )
    return re.sub(r"\s+", " ", re.sub(differs, "", " ".join((text or "").split()), flags=re.IGNORECASE))


def test_comparison_is_not_empty() -> None:
    assert len(MEMBERS) > 25


def test_module_is_found_from_the_package() -> None:
    assert trio_nsq.sync is sync
    assert "sync" in dir(trio_nsq)
