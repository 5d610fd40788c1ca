"""The files of a bundle, and the archive with them."""

import io
import json
import os
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...framework.errors import Failure
from .redaction import Redactor

Answers = Mapping[str, Any]
"""By file name: text as bytes, a JSON value, or the Failure."""


class Bundle:
    """The files of a bundle by name. All of them pass the redactor when the last one is known.

    An address of a client in one answer is replaced in all others, too.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._values: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """Add a file: text of a `str`, JSON of anything else."""
        self._values[name] = value

    def add_error(self, name: str, reason: str) -> None:
        """Add the reason that a file is missing."""
        self._values[f"{name}.error.txt"] = f"{reason}\n"

    def add_answers(self, folder: str, address: str, answers: Answers | Failure) -> None:
        """Add what a broker answered, or the failure of it."""
        self.add(f"{folder}/address.txt", f"{address}\n")
        if isinstance(answers, Failure):
            self.add_error(f"{folder}/broker", answers.message)
            return
        for name, answer in answers.items():
            if isinstance(answer, Failure):
                self.add_error(f"{folder}/{name}", answer.message)
            else:
                text = isinstance(answer, bytes)
                self.add(f"{folder}/{name}", answer.decode("utf-8", "replace") if text else answer)

    def files(self) -> dict[str, bytes]:
        """Return the files without secrets."""
        cleaned = {}
        for name, value in self._values.items():
            if not isinstance(value, str):
                cleaned[name] = json.dumps(self._redactor.value(value), indent=1)
        # After all values, so that the addresses of clients are known.
        for name, value in self._values.items():
            text = self._redactor.text(value) if isinstance(value, str) else cleaned[name]
            cleaned[name] = self._redactor.clients(text)
        return {name: cleaned[name].encode("utf-8", "replace") for name in self._values}


def write_archive(path: Path, files: Mapping[str, bytes]) -> None:
    """Write an archive that only this user can read. Raises Failure: it exists, or cannot be written."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"qcli-support/{name}")
            entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(content))
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise Failure(f"{path} exists. Give another name, or remove it.") from error
    except OSError as error:
        raise Failure(f"Cannot write {path}: {error.strerror}.") from error
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data.getvalue())
    except OSError as error:
        path.unlink(missing_ok=True)  # a part of an archive, which would be in the way of the next one
        raise Failure(f"Cannot write {path}: {error.strerror}.") from error
