"""The file of contexts: reads, checks and changes it."""

import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..framework.command import did_you_mean
from ..framework.errors import ExitCode, Failure
from .context import Context, ContextError, checked_context

_MAX_BYTES = 1024 * 1024
_NEW_FILE = "# Contexts of qcli: see 'qcli context --help'. Comments stay when qcli changes this file.\n"
_FOLDER_MODE = 0o700
_NAME = re.compile(r"[A-Za-z0-9_@-][A-Za-z0-9._@-]{0,63}", re.ASCII)
TABLE = "context"
CURRENT = "current"


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def contexts_path() -> Path:
    """Return the path of the file. Raises Failure: the user has no home folder."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        folder = Path(base) if base.startswith("/") else Path.home() / ".config"
    except RuntimeError as error:
        raise Failure(f"Contexts need a folder: set HOME or XDG_CONFIG_HOME ({error}).") from error
    return folder / "qcli" / "contexts.toml"


@dataclass(frozen=True, slots=True)
class Contexts:
    """The contents of the file, as they were read.

    Attributes:
        current: The name of the context that is used if no other one is chosen.
    """

    path: Path
    text: str
    tables: Mapping[str, Any]
    current: str | None

    def get(self, name: str) -> Context | None:
        """Return a context; None: there is none with this name. Raises Failure: it is not valid."""
        if name not in self.tables:
            return None
        try:
            return checked_context(name, self.tables[name], self.path.parent)
        except ContextError as error:
            what = f"{error.key}: {error}" if error.key else f"the context {name}: {error}"
            raise Failure(f"{self._place((TABLE, name), error.key)}: {what}.") from error

    def unknown(self, name: str, effect: str = "") -> Failure:
        """Return the error that a context does not exist; `effect` ends its text."""
        if self.tables:
            hint = did_you_mean(name, list(self.tables))
            text = f"There is no context {name}{hint}. {self.path} has {', '.join(self.tables)}."
        else:
            text = f"There is no context {name}: create it with 'qcli context save {name}'."
        return Failure(f"{text} {effect}".rstrip(), ExitCode.USAGE)

    def current_place(self) -> str:
        """Return the file and line of `current`, for errors."""
        return self._place((), CURRENT)

    def _place(self, table: tuple[str, ...], key: str | None) -> str:
        from .toml_edit import line_of

        return f"{self.path}:{line_of(self.text, table, key)}"


def read_contexts() -> Contexts:
    """Read the file; a missing one has no contexts. Raises Failure: it cannot be read, or is not valid."""
    from trio_nsq.platform.edit_file import read_text

    path = contexts_path()
    try:
        _refuse_pipe(path)
        text = read_text(path, _MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return Contexts(path, "", {}, None)
    except OSError as error:
        raise Failure(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise Failure(f"{path} is not a file of contexts: {error}.") from error
    return _parsed(path, text)


def _parsed(path: Path, text: str) -> Contexts:
    """Return the contexts of a text. Raises Failure: it is not TOML, or not a file of contexts."""
    import tomllib

    from .toml_edit import line_of

    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise Failure(f"{path} is not valid TOML: {error}. Correct it by hand.") from error
    for key, value in data.items():
        if key not in (CURRENT, TABLE):
            hint = did_you_mean(key, (CURRENT, TABLE))
            problem = f"unknown key {key}{hint}: a context is a table [{TABLE}.NAME]"
        elif key == CURRENT and not isinstance(value, str):
            problem = f"{CURRENT} is not the name of a context"
        elif key == TABLE and not isinstance(value, dict):
            problem = f"{TABLE} is not a table [{TABLE}.NAME]"
        else:
            continue
        line = line_of(text, (key,)) if isinstance(value, dict) else line_of(text, (), key)
        raise Failure(f"{path}:{line}: {problem}.")
    return Contexts(path, text, data.get(TABLE, {}), data.get(CURRENT))


def writable_by_others(path: Path) -> bool:
    """Return whether another user may change the file, or replace it; also if it is a symbolic link."""
    real = path.resolve()
    states = [each.stat() for each in (real, real.parent, path.parent)]
    return any(
        state.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or state.st_uid not in (os.getuid(), 0)
        for state in states
    )


def _refuse_pipe(path: Path) -> None:
    """Raise ValueError for a named pipe: opening it would wait for a writer."""
    if path.is_fifo():
        raise ValueError("it is a named pipe")


def change_contexts(change: Callable[[Contexts, str], str]) -> Path:
    """Change the file atomically, and return its path. Only this user can read it. A missing one is created.

    Args:
        change: Returns the new text, for the contexts and the text as they are. Writers wait for each other.

    Raises Failure: the file cannot be written, is not valid, or `change` raised this or ValueError.
    """
    from trio_nsq.platform.edit_file import edit_file

    path = contexts_path()

    def changed(text: str) -> str:
        text = text or _NEW_FILE
        new = change(_parsed(path, text), text)
        _parsed(path, new)
        return new

    try:
        for folder in reversed((path.parent, *path.parent.parents)):
            folder.mkdir(mode=_FOLDER_MODE, exist_ok=True)
        _refuse_pipe(path)
        edit_file(path, changed, _MAX_BYTES, is_private=True)
    except ValueError as error:
        raise Failure(f"{path}: {error}.") from error
    except OSError as error:
        raise Failure(f"Cannot write {error.filename or path}: {error.strerror}.") from error
    return path
