"""The rows of `qcli nodes`: a record of each broker and discovery service, and their tables."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from trio_nsq.api.answers import Cluster
from trio_nsq.fleet.cluster import address_of, leader_of
from trio_nsq.fleet.snapshot import BrokerState, LookupdState
from trio_nsq.text.wording import printable

from ...framework.errors import ExitCode, Failure
from ...records.brokers import NodeRecord
from ...terminal.figures import age, short_count, short_size
from ...terminal.fitted_table import Column, fitted_table
from .survey import Survey

Record = dict[str, Any]

KEYS = tuple(NodeRecord.__annotations__)


def records_of(survey: Survey, now_s: float) -> list[Record]:
    """Return a record of each broker, which the members that follow it come after; then of each service."""
    brokers = []
    for state in survey.brokers:
        brokers.append(_broker(state, survey, now_s))
        if state.cluster is not None:
            brokers += _followers(state.cluster)
    return [*brokers, *(_lookupd(state, survey.failures.get(state.address)) for state in survey.lookupds)]


def _broker(state: BrokerState, survey: Survey, now_s: float) -> Record:
    node = next(iter(state.registrations.values()), None)
    info, answers = state.info, state.reachable
    channels = [queue for topic in state.topics.values() for queue in topic.channels.values()]
    ages = [queue.oldest_age_ms for queue in channels if queue.oldest_age_ms is not None]
    start_time = info.get("start_time")
    disk = state.stats.get("disk") or {}

    def total(numbers: Iterable[int]) -> int | None:
        return sum(numbers) if answers else None

    about = {
        "kind": "broker",
        "address": state.address,
        "status": _status(state, survey.failures.get(state.address)),
        "reason": state.error or None,
        "version": info.get("version") or (node.version if node else None),
        "health": state.health if answers else None,
        "draining": state.draining if answers or node else None,
        "hostname": info.get("hostname"),
        "broadcast_address": node.broadcast_address if node else info.get("broadcast_address"),
        "tcp_port": node.tcp_port if node else info.get("tcp_port"),
        "http_port": node.http_port if node else info.get("http_port"),
        "start_time": start_time,
        "uptime_s": max(0, round(now_s - start_time)) if start_time is not None else None,
        "topics": len(state.topics) if answers else len(node.topics) if node else None,
        "channels": len(channels) if answers else None,
        "clients": total(queue.clients for queue in channels),
        "depth": total(topic.depth for topic in state.topics.values()),
        "in_flight": total(queue.in_flight for queue in channels),
        "deferred": total(queue.deferred for queue in channels),
        "messages": total(topic.queue.messages for topic in state.topics.values()),
        "oldest_message_age_ms": max(ages, default=None),
        "disk_used_bytes": disk.get("used_bytes"),
        "disk_free_bytes": disk.get("free_bytes"),
        "disk_total_bytes": disk.get("total_bytes"),
        "configured": state.configured,
        "registered_at": list(state.registrations),
        "not_registered_at": [
            address for address in survey.asked_lookupds if address not in state.registrations
        ],
        "tombstones": sorted({topic for each in state.registrations.values() for topic in each.tombstones}),
    }
    if state.cluster is not None:
        about["address"] = _address_of_leader(state.address, state.cluster)
        about |= {"cluster": state.cluster["cluster"], "epoch": state.cluster["epoch"], "role": "leader"}
    return {key: about.get(key) for key in KEYS}


def _address_of_leader(asked: str, cluster: Cluster) -> str:
    """Return the address that was asked; if it is that of a follower, which passes requests on, the leader's."""
    leader = leader_of(cluster)
    is_follower = any(
        asked == address_of(each["addresses"]) for each in cluster["members"] if each is not leader
    )
    return (address_of(leader["addresses"]) or asked) if is_follower and leader is not None else asked


def _followers(cluster: Cluster) -> Iterator[Record]:
    """Yield a record of each member that does not lead."""
    for member in cluster["members"]:
        if member["id"] != cluster["leader"]:
            about = {
                "kind": "member",
                "address": address_of(member["addresses"]) or member["id"],
                "status": member["state"],
                "cluster": cluster["cluster"],
                "epoch": cluster["epoch"],
                "role": "follower",
            }
            yield {key: about.get(key) for key in KEYS}


def _lookupd(state: LookupdState, failure: Failure | None) -> Record:
    about = {
        "kind": "lookupd",
        "address": state.address,
        "status": "ok" if failure is None else _failure_word(failure),
        "reason": state.error or None,
        "version": state.version or None,
        "topics": len({topic for node in state.nodes for topic in node.topics}) if failure is None else None,
        "brokers": len(state.nodes) if failure is None else None,
    }
    return {key: about.get(key) for key in KEYS}


def _status(state: BrokerState, failure: Failure | None) -> str:
    if failure is not None:
        return _failure_word(failure)
    if state.health != "OK":
        return "unhealthy"
    return "draining" if state.draining else "ok"


def _failure_word(failure: Failure) -> str:
    return "no answer" if failure.exit_code is ExitCode.UNREACHABLE else "refused"


def _count(key: str, short: str = "") -> Column[Record]:
    return Column(key, lambda row: "" if row[key] is None else short_count(row[key]), short=short)


def _size(heading: str, key: str, rank: int) -> Column[Record]:
    return Column(heading, lambda row: "" if row[key] is None else short_size(row[key]), rank=rank)


def _age(row: Record) -> str:
    age_ms = row["oldest_message_age_ms"]
    return "" if age_ms is None else age(age_ms) if age_ms else "-"


def _registered(row: Record) -> str:
    known, missing = len(row["registered_at"] or ()), len(row["not_registered_at"] or ())
    return f"{known}/{known + missing}" if known + missing else ""


BROKER_COLUMNS: tuple[Column[Record], ...] = (
    Column("broker", lambda row: row["address"], is_name=True),
    Column("status", lambda row: row["status"], is_name=True),
    Column("role", lambda row: row["role"] or "", is_name=True),
    Column("cluster", lambda row: row["cluster"] or "", is_name=True),
    Column("version", lambda row: row["version"] or "", rank=2),
    _count("topics"),
    _count("clients", "cl"),
    _count("depth"),
    Column("oldest", _age),
    _size("used", "disk_used_bytes", 3),
    _size("free", "disk_free_bytes", 1),
    Column("up", lambda row: "" if row["uptime_s"] is None else age(row["uptime_s"] * 1000)),
    Column("lookupds", _registered),
)
LOOKUPD_COLUMNS: tuple[Column[Record], ...] = (
    Column("nsqlookupd", lambda row: row["address"], is_name=True),
    Column("status", lambda row: row["status"], is_name=True),
    Column("version", lambda row: row["version"] or "", rank=1),
    _count("brokers"),
    _count("topics"),
)


def tables(records: Sequence[Record], width: int | None) -> str:
    """Return the tables of brokers and of services, and a line for what they cannot show."""
    texts = []
    for kinds, columns in ((("broker", "member"), BROKER_COLUMNS), (("lookupd",), LOOKUPD_COLUMNS)):
        if rows := [record for record in records if record["kind"] in kinds]:
            texts.append(fitted_table(columns, rows, width))
    remarks = "".join(f"{printable(line)}\n" for record in records for line in _remarks(record))
    return "\n".join([*texts, remarks] if remarks else texts)


def _remarks(record: Record) -> list[str]:
    """Return lines about what is unusual. Why a server does not answer is told on standard error."""
    address = record["address"]
    lines = []
    if record["health"] not in (None, "OK"):
        lines.append(f"{address} is not healthy: {record['health'].removeprefix('NOK - ')}")
    if record["tombstones"]:
        lines.append(f"{address} is hidden from consumers (tombstone) of: {' '.join(record['tombstones'])}")
    if record["not_registered_at"] and not record["draining"]:
        lines.append(f"{address} is not registered at: {' '.join(record['not_registered_at'])}")
    return lines
