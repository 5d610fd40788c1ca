"""Open the coordinator of a URL."""

import ssl
from pathlib import Path
from urllib.parse import unquote

from ..access.secret import NO_SECRET, Secret
from ..protocol.address import parse_address
from ..storage import Patience, StorageError, storage_at
from ..storage.storage_uri import AZURE, GCS, S3, parse_place
from .bucket import TTL_S, BucketCoordinator
from .interface import Coordinator, CoordinatorError
from .static import StaticCoordinator

_PATIENCE = Patience(attempt_s=TTL_S / 5, deadline_s=TTL_S / 2)
"""One request that is never answered, and another one, take less than the lease's time."""
_SCHEMES = (
    "etcd://HOST:PORT,HOST:PORT, etcds:// with TLS, s3://BUCKET/FOLDER, gs://, az://, or static:HOST:PORT"
)


def open_coordinator(
    url: str,
    cluster: str,
    data_folder: Path,
    *,
    password: Secret = NO_SECRET,
    tls: ssl.SSLContext | None = None,
) -> Coordinator:
    """Return the coordinator of a cluster. No request is made yet.

    Args:
        url: `etcd://HOST:PORT,HOST:PORT`, or `etcds://` with TLS, both with `USER@` before the hosts if etcd has users;
            the URL of a place in an object store, see `storage_at`; or `static:` and the
            addresses of the other members, `HOST:PORT,HOST:PORT`.
        cluster: The name of the cluster.
        data_folder: For `static:`, the folder with the file.
        password: The password of etcd's user.
        tls: For `etcds://`; None: the system's CAs.

    Raises:
        CoordinatorError: The URL is not valid, or the engine cannot be used.
        StateError: The name is not valid.
    """
    scheme, _, rest = url.partition(":")
    scheme = scheme.lower()
    if scheme == "static":
        return StaticCoordinator(data_folder, cluster, _addresses(url, rest) if rest else ())
    if scheme in ("etcd", "etcds") and rest.startswith("//"):
        from .etcd import EtcdCoordinator  # httpcore is slow to import

        user, endpoints = _parse_etcd(url, rest[2:])
        if scheme == "etcds" and tls is None:
            tls = ssl.create_default_context()
        return EtcdCoordinator(
            endpoints, cluster, tls=tls if scheme == "etcds" else None, user=user, password=password
        )
    if rest.startswith("//") and parse_place(url).kind in (S3, GCS, AZURE):
        try:
            return BucketCoordinator(storage_at(url, patience=_PATIENCE), cluster)
        except StorageError as exc:
            raise CoordinatorError(str(exc)) from exc
    raise CoordinatorError(f"the URL {_without_password(url)} is not one of a coordinator: use {_SCHEMES}")


def _parse_etcd(url: str, rest: str) -> tuple[str, list[tuple[str, int]]]:
    """Return the user and the endpoints of a URL. Raises CoordinatorError."""
    user, _, hosts = rest.rpartition("@")
    shown = _without_password(url)
    if ":" in user:
        raise CoordinatorError(f"the URL {shown} has a password: give a file that has it instead")
    return unquote(user), _addresses(shown, hosts.removesuffix("/"))


def _addresses(url: str, hosts: str) -> list[tuple[str, int]]:
    """Return the hosts and ports of a URL, which have commas between them. Raises CoordinatorError."""
    try:
        return [parse_address(host) for host in hosts.split(",")]
    except ValueError as exc:
        raise CoordinatorError(f"the URL {url} is not valid: {exc}") from exc


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    user, at, hosts = rest.rpartition("@")
    return f"{scheme}{separator}{user.partition(':')[0]}{at}{hosts}"
