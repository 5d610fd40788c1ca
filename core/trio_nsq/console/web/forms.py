"""Forms: their token, and what a viewer has sent."""

from urllib.parse import parse_qsl

from markupsafe import Markup
from starlette.datastructures import ImmutableMultiDict
from starlette.exceptions import HTTPException
from starlette.requests import Request

from ..access.viewer import viewer_of

Form = ImmutableMultiDict[str, str]
CSRF_FIELD = "csrf"
CSRF_HEADER = "x-csrf-token"
FORM_TYPE = "application/x-www-form-urlencoded"
MAX_FIELDS = 5000


async def form(request: Request) -> Form:
    """Return the fields of a form. Its size, its token and the page that sent it are checked already."""
    return getattr(request.state, "form", Form())


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
