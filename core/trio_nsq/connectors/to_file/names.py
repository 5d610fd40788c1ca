"""Names of output files, as nsq_to_file makes them: `<TOPIC>.<HOST><REV>.<DATETIME>.log`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePosixPath

from ...protocol.errors import NSQError

FILENAME_FORMAT = "<TOPIC>.<HOST><REV>.<DATETIME>.log"
DATETIME_FORMAT = "%Y-%m-%d_%H"
REVISION = "<REV>"
PART_SUFFIX = ".part"
"""Is appended to the name of a compressed file until the file is finished."""


class FileNameError(NSQError):
    """A file name format cannot be used; the text has the reason."""


def host_identifier(identifier: str, hostname: str) -> str:
    """Return the replacement of `<HOST>`.

    Args:
        identifier: A text in which `<SHORT_HOST>` and `<HOSTNAME>` are replaced; empty: the short host name.
        hostname: The name of this machine.
    """
    short = hostname.partition(".")[0]
    return identifier.replace("<SHORT_HOST>", short).replace("<HOSTNAME>", hostname) if identifier else short


@dataclass(frozen=True, slots=True)
class NameFormat:
    """Makes the names of a topic's files.

    Attributes:
        template: A relative path in which `<DATETIME>` and `<REV>` are not replaced yet.
        datetime_format: The strftime format of `<DATETIME>`.
    """

    template: str
    datetime_format: str

    @classmethod
    def of_topic(
        cls,
        template: str,
        datetime_format: str,
        *,
        topic: str,
        host: str,
        pid: int,
        suffix: str,
        revised: bool,
    ) -> NameFormat:
        """Return the format for a topic.

        Args:
            suffix: The suffix of compressed files, such as `.gz`; it is appended unless the template ends with it.
            revised: Whether names need a revision. If they do not, `<REV>` is removed.

        Raises:
            FileNameError: `<REV>` is missing, or the name would not be a path below the folder.
        """
        if revised and REVISION not in template:
            raise FileNameError(
                f"--filename-format {template!r} has no <REV>, which compression, rotation and a work folder need: "
                f"add it, as in {FILENAME_FORMAT}"
            )
        if not revised:
            template = template.replace(REVISION, "")
        for name, value in (("<TOPIC>", topic), ("<HOST>", host), ("<PID>", str(pid))):
            template = template.replace(name, value)
        if not template.endswith(suffix):
            template += suffix
        found = cls(template, datetime_format)
        name = found.name(found.key(0.0), 0)
        parts = name.split("/")
        if not parts[-1] or "\0" in name or {"", ".", ".."} & set(parts):
            raise FileNameError(f"topic {topic}: {name!r} is not the path of a file in the output folder")
        return found

    def key(self, now: float) -> str:
        """Return the name for a time in Unix seconds, with `<REV>` not replaced. A different key begins a file."""
        moment = datetime.fromtimestamp(now).astimezone()
        return self.template.replace("<DATETIME>", moment.strftime(self.datetime_format))

    @staticmethod
    def name(key: str, revision: int) -> str:
        """Return the relative path for a key and a revision."""
        return str(PurePosixPath(key.replace(REVISION, f"-{revision:06d}")))
