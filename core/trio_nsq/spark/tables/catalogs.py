"""Catalogs of Iceberg tables, from the configuration of pyiceberg, and their errors."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from pyiceberg import exceptions
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.utils.config import Config

from ...protocol.errors import NSQError
from ...storage import Storage
from ...storage.objects import ObjectStorage
from ...storage.storage_uri import parse_place
from ..places import access_to
from .target import TableBusy, TableError, TableUnavailable

_FILE_OPTIONS = {
    "aws_endpoint": "s3.endpoint",
    "aws_region": "s3.region",
    "aws_access_key_id": "s3.access-key-id",
    "aws_secret_access_key": "s3.secret-access-key",
    "aws_session_token": "s3.session-token",
    "azure_storage_account_name": "adls.account-name",
    "azure_storage_account_key": "adls.account-key",
    "azure_storage_sas_token": "adls.sas-token",
}
"""The names of settings of object stores in pyiceberg. For Google, it finds the credentials itself."""
_TEMPORARY = (
    exceptions.CommitStateUnknownException,
    exceptions.ServiceUnavailableError,
    exceptions.ServerError,
    exceptions.TooManyRequestsError,
    OSError,  # includes the errors of requests
)


def load(name: str, storage: Storage | None = None) -> Catalog:
    """Load a catalog from the configuration of pyiceberg: `~/.pyiceberg.yaml`, or `PYICEBERG_CATALOG__NAME__...`.

    Args:
        storage: The place of the files; its credentials are used as far as the configuration has none. None: unknown;
            then these are the ones that the environment and the profile have for S3.

    Raises:
        TableError: The catalog is not configured, or cannot be used.
        TableUnavailable: The catalog cannot be reached.
    """
    configured = Config().get_catalog_config(name)
    if not configured:
        raise TableError(
            f"the Iceberg catalog {name} is not configured: describe it in ~/.pyiceberg.yaml, or set "
            f"PYICEBERG_CATALOG__{name.upper().replace('-', '_')}__URI, see py.iceberg.apache.org/configuration"
        )
    # It logs warnings of what it then raises.
    logging.getLogger("pyiceberg").addHandler(logging.NullHandler())
    with explained(f"the Iceberg catalog {name}", "used"):
        return load_catalog(
            name, **file_options(storage) | {key: str(each) for key, each in configured.items()}
        )


def file_options(storage: Storage | None) -> dict[str, str]:
    """Return the properties with which pyiceberg reaches the files of a storage; they may have secrets."""
    if isinstance(storage, ObjectStorage):
        settings = storage.access.options()
    elif storage is None:
        settings = access_to(parse_place("s3://any")).options()
    else:
        settings = {}
    return {theirs: settings[ours] for ours, theirs in _FILE_OPTIONS.items() if ours in settings}


@contextmanager
def explained(shown: str, what: str) -> Iterator[None]:
    """Convert errors of pyiceberg and of the libraries below it, which have no common class.

    Args:
        shown: The table or the catalog.
        what: What cannot be done with it, such as `read`.
    """
    try:
        yield
    except NSQError:
        raise  # explained already
    except (exceptions.CommitFailedException, exceptions.TableAlreadyExistsError) as exc:
        raise TableBusy(f"{shown} cannot be {what}: other writers change it all the time") from exc
    except Exception as exc:
        is_temporary = (
            isinstance(exc, _TEMPORARY) or type(exc).__name__ == "OperationalError"
        )  # of a database
        kind = TableUnavailable if is_temporary else TableError
        raise kind(f"{shown} cannot be {what}: {_reason(exc)}") from exc


def _reason(error: BaseException) -> str:
    """Return the first line of an error, or, for a lost connection, of what caused it."""
    cause: BaseException | None = error if isinstance(error, OSError) else None
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".:") if text else type(error).__name__
