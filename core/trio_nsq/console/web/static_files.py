"""The console's own files, such as its style sheet: the path has a digest of the content, so browsers keep them."""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..options import COLORS
from .page import NotFound

_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_ICON_COLOR = b"#4464e8"
_FOREVER = "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class StaticFile:
    body: bytes
    media_type: str
    digest: str


@cache
def static_files() -> dict[str, StaticFile]:
    """Return all files by name."""
    found = {}
    for each in files("trio_nsq.console.web").joinpath("static").iterdir():
        body, suffix = each.read_bytes(), each.name[each.name.rfind(".") :]
        if suffix in _TYPES:
            digest = hashlib.sha256(body).hexdigest()[:12]
            found[each.name] = StaticFile(body, _TYPES[suffix], digest)
    icon = found["icon.svg"]
    for name, color in COLORS.items():
        body = icon.body.replace(_ICON_COLOR, color.encode())
        digest = hashlib.sha256(body).hexdigest()[:12]
        found[f"icon-{name}.svg"] = StaticFile(body, icon.media_type, digest)
    return found


def static_path(base: str, name: str) -> str:
    """Return the path of a file, below the base path. Raises KeyError."""
    return f"{base}/static/{static_files()[name].digest}/{name}"


async def _answer(request: Request) -> Response:
    file = static_files().get(request.path_params["name"])
    if file is None:
        raise NotFound("There is no such file.")
    # A page from before an update of the console has an older digest.
    is_current = request.path_params["digest"] == file.digest
    caching = {"Cache-Control": _FOREVER if is_current else "no-cache"}
    return Response(file.body, media_type=file.media_type, headers=caching)


ROUTE = Route("/static/{digest}/{name}", _answer, name="static")
