"""A coordinator in etcd: the leader has a key with a lease, and one transaction writes it together with the value.

`/trio-nsq/CLUSTER/leader`    {"folder": ID, "session": ...}; it vanishes with the lease
`/trio-nsq/CLUSTER/state`     the value, see `ClusterState`

A transaction whose answer was lost is recognized by the session in what it has written.
"""

import json
import ssl
import threading
from base64 import b64decode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

from ..access.secret import NO_SECRET, Secret
from ..platform.boot_clock import boot_time_s
from ..protocol.address import format_address
from ..storage import Patience
from .etcd_gateway import EtcdGateway, NotFound, encoded
from .interface import Clock, Coordinator, CoordinatorError, LeadershipLost, Reading, ValueChanged
from .state import ClusterState, decode

TTL_S = 10.0
RENEW_S = 3.0


class _Keys(NamedTuple):
    """What etcd has of a cluster.

    Attributes:
        leader: The content of the leader's key; None: no member leads.
        reading: The value. Its version is the key's revision; 0: it does not exist.
        revision: etcd's revision.
    """

    leader: bytes | None
    reading: Reading
    revision: int


class EtcdCoordinator(Coordinator):
    """See `Coordinator`.

    Args:
        endpoints: The hosts and ports of etcd's members.
        cluster: The name of the cluster.
        tls: See `EtcdGateway`, also for the user and its password.
        ttl_s: The time of the lease. etcd makes it longer if it is below about two of its elections.
        patience: The time limits of requests; None: an endpoint that never answers, and the next request, take less
            than half of the lease's time.
    """

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        cluster: str,
        *,
        tls: ssl.SSLContext | None = None,
        user: str = "",
        password: Secret = NO_SECRET,
        ttl_s: float = TTL_S,
        renew_every_s: float = RENEW_S,
        patience: Patience | None = None,
        clock: Clock = boot_time_s,
    ) -> None:
        shown = ",".join(format_address(*endpoint) for endpoint in endpoints)
        scheme = "etcd" if tls is None else "etcds"
        super().__init__(f"{scheme}://{shown}", cluster, ttl_s, renew_every_s, clock)
        patience = patience or Patience(attempt_s=ttl_s / 5, deadline_s=ttl_s / 4)
        self._gateway = EtcdGateway(endpoints, tls, user, password, patience=patience)
        prefix = f"/trio-nsq/{self.cluster}/"
        self._prefix, self._end = encoded(prefix.encode()), encoded(prefix[:-1].encode() + b"0")
        self._leader_key, self._state_key = (
            encoded(f"{prefix}{name}".encode()) for name in ("leader", "state")
        )
        self._lease = "0"
        self._about = b""
        self._revision = 0
        self._is_checked = False
        self._woken = threading.Event()

    def _read(self) -> Reading:
        return self._transact([], []).reading

    def _transact(self, compare: list[dict[str, Any]], puts: list[dict[str, Any]]) -> _Keys:
        """Write keys if the comparisons hold, and return the keys before that.

        Raises:
            ValueChanged: They do not hold.
        """
        ranges = [{"request_range": {"key": key}} for key in (self._leader_key, self._state_key)]
        body = {
            "compare": compare,
            "success": [*ranges, *({"request_put": put} for put in puts)],
            "failure": ranges,
        }
        answer = self._gateway.ask("/v3/kv/txn", body)
        try:
            found = [(each["response_range"].get("kvs") or [None])[0] for each in answer["responses"][:2]]
            leader, state = (None if kv is None else b64decode(kv["value"]) for kv in found)
            version = 0 if found[1] is None else int(found[1]["mod_revision"])
            revision, succeeded = int(answer["header"]["revision"]), answer.get("succeeded") is True
        except (LookupError, TypeError, ValueError, AttributeError) as exc:
            raise CoordinatorError(f"{self.shown} does not answer as etcd does") from exc
        self._revision = revision
        value = None if state is None else decode(state)
        keys = _Keys(leader, Reading(value, version, leader is not None, revision), revision)
        if not succeeded:
            raise _NotApplied(keys)
        return keys

    def _win(self, reading: Reading, state: ClusterState) -> tuple[ClusterState, Any] | None:
        self._check_conditions()
        sent_s = self._clock()
        self._lease = self._grant()
        self._about = json.dumps({"folder": state.leader, "session": state.session}).encode()
        try:
            version = self._write_both(state, reading.version)
            if reading.state is None and state.epoch < version:
                # There may have been values since the reading, which were removed. Their epochs were not above
                # etcd's revision.
                state = replace(state, epoch=version)
                version = self._write(state, version)
        except (NotFound, LeadershipLost):
            return None  # the lease is over
        except ValueChanged:
            self._revoke()
            return None
        self._sent_s = sent_s
        return state, version

    def _grant(self) -> str:
        """Return the id of a new lease."""
        wanted_s = ceil(self.ttl_s)
        lease = self._gateway.ask("/v3/lease/grant", {"TTL": str(wanted_s), "ID": "0"})
        try:
            if int(lease["TTL"]) >= wanted_s:
                return str(lease["ID"])
        except (LookupError, TypeError, ValueError) as exc:
            raise CoordinatorError(f"{self.shown} does not answer as etcd does") from exc
        raise CoordinatorError(f"{self.shown} grants leases of {lease['TTL']} s; {wanted_s} s are needed")

    def _check_conditions(self) -> None:
        """Check that transactions are conditional. Raises CoordinatorError."""
        if self._is_checked:
            return
        impossible = {"result": "LESS", "target": "VERSION", "key": self._leader_key, "version": "0"}
        try:
            self._transact([impossible], [])
        except _NotApplied:
            self._is_checked = True
        else:
            raise CoordinatorError(
                f"{self.shown} ignores the conditions of transactions: two members could lead, so it cannot be used"
            )

    def _write_both(self, state: ClusterState, version: int) -> int:
        """Take the leader's key, which must be free, and write the value. Raises ValueChanged, NotFound."""
        free = {"result": "EQUAL", "target": "VERSION", "key": self._leader_key, "version": "0"}
        leader = {"key": self._leader_key, "value": encoded(self._about), "lease": self._lease}
        return self._put([free, self._unchanged(version)], [leader], state)

    def _put(self, compare: list[dict[str, Any]], puts: list[dict[str, Any]], state: ClusterState) -> int:
        data = state.encode()
        try:
            return self._transact(compare, [*puts, {"key": self._state_key, "value": encoded(data)}]).revision
        except _NotApplied as failure:
            keys = failure.keys
            if keys.leader == self._about and keys.reading.state == state:
                return int(keys.reading.version)  # written by an earlier request, whose answer was lost
            raise

    def _unchanged(self, version: int) -> dict[str, Any]:
        return {"result": "EQUAL", "target": "MOD", "key": self._state_key, "mod_revision": str(version)}

    def _renew(self) -> Reading | None:
        sent_s = self._clock()
        answer = self._gateway.ask("/v3/lease/keepalive", {"ID": self._lease})
        try:
            is_kept = int((answer.get("result") or {}).get("TTL") or 0) > 0
        except (TypeError, ValueError, AttributeError) as exc:
            raise CoordinatorError(f"{self.shown} does not answer as etcd does") from exc
        if not is_kept:
            raise self._lost("its lease is over, or was revoked")
        reading = self._kept(self._transact([], []))
        self._sent_s = sent_s
        return reading

    def _kept(self, keys: _Keys) -> Reading:
        """Return the value if this process has the leader's key; take the key again if it was removed."""
        if keys.leader == self._about:
            return keys.reading
        state, _ = self._current()
        if keys.leader is None and (
            keys.reading.state is None or keys.reading.state.session == state.session
        ):
            # No member has won since.
            with suppress(ValueChanged):
                return keys.reading._replace(
                    state=state, version=self._write_both(state, keys.reading.version)
                )
        raise self._lost("another member has its key")

    def _write(self, state: ClusterState, version: Any) -> Any:
        own = {"result": "EQUAL", "target": "VALUE", "key": self._leader_key, "value": encoded(self._about)}
        try:
            return self._put([own, self._unchanged(version)], [], state)
        except _NotApplied as failure:
            if failure.keys.leader != self._about:
                self._renew()  # it finds out whether the leadership is lost, or only the key
            raise

    def _release(self) -> None:
        self._revoke()

    def _revoke(self) -> None:
        with suppress(NotFound):
            self._gateway.ask("/v3/lease/revoke", {"ID": self._lease})

    def _await_change(self, timeout_s: float) -> None:
        # A watch of a member that is cut off from the others never ends: after half the lease's time, read again.
        limit_s = min(timeout_s, self.ttl_s / 2)
        self._woken = woken = threading.Event()
        request = {"key": self._prefix, "range_end": self._end, "start_revision": str(self._revision + 1)}
        self._gateway.watch({"create_request": request}, limit_s, woken)
        if not self._ending.is_set():
            woken.wait(limit_s)

    def close(self) -> None:
        super().close()
        self._woken.set()
        self._gateway.close()


class _NotApplied(ValueChanged):
    """The comparisons of a transaction do not hold."""

    def __init__(self, keys: _Keys) -> None:
        super().__init__("the value was changed meanwhile")
        self.keys = keys
