"""This package as a zip file, for Spark's workers on machines where it is not installed."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import trio_nsq

_MADE_AT = (1980, 1, 1, 0, 0, 0)


def can_be_zipped() -> bool:
    """Whether this package lies in a folder; else it is in a zip file already, as with spark-submit's `--py-files`."""
    return Path(trio_nsq.__path__[0]).is_dir()


def write_zip(path: Path, packages: Sequence[ModuleType] = (trio_nsq,)) -> None:
    """Write packages, the sources only; the same sources make the same file.

    Args:
        path: Where to; replaced if it is there.
        packages: As they were imported, out of folders.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        for package in packages:
            folder = Path(package.__path__[0])
            for source in sorted(folder.rglob("*.py")):
                info = zipfile.ZipInfo(source.relative_to(folder.parent).as_posix(), _MADE_AT)
                info.compress_type = zipfile.ZIP_DEFLATED
                bundle.writestr(info, source.read_bytes())
