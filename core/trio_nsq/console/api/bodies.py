"""Bodies of requests, limited."""

from starlette.requests import Request

from .answers import APIError


async def body_of(request: Request, limit: int) -> bytes:
    """Return the body. Raises APIError: it is too large."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise APIError(413, f"BODY_TOO_BIG: the limit is {limit} bytes")
    return bytes(body)
