"""Checks of what a server needs at its start, without starting it: they change no file and open no port."""

import errno
import os
import socket
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from ..access.audit_writer import STDOUT
from ..access.authentication import Authentication
from ..access.secret import Secret, SecretFileError
from ..protocol.address import is_unix_path
from ..protocol.errors import StartupError
from ..tls.settings import TLSSettings

Check = Callable[[], object]
"""Raises StartupError."""


class UsedFile(NamedTuple):
    """A file that an option names.

    Attributes:
        flag: The option.
        path: Absolute, or relative to the current folder.
        is_written: The server creates, replaces, appends to or removes it. A unix socket is such a file.
    """

    flag: str
    path: Path
    is_written: bool


class OwnFiles(NamedTuple):
    """What a server keeps in its data folder.

    Attributes:
        folder: The data folder.
        has: Whether the server uses a name in it.
    """

    folder: Path
    has: Callable[[str], bool]


def problems_of(checks: Iterable[Check]) -> list[str]:
    """Run all checks, and return the problems that they found."""
    problems = []
    for check in checks:
        try:
            check()
        except StartupError as exc:
            problems.append(str(exc))
        except OSError as exc:  # a folder on the way to a file
            problems.append(f"{exc.filename}: {exc.strerror}")
    return problems


def check_tls(settings: TLSSettings) -> None:
    """Raises StartupError: the certificate, its key or the CAs cannot be used, or do not belong together."""
    if settings.is_used:
        from ..tls.context import server_context  # imports OpenSSL

        server_context(settings)


def check_auth_file(path: Path | None, settings: TLSSettings) -> None:
    """Raises StartupError: the auth file cannot be used."""
    Authentication(path, verifies_clients=settings.verifies_clients)


def secret_in(flag: str, file: Path | None) -> Secret:
    """Return the token in a file; without one, none. Raises StartupError: the file cannot be used."""
    secret = Secret(file=file)
    try:
        secret.read()
    except SecretFileError as exc:
        reason = str(exc).removeprefix("auth_secret_file ")
        raise StartupError(f"{flag}: {reason}") from exc
    return secret


def check_listen_address(flag: str, address: str | None) -> None:
    """Raises StartupError: the host of an address is unknown, or the path of a unix socket cannot be used."""
    if not address:
        return
    if is_unix_path(address):
        path = Path(address)
        if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
            raise StartupError(f"{flag}: {path} already exists and is not a socket")
        _check_writable(flag, path.parent)
        return
    host, _, port = address.rpartition(":")
    try:
        socket.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as exc:
        raise StartupError(f"{flag}: cannot listen on {address}: {exc.strerror or exc}") from exc


def check_different(addresses: Iterable[tuple[str, str | None]]) -> None:
    """Raises StartupError: two listeners have the same address. Each item is an option and its value."""
    seen: dict[str, str] = {}
    for flag, address in addresses:
        if not address or address.endswith(":0"):
            continue  # port 0 is a free port
        if address in seen:
            raise StartupError(f"{flag}: {address} is also the address of {seen[address]}")
        seen[address] = flag


def check_written_file(flag: str, path: Path | str | None) -> None:
    """Raises StartupError: a file that the server would write cannot be written. `-` is standard output."""
    if not path or path == STDOUT:
        return
    path = Path(path)
    if path.is_dir():
        raise StartupError(f"{flag}: {path} is a folder")
    if not path.exists():
        _check_writable(flag, path.parent)
    elif not os.access(path, os.W_OK):
        raise StartupError(f"{flag}: cannot write {path}: {os.strerror(errno.EACCES)}")


def check_separate(files: Iterable[UsedFile], own: OwnFiles | None = None) -> None:
    """Raises StartupError: a file that the server writes is also that of another option, or of its data."""
    seen: list[tuple[UsedFile, set[Path]]] = []
    for file in files:
        if file.path.is_char_device():
            continue  # /dev/null
        places = _places(file.path)
        if file.is_written and own is not None and any(_is_of(own, place) for place in places):
            raise StartupError(
                f"{file.flag}: the server itself uses {file.path} in its data folder: choose another name"
            )
        for other, others in seen:
            if (file.is_written or other.is_written) and not places.isdisjoint(others):
                raise StartupError(f"{file.flag}: {file.path} is also the file of {other.flag}")
        seen.append((file, places))


def _places(path: Path) -> set[Path]:
    """Return where a path leads, and where it is itself: a rename replaces a link, an append follows it."""
    return {_real(path), _real(path.parent) / path.name}


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises an error for links in a circle


def _is_of(own: OwnFiles, place: Path) -> bool:
    folder = _real(own.folder)
    return place == folder or (place.is_relative_to(folder) and own.has(place.relative_to(folder).parts[0]))


def check_data_folder(path: Path) -> None:
    """Check a data folder, which the server would create if it is missing.

    A server may be running in it: users check a configuration before they restart it.

    Raises:
        StartupError: It cannot be read or written.
    """
    flag = "--data-path"
    if not path.parent.is_dir():
        raise StartupError(f"{flag}: the folder {path.parent} does not exist; create it first")
    if not path.exists():
        _check_writable(flag, path.parent)
        return
    if not path.is_dir():
        raise StartupError(f"{flag}: {path} is not a folder")
    _check_writable(flag, path)


def _check_writable(flag: str, folder: Path) -> None:
    if not folder.is_dir():
        raise StartupError(f"{flag}: the folder {folder} does not exist; create it first")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise StartupError(f"{flag}: cannot write to {folder}: {_why_not_writable(folder)}")


def _why_not_writable(folder: Path) -> str:
    read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
    return os.strerror(errno.EROFS if read_only else errno.EACCES)
