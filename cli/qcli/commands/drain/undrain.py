"""`qcli undrain`: returns a drained broker to service."""

from .command import undrain as command

__all__ = ["command"]
