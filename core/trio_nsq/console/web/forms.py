"""Forms: their token, and what a viewer has sent."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from urllib.parse import parse_qsl

from markupsafe import Markup
from starlette.datastructures import Headers, ImmutableMultiDict
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from ..access.viewer import viewer_of

Form = ImmutableMultiDict[str, str]
CSRF_FIELD = "csrf"
CSRF_HEADER = "x-csrf-token"
FORM_TYPE = "application/x-www-form-urlencoded"
UPLOAD_TYPE = "multipart/form-data"
MAX_FIELDS = 5000
_MAX_UPLOAD_FIELDS = 100


async def form(request: Request) -> Form:
    """Return the fields of a form. Its size, its token and the page that sent it are checked already."""
    return getattr(request.state, "form", Form())


async def uploads(request: Request) -> Mapping[str, bytes]:
    """Return the files of a form, by the name of the field, without empty fields."""
    return getattr(request.state, "uploads", {})


def parse_form(body: bytes) -> Form:
    """Parse the body of a form. Raises HTTPException: it has too many fields."""
    try:
        pairs = parse_qsl(
            body.decode("utf-8", "replace"),
            keep_blank_values=True,
            max_num_fields=MAX_FIELDS,
            errors="replace",
        )
    except ValueError:
        raise HTTPException(413, f"The form has more than {MAX_FIELDS} fields.") from None
    return ImmutableMultiDict(pairs)


async def parse_upload(content_type: str, body: bytes) -> tuple[Form, dict[str, bytes]]:
    """Parse a form with a file: return its fields, and the files by the name of the field. Raises HTTPException."""

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield body

    async with aclosing(pieces()) as stream:
        parser = MultiPartParser(
            Headers({"content-type": content_type}),
            stream,
            max_files=1,
            max_fields=_MAX_UPLOAD_FIELDS,
            max_part_size=len(body),
        )
        parser.spool_max_size = len(body) + 1  # a file stays in memory: no thread, no temporary file
        try:
            data = await parser.parse()
        except (MultiPartException, ValueError):  # the latter from its parser
            raise HTTPException(400, "The form is not valid: its parts cannot be read.") from None
    fields: list[tuple[str, str]] = []
    files: dict[str, bytes] = {}
    for name, value in data.multi_items():
        if isinstance(value, str):
            fields.append((name, value))
            continue
        content = await value.read()
        await value.close()
        if value.filename or content:
            files[name] = content
    return ImmutableMultiDict(fields), files


def whole(text: str | None) -> int:
    """Return the number of a field or a parameter; 0 if it is none."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 19 else 0


def csrf_field(request: Request) -> Markup:
    """Return the hidden field that each form needs."""
    return Markup('<input type="hidden" name="{}" value="{}">').format(CSRF_FIELD, viewer_of(request).csrf)
