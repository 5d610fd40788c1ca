"""Open the storage of a place: a local folder, an object store, or Hadoop's file system."""

from .hadoop import HadoopStorage
from .interface import Storage
from .local import LocalStorage
from .places import local_path


def storage_at(place: str) -> Storage:
    """Return the storage of a place, which need not exist.

    Args:
        place: A path, or a URI: `file://`, `s3://` (or `s3a://`), `gs://`, `az://` (or `abfs://`, `abfss://`), or
            `hdfs://`.

    Raises:
        StorageError: The URI is not supported, or cannot be used.
    """
    if (local := local_path(place)) is not None:
        return LocalStorage(local)
    return HadoopStorage(place.replace("s3a://", "s3://", 1))
