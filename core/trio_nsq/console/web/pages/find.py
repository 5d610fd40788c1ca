"""Finds topics, channels, nodes, pages, fleets and actions by what the viewer types. Ctrl-K shows it over any page."""

from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from starlette.requests import Request

from ...access.viewer import viewer_of
from ...console import console_of, snapshot_of
from ..matching import MAX_TYPED, best_matches
from ..navigation import navigation
from ..page import Page, View
from ..preferences import preferences_of
from ..rendering import existing_pages, path_of

MOST = 20
_MOST_PLACES = 5
"""Topics and channels whose pages and actions are offered: `pause orders`."""
_MOST_WORDS = 4
"""Of what was typed, for pages and actions: each word may name them, and the others are searched for."""
_CHANNEL_PAGES = {
    "messages": "channel_messages",
    "deferred": "deferred",
    "seek": "seek",
    "settings": "channel_settings",
}
_TOPIC_PAGES = {"messages": "messages", "settings": "topic_settings"}


class Found(NamedTuple):
    """Something that can be opened. A tuple, because there is one for each topic and channel.

    Attributes:
        kind: What it is, for the viewer.
        path: Its path; empty for a topic or channel that may not be shown: to build it takes longer than to match the
            name.
    """

    text: str
    kind: str
    path: str = ""


_text = attrgetter("text")


async def find(request: Request) -> View:
    """The best results for the parameter `q`; without it, the favourites and the pages come first."""
    typed = request.query_params.get("q", "")[:MAX_TYPED]
    found = [
        *_of_words(request, typed),
        *best_matches(typed, _everything(request), _text, MOST),
    ]
    shown = dict.fromkeys(
        each if each.path else each._replace(path=_path(request, each.text)) for each in found
    )
    return View("find.html", {"typed": typed, "found": list(shown)[:MOST]})


def _path(request: Request, place: str) -> str:
    """Return the path of a topic or channel."""
    topic, _, channel = place.partition("/")
    if channel:
        return path_of(request, "channel", topic=topic, channel=channel)
    return path_of(request, "topic", topic=topic)


def _everything(request: Request) -> Iterator[Found]:
    """Yield what has a name: of equally good results, the first ones are shown first."""
    favourites = [each for each in preferences_of(request).favourites if _sees(request, each)]
    for name in favourites:
        yield Found(name, "topic")
    root = console_of(request).options.root.rstrip("/")
    for _, links in navigation("", existing_pages(request)):
        for link in links:
            yield Found(link.text, "page", root + link.path)
    yield Found("Favourite and hidden topics", "page", path_of(request, "preferences"))
    if viewer_of(request).allows("manage"):
        yield Found("Create topic or channel", "action", path_of(request, "create"))
    options = console_of(request).options
    for fleet in options.fleets:
        if fleet.name != options.fleet:
            yield Found(fleet.name, "fleet", f"{options.root_of(fleet.name)}/")
    yield from _places(request)
    for address in snapshot_of(request).brokers:
        yield Found(address, "node", path_of(request, "node", node=address))


def _places(request: Request) -> Iterator[Found]:
    """Yield topics and channels."""
    viewer = viewer_of(request)
    for name, topic in snapshot_of(request).topics.items():
        if viewer.sees(name):
            yield Found(name, "topic")
            for channel in topic.channels:
                yield Found(f"{name}/{channel}", "channel")


def _of_words(request: Request, typed: str) -> Iterator[Found]:
    """Yield the pages and actions of topics and channels, if one of several words is their name: `pause orders`."""
    words = typed.split()
    for number, word in enumerate(words if 1 < len(words) <= _MOST_WORDS else ()):
        rest = " ".join(words[:number] + words[number + 1 :])
        if len(word) < 2 or not any(verb.startswith(word.casefold()) for verb in _VERBS):
            continue
        for place in best_matches(rest, _places(request), _text, _MOST_PLACES):
            topic, _, channel = place.text.partition("/")
            for verb, path in _pages_of(request, topic, channel):
                if verb.startswith(word.casefold()):
                    yield Found(f"{verb.capitalize()} {place.text}", place.kind, path)


def _pages_of(request: Request, topic: str, channel: str) -> Iterator[tuple[str, str]]:
    """Yield the pages of a topic or channel, and the actions that the viewer may do."""
    parts = {"topic": topic, **({"channel": channel} if channel else {})}
    viewer = viewer_of(request)
    for verb, name in (_CHANNEL_PAGES if channel else _TOPIC_PAGES).items():
        yield verb, path_of(request, name, None, **parts)
    if not channel and viewer.allows("publish", topic):
        yield "publish", path_of(request, "publish", topic=topic)
    if viewer.allows("manage", topic, channel):
        state = snapshot_of(request).topics[topic]
        queue = state.channels[channel].sum if channel else state.sum
        for verb in ("unpause" if queue.paused else "pause", "empty", "delete"):
            yield verb, path_of(request, f"{verb}_{'channel' if channel else 'topic'}", None, **parts)


_VERBS = {*_CHANNEL_PAGES, *_TOPIC_PAGES, "publish", "pause", "unpause", "empty", "delete"}


def _sees(request: Request, topic: str) -> bool:
    return topic in snapshot_of(request).topics and viewer_of(request).sees(topic)


PAGES = [Page("/find", "find", find)]
