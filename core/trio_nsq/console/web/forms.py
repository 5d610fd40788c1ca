"""Forms: their token, and what a viewer has sent."""

from urllib.parse import parse_qsl

from markupsafe import Markup
from starlette.datastructures import ImmutableMultiDict
from starlette.exceptions import HTTPException
from starlette.requests import Request

from ...protocol.limits import MIB
from ..access.viewer import viewer_of

Form = ImmutableMultiDict[str, str]
CSRF_FIELD = "csrf"
FORM_TYPE = "application/x-www-form-urlencoded"
MAX_FORM_BYTES = 8 * MIB
"""A message of 2 MiB, percent-encoded."""
MAX_FIELDS = 5000


async def form(request: Request) -> Form:
    """Return the fields of a form. Its token and the page that sent it are already checked. Raises HTTPException."""
    if not hasattr(request.state, "form"):
        request.state.form = parse_form(await _body(request))
    found: Form = request.state.form
    return found


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


def csrf_field(request: Request) -> Markup:
    """Return the hidden field that each form needs."""
    return Markup('<input type="hidden" name="{}" value="{}">').format(CSRF_FIELD, viewer_of(request).csrf)


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_FORM_BYTES:
            raise HTTPException(413, f"The form is larger than {MAX_FORM_BYTES // MIB} MiB.")
    return bytes(body)
