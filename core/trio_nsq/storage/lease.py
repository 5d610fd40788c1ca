"""A lease in an object store: an object that its holder changes every few seconds, by compare-and-swap.

Another process takes it over when it has seen the object unchanged for the lease's time, on its own clock, or at once
if the holder was a process of this machine that has ended. A holder that slept longer than that notices it before it
writes again: `check` renews the lease if the last time is too long ago. What it has sent before that is conditional.
"""

import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..platform.boot_clock import boot_time_s
from ..protocol.errors import NSQError
from .interface import ChangedMeanwhile, Lease, LeaseLost, Storage, StorageError, Stored
from .local import this_process

LEASE_S = 15.0
"""How long a lease lasts after it was renewed."""
RENEW_S = 3.0
_POLL_S = 0.5
_CHECKED_S = 10.0
"""`check` renews a lease that was not renewed for this time; the rest is for writing."""
_WRONG_VERSION = "0 0"
"""An ETag and a generation that no object has."""


@contextmanager
def hold_lease(storage: Storage, name: str, if_held: Callable[[str], NSQError]) -> Iterator[Lease]:
    """See `Storage.hold`; for storages with an atomic `replace`.

    Raises:
        StorageError: The store cannot be used, or ignores conditions.
    """
    lease = _KeptLease(ObjectLease(storage, name))
    lease.acquire(if_held)
    try:
        check_conditions(storage, name)
        lease.start()
        yield lease
    finally:
        lease.release()


def check_conditions(storage: Storage, name: str) -> None:
    """Check that the store honours conditions, with an object that exists. Raises StorageError.

    Otherwise, two processes could hold a lease at the same time.
    """
    ignored = ""
    if storage.put_new(name, b"{}"):
        ignored = "If-None-Match"
    else:
        with suppress(ChangedMeanwhile):
            storage.replace(name, b"{}", _WRONG_VERSION)
            ignored = "If-Match"
    if ignored:
        raise StorageError(
            f"the store of {storage.shown} ignores {ignored}: it would not keep two processes from writing the same "
            "messages, so it cannot be used"
        )


class ObjectLease:
    """A lease in an object, without a thread that renews it.

    Args:
        storage: A storage with an atomic `replace`.
        name: The object.
        ttl_s: How long the lease lasts after it was renewed.
        clock: A clock that also runs while the machine sleeps.

    Attributes:
        sent_s: When the last successful renewal was sent; no other process takes the lease before `ttl_s` have passed.
        was_renewed: Whether `find_holder` has seen the holder renew it.
    """

    def __init__(
        self, storage: Storage, name: str, ttl_s: float = LEASE_S, clock: Callable[[], float] = boot_time_s
    ) -> None:
        self.sent_s: float = 0.0
        self.was_renewed: bool = False
        self._storage = storage
        self._name = name
        self._ttl_s = ttl_s
        self._clock = clock
        self._about = {"holder": this_process(), "token": secrets.token_hex(8), **_identity()}
        self._count = 0
        self._version: str | None = None
        self._unchanged_s: float | None = None

    def find_holder(self) -> str | None:
        """Return a description of the process that holds the lease; None: it is free."""
        began_s = self._clock()
        found = self._storage.read(self._name)
        version, about = (None, None) if found is None else (found.version, _parse(found))
        if version != self._version or self._unchanged_s is None:
            self.was_renewed = self._unchanged_s is not None and about is not None
            self._version, self._unchanged_s = version, self._clock()
        if (
            about is None
            or about.get("token") == self._about["token"]  # taken by a request whose answer was lost
            or _has_ended(about)
            or began_s - self._unchanged_s > self._ttl_s
        ):
            return None
        return str(about.get("holder") or "another process")

    def take(self) -> bool:
        """Take the lease that `find_holder` has found free. Return False if another process was faster."""
        try:
            self._swap()
        except ChangedMeanwhile:
            return False
        return True

    def renew(self) -> None:
        """Renew the lease. Raises LeaseLost, or StorageError if the store does not answer."""
        while True:
            try:
                self._swap()
                return
            except ChangedMeanwhile:
                found = self._storage.read(self._name)
                if found is None:
                    raise LeaseLost(
                        f"{self._storage.url_of(self._name)}, the lease of this process, was removed: nothing but its "
                        "holder may change what is in this place"
                    ) from None
                if (_parse(found) or {}).get("token") != self._about["token"]:
                    raise LeaseLost(
                        f"another process has taken over {self._storage.shown}, because this one did not run for "
                        f"{self._ttl_s:.0f} s or could not reach the store: it has written nothing since"
                    ) from None
                self._version = found.version  # of an earlier request, whose answer was lost

    def free(self) -> None:
        """Free the lease, so that the next process need not wait. Raises StorageError."""
        with suppress(ChangedMeanwhile):
            self._version = self._storage.replace(
                self._name, json.dumps({"holder": None}).encode(), self._version
            )

    def _swap(self) -> None:
        began_s = self._clock()  # before the request: it may take long
        self._count += 1
        data = json.dumps({**self._about, "count": self._count}).encode()
        self._version = self._storage.replace(self._name, data, self._version)
        self.sent_s = began_s
        self._unchanged_s = None


class _KeptLease(Lease):
    """A lease that a thread renews."""

    def __init__(self, lease: ObjectLease) -> None:
        self._lease = lease
        self._lost: LeaseLost | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="trio-nsq-lease", daemon=True)

    def acquire(self, if_held: Callable[[str], NSQError]) -> None:
        """Wait until the lease is free, for at most its time. Raises the error of `if_held`."""
        while (holder := self._lease.find_holder()) is not None or not self._lease.take():
            if holder is not None and self._lease.was_renewed:
                raise if_held(holder)
            self._ended.wait(_POLL_S)

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        with self._lock:
            if self._lost is not None or boot_time_s() - self._lease.sent_s > _CHECKED_S:
                self._renew()

    def _renew(self) -> None:
        """Renew the lease, with the lock. Raises LeaseLost, or StorageError if the store does not answer."""
        if self._lost is not None:
            raise self._lost
        try:
            self._lease.renew()
        except LeaseLost as exc:
            self._lost = exc
            raise

    def _keep(self) -> None:
        """Renew the lease until it is released."""
        while not self._ended.wait(RENEW_S):
            with self._lock, suppress(NSQError, OSError):  # `check` reports it
                if self._ended.is_set() or self._lost is not None:
                    return
                self._renew()

    def release(self) -> None:
        """Free the lease; do not wait for long if the store does not answer."""
        self._ended.set()
        freeing = threading.Thread(target=self._free, name="trio-nsq-lease", daemon=True)
        freeing.start()
        freeing.join(RENEW_S)

    def _free(self) -> None:
        with self._lock, suppress(NSQError, OSError):
            if self._lost is None:
                self._lease.free()


def _parse(found: Stored | None) -> dict[str, Any] | None:
    """Return what the object of a lease says; None if the lease is free."""
    if found is None:
        return None
    try:
        about = json.loads(found.data)
        return dict(about) if about["holder"] else None
    except (ValueError, KeyError, TypeError):
        return {}


def _identity() -> dict[str, Any]:
    """Identify this process among all that ran on this machine since its start; empty if that is unknown."""
    try:
        return {"machine": _machine(), "pid": os.getpid(), "started": _started(os.getpid())}
    except (OSError, IndexError):
        return {}


def _machine() -> str:
    """Return what identifies this start of this machine, and the container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _started(pid: int) -> str:
    """Return when a process was started, in ticks. Raises OSError; ProcessLookupError if it has ended.

    /proc can be without the processes of other users, or without /proc/sys: what is not there tells nothing.
    """
    with suppress(PermissionError):  # of another user
        os.kill(pid, 0)
    state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if state in "ZX":
        raise ProcessLookupError(pid)
    return rest[18]


def _has_ended(about: dict[str, Any]) -> bool:
    """Whether the holder was certainly a process of this machine that has ended."""
    try:
        if about.get("machine") != _machine():
            return False
        return bool(_started(int(about["pid"])) != about["started"])
    except ProcessLookupError:
        return True
    except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError):
        return False
