"""Open the storage of a place: a local folder, an object store, or Hadoop's file system."""

from .access import Access, find_access
from .hadoop import HadoopStorage
from .interface import Storage, StorageError
from .local import LocalStorage
from .objects import ObjectStorage
from .places import AZURE, GCS, HADOOP, S3, local_path, parse_place


def storage_at(place: str, access: Access | None = None) -> Storage:
    """Return the storage of a place, which need not exist.

    Args:
        place: A path, or a URI: `file://`, `s3://` (or `s3a://`), `gs://`, `az://` (or `abfs://`, `abfss://`), or
            `hdfs://`.
        access: How to reach it, from `find_access`; None: find it on this machine.

    Raises:
        StorageError: The URI is not supported, or cannot be used.
    """
    if (local := local_path(place)) is not None:
        return LocalStorage(local)
    uri = parse_place(place)
    if uri.kind in (S3, GCS, AZURE):
        if not uri.host:
            raise StorageError(f"{uri.without_secrets()} has no bucket: write {uri.scheme}://BUCKET/FOLDER")
        if access is None:
            place, access = find_access(place)
        return ObjectStorage(place, access)
    if uri.kind == HADOOP:
        return HadoopStorage(place)
    raise StorageError(
        f"{uri.without_secrets()} is not supported: use a path, or a URI that begins with s3://, gs://, az://, "
        "abfss:// or hdfs://"
    )
