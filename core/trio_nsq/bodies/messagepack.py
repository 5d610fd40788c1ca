"""Decode MessagePack bodies, with the package msgspec of the extra `schemas`."""

from typing import Any

import msgspec

from ..filters.masks import Scalar
from .errors import BodyError


class MessagePackBodies:
    """Decodes MessagePack bodies."""

    format = "messagepack"
    names_fields = True

    def value(self, body: bytes) -> Any:
        """Return the value of a body. An extension becomes an object with its type and its bytes. Raises BodyError."""
        try:
            return msgspec.msgpack.decode(body, ext_hook=_extension)
        except (
            msgspec.MsgspecError,
            ValueError,
            TypeError,
            OverflowError,
            RecursionError,
            MemoryError,
        ) as exc:
            raise BodyError(f"the body is not valid MessagePack: {exc}") from exc


def _extension(code: int, data: memoryview) -> Scalar:
    return Scalar(type=code, data=bytes(data))
