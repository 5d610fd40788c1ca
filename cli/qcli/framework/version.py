"""The line of `qcli --version`, which an installation of the client has, too: it imports no package of the server."""

import platform

from trio_nsq._version import __version__
from trio_nsq.platform.compiled import form


def version_line() -> str:
    """Return the versions of qcli and Python; `compiled` says that the faster compiled code of the broker is used."""
    return f"qcli {__version__} (Python {platform.python_version()}, {form()})\n"
