"""Pack this package into a zip file, for Spark's workers on machines where it is not installed."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import trio_nsq

_TIMESTAMP = (1980, 1, 1, 0, 0, 0)


def can_be_zipped() -> bool:
    """Whether this package is in a folder. With spark-submit's `--py-files` it is in a zip file already."""
    return Path(trio_nsq.__path__[0]).is_dir()


def write_zip(path: Path, packages: Sequence[ModuleType] = (trio_nsq,)) -> None:
    """Write the sources of packages; the same sources give the same file.

    Args:
        path: The zip file; replaced if it exists.
        packages: Packages that were imported from folders.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        for package in packages:
            folder = Path(package.__path__[0])
            for source in sorted(folder.rglob("*.py")):
                info = zipfile.ZipInfo(source.relative_to(folder.parent).as_posix(), _TIMESTAMP)
                info.compress_type = zipfile.ZIP_DEFLATED
                bundle.writestr(info, source.read_bytes())
