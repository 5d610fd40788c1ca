"""Open the storage of a place: a local folder, or an object store."""

from .access import HadoopSettings, access_to
from .calls import PATIENCE, Patience
from .interface import Storage, StorageError
from .local import LocalStorage
from .objects import ObjectStorage
from .storage_uri import AZURE, GCS, HADOOP, S3, local_path, parse_place


def storage_at(place: str, hadoop: HadoopSettings = dict, patience: Patience = PATIENCE) -> Storage:
    """Return the storage of a place, which need not exist.

    Args:
        place: A path, or a URI: `file://`, `s3://` (or `s3a://`), `gs://`, or `az://` (or `abfs://`, `abfss://`).
        hadoop: See `keep_secrets`.
        patience: The time limits of requests to an object store.

    Raises:
        StorageError: The URI is not supported, or cannot be used.
    """
    if (local := local_path(place)) is not None:
        return LocalStorage(local)
    uri = parse_place(place)
    if uri.kind in (S3, GCS, AZURE):
        if not uri.host:
            raise StorageError(
                f"the URL {uri.without_secrets()} has no bucket: write {uri.scheme}://BUCKET/FOLDER"
            )
        return ObjectStorage(str(uri.without_secrets()), access_to(uri, hadoop), patience)
    if uri.kind == HADOOP:
        raise StorageError(f"the URL {uri.without_secrets()} can only be used for exports and replays")
    raise StorageError(
        f"the URL {uri.without_secrets()} is not supported: use a path, or a URL that begins with s3://, gs://, "
        "az://, abfss:// or hdfs://"
    )
