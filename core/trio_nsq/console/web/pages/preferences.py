"""Favourite and hidden topics: a page to edit them, and the buttons on other pages."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ....protocol import is_valid_name
from ...access.changes import note_nothing_changed
from ...console import console_of
from ..forms import form
from ..page import Page, View
from ..preferences import Preferences, TooMany, cookies_of, is_pattern, preferences_of
from ..rendering import local_path, path_of


async def show(request: Request) -> View | Response:
    """Show the preferences of the viewer; or change them, and go on with the page that has sent the form."""
    if request.method != "POST":
        return _page(request, preferences_of(request))
    note_nothing_changed(request)  # on brokers
    fields, before = await form(request), preferences_of(request)
    if "save" in fields:
        wanted = Preferences(_words(fields.get("favourites", "")), _words(fields.get("hidden", "")))
        if wrong := [each for each in wanted.favourites if not is_valid_name(each)]:
            return _page(request, wanted, f"{wrong[0]} is not the name of a topic.")
        if wrong := [each for each in wanted.hidden if not is_pattern(each)]:
            return _page(request, wanted, f"{wrong[0]} is not a name or a pattern such as test-*.")
    else:
        wanted = _changed(before, fields.get("star", ""), fields.get("unstar", ""))
        for name in ("hide", "show"):
            if is_pattern(topic := fields.get(name, "")):
                wanted = wanted.with_hidden(topic, add=name == "hide")
    try:
        cookies = cookies_of(request, wanted)
    except TooMany as exc:
        if "save" in fields:
            return _page(request, wanted, str(exc))
        raise HTTPException(400, str(exc)) from None
    root = console_of(request).options.root.rstrip("/")
    after = root + local_path(fields["next"]) if "next" in fields else path_of(request, "topics")
    response = RedirectResponse(after, 303)
    for cookie in cookies:
        response.headers.append("Set-Cookie", cookie)
    return response


def _changed(before: Preferences, star: str, unstar: str) -> Preferences:
    if is_valid_name(star):
        return before.with_favourite(star, add=True)
    return before.with_favourite(unstar, add=False)


def _page(request: Request, preferences: Preferences, problem: str = "") -> View:
    context = {
        "preferences": preferences,
        "problem": problem,
        "of_console": console_of(request).options.hide_topics,
    }
    return View("preferences.html", context, 400 if problem else 200)


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.replace(",", " ").split()))


PAGES = [Page("/preferences", "preferences", show, ("GET", "POST"))]
