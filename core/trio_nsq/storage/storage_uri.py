"""The names of places: paths and URIs, and the secrets in URIs."""

import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode

from .interface import StorageError

S3, GCS, AZURE, HADOOP = "s3", "gs", "az", "hdfs"
_KINDS = {
    "s3": S3,
    "s3a": S3,
    "gs": GCS,
    "gcs": GCS,
    "az": AZURE,
    "azure": AZURE,
    "abfs": AZURE,
    "abfss": AZURE,
    "hdfs": HADOOP,
    "viewfs": HADOOP,
}
PUBLIC_OPTIONS = frozenset({"region", "scheme", "endpoint_override", "allow_http"})
"""The options of URIs that are not secret. Others are not shown: they may be."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
_USER = re.compile(r"[^/@]*@")
_USER_OF_S3 = re.compile(r"[^/@]*@|[^/@:]*:[^@]*@")
"""A key and a secret, which may have slashes: AWS's secrets do."""


class StorageURI(NamedTuple):
    """The parts of a URI.

    Attributes:
        scheme: As in the URI, such as `s3a`.
        kind: The kind of store, such as `S3`; empty: unknown.
        user: What is before the `@`, without the secret; for Azure the container, if the host is the account.
        secret: The secret of the user; empty: none.
        host: The bucket, the container, or the host.
        path: Without slashes at its ends.
        options: What follows a question mark.
    """

    scheme: str
    kind: str
    user: str
    secret: str
    host: str
    path: str
    options: dict[str, str]

    def without_secrets(self) -> "StorageURI":
        options = {name: value for name, value in self.options.items() if name in PUBLIC_OPTIONS}
        return self._replace(user=self.user if self.kind == AZURE else "", secret="", options=options)

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        options = f"?{urlencode(self.options, safe='/:')}" if self.options else ""
        path = f"/{self.path}" if self.path else ""
        return f"{self.scheme}://{user}{self.host}{path}{options}"


def local_path(place: str) -> Path | None:
    """Return the path of a local folder; None if the place is a URI of another file system.

    Raises:
        StorageError: It is neither. It would be a local folder with an unexpected name.
    """
    found = _SCHEME.match(place)
    if found is None:
        return None if "://" in place else Path(place)
    scheme, rest = found[1].lower(), place[found.end() :]
    if scheme == "file":
        return _path_in(place, rest)
    if rest.startswith("//"):
        return None
    if scheme in _KINDS:
        raise StorageError(f"the URL {place} lacks two slashes: write {found[1]}://BUCKET/FOLDER")
    if rest.startswith("/"):
        raise StorageError(
            f"the URL {place} is not supported: use a path, or a URL that begins with s3://, gs://, az://, abfss:// or "
            f"hdfs://. A folder with this name is ./{place}"
        )
    return Path(place)


def _path_in(place: str, rest: str) -> Path:
    """Return the path in a URL of a file, `file:/PATH` or `file://HOST/PATH`. Raises StorageError."""
    host, path = "", rest
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        path = slash + path
    if host.lower() not in ("", "localhost") or not path.startswith("/"):
        raise StorageError(f"the URL {place} is not one of a local folder: write file:///FOLDER, or its path")
    return Path(unquote(path))


def absolute_place(place: str) -> str:
    """Return a place that does not depend on the current folder: workers of Spark have others."""
    local = local_path(place)
    return place if local is None else str(local.absolute())


def parse_place(place: str) -> StorageURI:
    """Parse the URI of a place that is not local."""
    scheme, _, rest = place.partition("://")
    rest, _, query = rest.partition("?")
    kind = _KINDS.get(scheme.lower(), "")
    user = secret = ""
    if found := (_USER_OF_S3 if kind == S3 else _USER).match(rest):
        rest = rest[found.end() :]
        user, _, secret = found.group()[:-1].partition(":")
    host, _, path = rest.partition("/")
    options = dict(parse_qsl(query, keep_blank_values=True))
    return StorageURI(scheme.lower(), kind, unquote(user), unquote(secret), host, path.strip("/"), options)


def shown_place(place: str) -> str:
    """Return a place without the secrets that its URI may have."""
    return place if local_path(place) is not None else str(parse_place(place).without_secrets())


def canonical_place(place: str) -> str:
    """Return a place as it is compared with others: absolute, no secrets, the same for `s3a://a/b/` and `s3://a/b`.

    Raises StorageError: As `local_path`.
    """
    local = local_path(place)
    if local is not None:
        return str(local.absolute())
    uri = parse_place(place).without_secrets()
    return str(uri._replace(scheme=uri.kind or uri.scheme))


def place_below(place: str, *names: str) -> str:
    """Return a place below another one; the options of a URI stay."""
    head, mark, options = (place, "", "") if local_path(place) is not None else place.partition("?")
    return ("/".join([head.rstrip("/"), *names]) or "/") + mark + options


def split_place(place: str) -> tuple[str, str]:
    """Return the folder of a file, and its name."""
    if local_path(place) is not None:
        folder, _, name = place.rstrip("/").rpartition("/")
        return folder or "/", name
    uri = parse_place(place)
    folder, _, name = uri.path.rpartition("/")
    return str(uri._replace(path=folder)), name
