"""Catalogs of Iceberg tables, from the configuration of pyiceberg, and their errors."""

from collections.abc import Iterator
from contextlib import contextmanager

from pyiceberg import exceptions
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.utils.config import Config

from ..storage import Storage, local_path
from .target import TableBusy, TableError, TableUnavailable

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
        storage: The place of the files; its credentials are used as far as the configuration has none.

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
    with explained(f"the Iceberg catalog {name}", "used"):
        return load_catalog(name, **{key: str(value) for key, value in configured.items()})


def location_of(storage: Storage) -> str:
    """Return the URI of a place for Iceberg, without a slash at its end."""
    url = storage.url_of("").rstrip("/")
    return url if local_path(url) is None else f"file://{url.removeprefix('file://')}"


@contextmanager
def explained(shown: str, what: str) -> Iterator[None]:
    """Convert errors of pyiceberg and of the libraries below it, which have no common class.

    Args:
        shown: The table or the catalog.
        what: What cannot be done with it, such as `read`.
    """
    try:
        yield
    except (exceptions.CommitFailedException, exceptions.TableAlreadyExistsError) as exc:
        raise TableBusy(f"{shown} cannot be {what}: other writers change it all the time") from exc
    except Exception as exc:
        kind = TableUnavailable if isinstance(exc, _TEMPORARY) else TableError
        text = str(exc).strip()
        reason = text.splitlines()[0].rstrip(".:") if text else type(exc).__name__
        raise kind(f"{shown} cannot be {what}: {reason}") from exc
