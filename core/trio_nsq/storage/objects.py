"""Files in an object store: S3 and what speaks it, Google Cloud Storage, and Azure Blob Storage, through obstore.

An object is written by one request, under its final name and only if the name is free, so nothing is left of killed
processes. docs/decisions/0021-object-stores.md has the reasons.
"""

import mmap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import datetime, timedelta
from functools import partial
from typing import IO, Any

from ..protocol.errors import NSQError
from .access import EXPIRES, Access
from .calls import PATIENCE, Calls, Patience, Refused
from .interface import ChangedMeanwhile, Lease, NewFile, Storage, StorageError, Stored, StoredFile
from .lease import hold_lease
from .object_files import NewObject, ObjectInput
from .storage_uri import AZURE, GCS, S3, StorageURI, parse_place

_MIN_BYTES_PER_S = 1 << 20
"""A slower upload or download is given up."""
_LARGE_BYTES = 1 << 20
"""Before a new object of this size is sent again, the store is asked whether it is there."""
_LISTED_AT_ONCE = 1000
_ATTEMPTS, CONFLICT_S = 20, 0.2
_CREDENTIALS = {
    S3: "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    GCS: "GOOGLE_APPLICATION_CREDENTIALS",
    AZURE: "AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}
_NAMES = {S3: "the bucket", GCS: "the bucket", AZURE: "the container"}


class ObjectStorage(Storage):
    """A bucket, or the part of it below a path.

    Args:
        place: The URI, without secrets.
        access: How to reach it.
        patience: The time limits of requests.

    Raises:
        StorageError: obstore is not installed, or a setting is wrong.
    """

    def __init__(self, place: str, access: Access, patience: Patience = PATIENCE) -> None:
        try:
            import obstore  # noqa: F401
        except ImportError as exc:
            raise StorageError(
                f"{place} is in an object store, which needs the package obstore: pip install obstore"
            ) from exc
        self._uri = parse_place(place)
        self.shown = place
        self._access = access
        self._patience = patience
        self._prefix = f"{self._uri.path}/" if self._uri.path else ""
        bucket = self._uri.user if self._uri.kind == AZURE and self._uri.user else self._uri.host
        self._open = partial(_open_store, self._uri, bucket, access)
        self._stores: dict[float, Any] = {}
        self._calls = Calls(f"{_NAMES[self._uri.kind]} {bucket}", _CREDENTIALS[self._uri.kind])
        self._store(patience.attempt_s)

    @property
    def access(self) -> Access:
        """How to reach the bucket now: keys of a profile expire. Raises StorageError if there are no new ones."""
        self._access = self._access.renewed()
        return self._access

    def _store(self, timeout_s: float) -> Any:
        """Return obstore's store with a time-out of requests: it belongs to the client."""
        if timeout_s not in self._stores:
            try:
                self._stores[timeout_s] = self._open(timeout_s)
            except BaseException as exc:  # obstore raises `PanicException` for bugs
                if isinstance(exc, KeyboardInterrupt | SystemExit | NSQError):
                    raise
                first = next(iter(str(exc).splitlines()), type(exc).__name__)
                raise StorageError(f"{self.shown} cannot be used: {first}") from exc
        return self._stores[timeout_s]

    # ------------------------------------------------------------------ whole objects

    def create(self, name: str) -> NewFile:
        return NewObject(self.url_of(name), partial(self._put_file, name))

    def put_new(self, name: str, data: bytes) -> bool:
        for _ in self._attempts(name):
            try:
                self._put(name, data, "create")
                return True
            except Refused as refused:
                if (found := self.read(name)) is not None:
                    # An attempt without an answer may have been applied.
                    return refused.repeated and found.data == data
        raise AssertionError

    def read(self, name: str) -> Stored | None:
        import obstore

        def get() -> Stored:
            found = obstore.get(self._store(self._patience.attempt_s), self._prefix + name)
            return Stored(found.bytes().to_bytes(), _version_of(found.meta))

        try:
            return self._calls.run(f"the object {self.url_of(name)} cannot be read", get, self._patience)
        except FileNotFoundError:
            return None

    def replace(self, name: str, data: bytes, version: str | None) -> str:
        for _ in self._attempts(name):
            try:
                return self._put(name, data, "create" if version is None else _condition(version))
            except Refused as refused:
                found = self.read(name)
                if found is not None and refused.repeated and found.data == data:
                    return found.version
                if (None if found is None else found.version) != version:
                    raise ChangedMeanwhile(
                        f"the object {self.url_of(name)} was changed by another process"
                    ) from None
        raise AssertionError

    def _attempts(self, name: str) -> Iterator[None]:
        """Repeat a conditional request that was refused because another one was in progress."""
        for attempt in range(_ATTEMPTS):
            time.sleep(attempt and CONFLICT_S)
            yield
        raise StorageError(
            f"the object {self.url_of(name)} cannot be written: other requests for it are in progress"
        )

    def put(self, name: str, data: bytes) -> None:
        for _ in self._attempts(name):
            with suppress(Refused):  # without a condition: another request for it is in progress
                self._put(name, data, "overwrite")
                return

    def _put(self, name: str, data: Any, mode: Any) -> str:
        """Write an object by one request; return its version. Raises Refused if the condition of `mode` is not met.

        A store that refuses a large object may close the connection before all of it is sent, so that its answer is
        lost. To send the object again would not help.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError

        patience = self._patience_for(len(data))
        store, path = self._store(patience.attempt_s), self._prefix + name
        was_sent = False

        def put() -> Any:
            nonlocal was_sent
            if was_sent and mode == "create" and len(data) >= _LARGE_BYTES:
                with suppress(FileNotFoundError):
                    obstore.head(self._store(self._patience.attempt_s), path)
                    raise AlreadyExistsError(path)
            was_sent = True
            return obstore.put(store, path, data, mode=mode, use_multipart=False)

        return _version_of(self._call(f"the object {self.url_of(name)} cannot be written", put, patience))

    def _put_file(self, name: str, file: IO[bytes], size: int) -> bool:
        """Write a large object from a file; return False if it exists. Its pages are not copied."""
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        for _ in self._attempts(name):
            try:
                self._put(name, content, "create")
                return True
            except Refused as refused:
                if (there := self.size(name)) is not None:
                    return refused.repeated and there == size
        raise AssertionError

    # ------------------------------------------------------------------ lists

    def names(self, folder: str) -> list[str]:
        start = f"{folder.strip('/')}/".lstrip("/")
        names = (self._file_of(each).name for each in self._list(start))
        return [name for name in names if "/" not in name.removeprefix(start)]

    def files(self) -> list[StoredFile] | StoredFile | None:
        found = [self._file_of(each) for each in self._list("")]
        return found or (self.file("") if self._uri.path else None)

    def ages(self) -> Iterator[tuple[str, float]]:
        for each in self._list(""):
            yield self._file_of(each).name, each["last_modified"].timestamp()

    def _file_of(self, each: Any) -> StoredFile:
        return StoredFile(each["path"].removeprefix(self._prefix), each["size"], _stamp_of(each))

    def file(self, name: str) -> StoredFile | None:
        import obstore

        path = (self._prefix + name).rstrip("/")
        try:
            found = self._calls.run(
                f"the object {self.url_of(name)} cannot be read",
                lambda: obstore.head(self._store(self._patience.attempt_s), path),
                self._patience,
            )
        except FileNotFoundError:
            return None
        return StoredFile(name, found["size"], _stamp_of(found))

    def _list(self, folder: str) -> Iterator[Any]:
        """List all objects of a folder. A request that fails is repeated from where the list is."""
        import obstore

        what, last = f"the objects of {self.url_of(folder)} cannot be listed", ""
        store, prefix = self._store(self._patience.attempt_s), self._prefix + folder

        def begin() -> tuple[Any, Any]:
            pages = obstore.list(store, prefix or None, offset=last or None, chunk_size=_LISTED_AT_ONCE)
            return pages, next(pages, None)

        pages, page = self._call(what, begin)
        while page:
            for each in page:
                last = each["path"]
                yield each
            try:
                page = self._call(what, lambda: next(pages, None), self._patience._replace(deadline_s=0))  # noqa: B023
            except StorageError:
                pages, page = self._call(what, begin)

    def _call(
        self,
        what: str,
        work: Callable[[], Any],
        patience: Patience | None = None,
    ) -> Any:
        """Call the store with a request that needs no object; see `Calls.run`."""
        try:
            return self._calls.run(what, work, patience or self._patience)
        except FileNotFoundError as exc:
            raise StorageError(
                f"{what}: the store answers HTTP 404: check the name of the bucket, and the endpoint if one is set"
            ) from exc

    def _patience_for(self, size: int) -> Patience:
        """Return the time limits for sending this many bytes: one of a few, because each needs a client."""
        if size <= _MIN_BYTES_PER_S:
            return self._patience
        attempt_s, deadline_s = self._patience
        while attempt_s < self._patience.attempt_s + size / _MIN_BYTES_PER_S:
            attempt_s *= 2
        return Patience(attempt_s, max(deadline_s, 2 * attempt_s))

    def remove(self, names: Iterable[str]) -> None:
        import obstore

        paths = [self._prefix + name for name in names]
        store = self._store(self._patience.attempt_s)
        for start in range(0, len(paths), _LISTED_AT_ONCE):
            some = paths[start : start + _LISTED_AT_ONCE]
            try:
                self._calls.run(
                    f"objects of {self.shown} cannot be removed",
                    partial(obstore.delete, store, some),
                    self._patience,
                )
            except (FileNotFoundError, StorageError):
                # One of them is missing, or the store has no request for many.
                for path in some:
                    with suppress(FileNotFoundError):
                        self._calls.run(
                            f"objects of {self.shown} cannot be removed",
                            partial(obstore.delete, store, path),
                            self._patience,
                        )

    def remove_unfinished(self, prefixes: Sequence[str]) -> None:
        """Do nothing: an unfinished object is a file without a name on the disk of its process."""

    def hold(self, name: str, if_held: Callable[[str], NSQError]) -> AbstractContextManager[Lease]:
        return hold_lease(self, name, if_held)

    def url_of(self, name: str) -> str:
        uri = self._uri.without_secrets()
        return str(uri._replace(path=(self._prefix + name).strip("/"), options={}))

    def open_input(self, name: str) -> ObjectInput:
        found = self.file(name)
        if found is None:
            raise FileNotFoundError(f"the object {self.url_of(name)} does not exist")
        return self.open_file(found)

    def open_file(self, file: StoredFile) -> ObjectInput:
        return ObjectInput(file.size_bytes, partial(self._read_range, file))

    def _read_range(self, file: StoredFile, start: int, end: int) -> bytes:
        """Read a part of an object. Raises StorageError if it has another version than the given one."""
        import obstore

        patience = self._patience_for(end - start)
        options: Any = {"range": (start, end)} | _condition_of_read(file.version)

        def get() -> bytes:
            return (
                obstore.get(self._store(patience.attempt_s), self._prefix + file.name, options=options)
                .bytes()
                .to_bytes()
            )

        what = f"the object {self.url_of(file.name)} cannot be read"
        try:
            return self._calls.run(what, get, patience)
        except (Refused, FileNotFoundError):
            raise StorageError(f"{what}: it was changed meanwhile") from None


def _open_store(uri: StorageURI, bucket: str, access: Access, timeout_s: float) -> Any:
    from obstore.store import AzureStore, GCSStore, S3Store

    options = access.options()
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=timeout_s),
        "connect_timeout": timedelta(seconds=5),
    }
    if (certificate := options.pop("root_certificate", None)) is not None:
        client["root_certificate"] = certificate
    for kind in ("aws", "google", "azure"):
        if options.pop(f"{kind}_allow_http", "").lower() in ("1", "true"):
            client["allow_http"] = True
    common: dict[str, Any] = {"client_options": client, "retry_config": {"max_retries": 0}}
    if uri.kind == S3:
        options.setdefault("aws_region", "us-east-1")
        options["aws_conditional_put"] = "etag"  # whatever the environment says
        if "aws_access_key_id" in options:
            # Not as options: a token in the environment of a worker would be added to them.
            common["credential_provider"] = _S3Keys(access)
            for name in ("aws_access_key_id", "aws_secret_access_key", "aws_session_token"):
                options.pop(name, None)
        return S3Store(bucket, config=options, **common)  # type: ignore[arg-type]
    if uri.kind == GCS:
        return GCSStore(bucket, config=options, **common)  # type: ignore[arg-type]
    return AzureStore(bucket, config=options, **common)  # type: ignore[arg-type]


class _S3Keys:
    """Gives obstore the keys of S3; those of a profile are found again when they expire."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def __call__(self) -> Any:
        self._access = self._access.renewed()
        keys = dict(self._access.settings)
        expires = keys.get(EXPIRES)
        return {
            "access_key_id": keys["aws_access_key_id"],
            "secret_access_key": keys.get("aws_secret_access_key", ""),
            "token": keys.get("aws_session_token"),
            "expires_at": None if expires is None else datetime.fromisoformat(expires),
        }


def _stamp_of(meta: Any) -> str:
    """Return the ETag without quotes, which some stores omit in some responses."""
    return str(meta.get("e_tag") or meta["last_modified"]).replace('"', "")


def _version_of(meta: Any) -> str:
    """Encode the ETag and the number of a version: Google Cloud Storage compares the number, others the ETag."""
    return f"{(meta.get('e_tag') or '')} {meta.get('version') or ''}".strip()


def _condition(version: str) -> dict[str, str]:
    tag, _, number = version.partition(" ")
    return {"e_tag": tag} | ({"version": number} if number else {})


def _condition_of_read(stamp: str) -> dict[str, str]:
    weak, _, tag = stamp.rpartition("W/")
    return {} if " " in tag else {"if_match": f'W/"{tag}"' if weak or stamp != tag else f'"{tag}"'}
