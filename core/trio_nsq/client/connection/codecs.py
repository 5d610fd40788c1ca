"""The codecs of a client's connection that IDENTIFY negotiates: TLS, and compression inside TLS."""

from collections.abc import Iterator
from itertools import chain

from ...protocol.compression import Codec
from ...tls.client_session import TLSClientSession


class CodecStack:
    """The codecs of one connection, outermost first; initially empty."""

    def __init__(self) -> None:
        self._codecs: list[Codec] = []

    def add(self, codec: Codec) -> None:
        """Add a codec inside the others."""
        self._codecs.append(codec)

    def encode(self, data: bytes) -> bytes:
        """Return the bytes to send for this data. Raises NSQError."""
        for codec in reversed(self._codecs):
            data = codec.encode(data)
        return data

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Decode received bytes and yield the data. Raises NSQError; earlier pieces are valid."""
        pieces: Iterator[bytes] = iter((data,))
        for codec in self._codecs:
            pieces = chain.from_iterable(map(codec.decode, pieces))
        return pieces

    @property
    def ended(self) -> bool:
        """Whether one of the codecs received the end of the data."""
        return any(codec.ended for codec in self._codecs)

    def end(self) -> bytes:
        """Return the bytes that announce the end of the data."""
        return b"".join(codec.end() for codec in self._codecs if isinstance(codec, TLSClientSession))
