"""The error of an import."""

from ..protocol.errors import NSQError


class ImportRefused(NSQError):
    """The import is refused; the text says why, and what to do."""
