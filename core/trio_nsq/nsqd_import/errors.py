"""What can keep an import from beginning, or from going on."""

from ..protocol.errors import NSQError


class ImportRefused(NSQError):
    """Nothing was done; the text says why, and what to do, for the person who asked for it."""
