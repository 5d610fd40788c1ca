"""`qcli cluster status`: the members of a cluster, who leads it, and what is wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from trio_nsq.fleet.archive import Archive
from trio_nsq.fleet.cluster import (
    address_of,
    is_in_sync,
    leader_of,
    name_of,
    problems_of,
    progress_of,
    replacement_of,
)

from ...broker.brokers import Brokers, broker_http_options
from ...framework import output
from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode
from ...framework.options import output_format
from ...records.brokers import ClusterRecord, SeenCluster
from ...terminal.figures import age, short_count, short_size
from ...terminal.fitted_table import Column, fitted_table, output_width
from ..shared.archives import note_of_archive

if TYPE_CHECKING:
    from trio_nsq.api.answers import Cluster, ClusterMember

    from .views import View

_MS_PER_S = 1000


@click.command(
    "status",
    cls=DocumentedCommand,
    short_help="Show the members of a cluster, and who leads it.",
    examples={
        "show the cluster of a broker": "qcli cluster status",
        "check it, for monitoring": "qcli cluster status > /dev/null || exit 2",
        "print the address of the leader": "qcli cluster status --format json | "
        "jq -r '.leader as $id | .members[] | select(.id == $id) | .addresses[0]'",
    },
    exits={
        ExitCode.OK: "There is a leader, all members are in sync, and the coordinator answers.",
        ExitCode.FAILURE: "A member is not in sync or not connected, the coordinator does not answer, or publishes are "
        "refused; the output says which. Or the broker is not a member of a cluster.",
        ExitCode.UNREACHABLE: "There is no leader, or no member answers.",
    },
    details={
        "Addresses": "Any member may be asked: a follower passes the request on to the leader. With several addresses, "
        "one that answers is enough; the others are named on standard error. With addresses of several clusters, each "
        "cluster is shown. Of members that are asked, it also shows why they are disconnected, and what they have kept "
        "that the leader lacks. Without a leader, the member tells what it knows, and why it does not lead or follow; "
        "over HTTPS, a follower answers nothing itself.",
        "Columns": "member: the id of its data folder. address: where commands reach it. state: leading; in sync: it "
        "has all messages that were acknowledged; catching up: it copies what it lacks, and has so much of the "
        "leader's files; disconnected. If a member with a new data folder runs at the address of a disconnected one, "
        "the line 'replaced' says how to forget that one. in sync: whether it may lead next. behind: the operations of "
        "the leader that it has not stored, and their bytes. lag: the age of the oldest one. wait: the time in which "
        "it stores them, for which OKs wait. for: the time since the state began.",
        "Keys": "An object for each cluster: cluster, epoch (each leader has a higher one), leader (an id; null: "
        "there is none), since (Unix seconds), coordinator, coordinator_error (empty: it answers), "
        "min_in_sync, refuses_because (empty: publishes are accepted), archive (of the leader, as in /stats; absent: "
        "there is none), members, reason (why there is no "
        "leader; null: there is one), problems (sentences), diverged (by id: folders with what a member had "
        "and its leader had not) and answered_by (the address that was asked). Each member has id, addresses,"
        " state, in_sync, lag_operations, lag_bytes, lag_s, since, ok_wait_s, is_slow, copied_bytes, "
        "copy_bytes and free_bytes (of its disk). Without a leader, members has only the member that "
        "answered, as it sees itself.",
    },
)
@broker_http_options
@output_format(
    "table: for people. json: write an object per cluster.", "table", "json", records=[ClusterRecord]
)
def status(brokers: Brokers, form: str) -> int:
    """Show the members of a cluster, who leads it, and what is wrong."""
    from .views import views_of

    views, failures = views_of(brokers)
    if form == "json":
        output.write(output.json_lines(map(_record, views)))
    else:
        width, now_s = output_width(), time.time()
        output.write("\n".join(_text(view, width, now_s) for view in views))
    for failure in failures:
        output.print_diagnostic(f"Warning: {failure.brief}")
    for view in views:
        if view.cluster is None:
            raise view.no_leader()
    return ExitCode.FAILURE if any(_problems(view) for view in views) else ExitCode.OK


def _problems(view: View) -> list[str]:
    return [f"there is no leader: {view.reason}"] if view.cluster is None else list(problems_of(view.cluster))


def _record(view: View) -> ClusterRecord:
    member, cluster = view.member, view.cluster
    about: SeenCluster
    if cluster is not None:
        about = {**cluster, "reason": None}
    else:
        state = "following" if member.get("is_following") else "disconnected"
        itself: ClusterMember = {
            "id": member["id"],
            "addresses": member.get("addresses", []),
            "state": state,
            "in_sync": member.get("in_sync", False),
        }
        about = {
            "cluster": view.name,
            "epoch": view.epoch,
            "leader": None,
            "coordinator": member.get("coordinator"),
            "coordinator_error": member.get("coordinator_error"),
            "members": [itself],
            "reason": view.reason,
        }
    diverged = {each["id"]: each["diverged"] for each in view.itself if each.get("diverged")}
    return {**about, "problems": _problems(view), "diverged": diverged, "answered_by": view.address}


# ---------------------------------------------------------------------- the text


def _text(view: View, width: int | None, now_s: float) -> str:
    head = _head(view, now_s) if view.cluster is not None else _head_without_leader(view)
    lines = output.plain_table(list(head), 2)
    if view.cluster is None:
        return lines
    return f"{lines}\n{fitted_table(_columns(now_s), view.cluster['members'], width)}"


def _head(view: View, now_s: float) -> Iterator[tuple[str, str]]:
    cluster = view.cluster
    assert cluster is not None
    leader, since_s = leader_of(cluster), cluster.get("since")
    yield "cluster", cluster["cluster"]
    yield "leader", cluster["leader"] if leader is None else name_of(leader)
    yield "epoch", f"{cluster['epoch']}" + (f", for {_since(since_s, now_s)}" if since_s else "")
    yield from _coordinator(cluster.get("coordinator", ""), cluster.get("coordinator_error", ""))
    yield "in sync", _in_sync(cluster)
    refuses = cluster.get("refuses_because")
    yield "publishes", f"refused: {refuses}" if refuses else "accepted"
    if (archive := Archive.of(cluster)) is not None:
        yield "archive", f"{archive.url}: {note_of_archive(archive)}"
    away = {each["id"] for each in cluster["members"] if each["state"] == "disconnected"}
    for member in view.itself:
        if (reason := member.get("reason")) and member["id"] in away:
            yield member["id"], reason
    if replaced := [each["id"] for each in cluster["members"] if replacement_of(cluster, each) is not None]:
        remove = f"qcli cluster remove {' '.join(replaced)}"
        yield "replaced", f"other members have the addresses. If the data folders are gone: {remove}"
    yield from _diverged(view)


def _in_sync(cluster: Cluster) -> str:
    members = cluster["members"]
    text = f"{sum(map(is_in_sync, members))} of {len(members)} members"
    least = cluster.get("min_in_sync", 1)
    return text if least <= 1 else f"{text}, at least {least} for publishes"


def _head_without_leader(view: View) -> Iterator[tuple[str, str]]:
    member = view.member
    yield "cluster", view.name
    last = member["leader"]
    yield "leader", "none" if last is None else f"{last}, which does not answer"
    yield "epoch", f"{view.epoch}"
    yield from _coordinator(member.get("coordinator", ""), member.get("coordinator_error", ""))
    in_sync = "in sync" if member.get("in_sync") else "not in sync"
    yield "answered by", f"{name_of(member)}, {member['role']}, {in_sync}"
    yield "reason", view.reason
    for other in view.others:
        yield other["id"], f"epoch {other['epoch']}, {other.get('reason') or 'nothing is wrong'}"
    yield from _diverged(view)


def _diverged(view: View) -> Iterator[tuple[str, str]]:
    """Yield the folders with what members had that their leader had not, of each member that was asked."""
    for member in view.itself:
        kept = [f"{each['name']} ({short_size(each['bytes'])})" for each in member.get("diverged", ())]
        if kept:
            yield "diverged", f"{', '.join(kept)} at {member['id']}"


def _coordinator(url: str, error: str) -> Iterator[tuple[str, str]]:
    if url or error:
        yield "coordinator", f"{url} does not answer: {error}" if error else url


def _columns(now_s: float) -> tuple[Column[ClusterMember], ...]:
    def lag(member: ClusterMember, text: str) -> str:
        return "" if member["state"] == "disconnected" else text

    return (
        Column("member", lambda row: row["id"], is_name=True),
        Column("address", lambda row: address_of(row["addresses"]), is_name=True),
        Column("state", lambda row: f"{row['state']} {progress_of(row)}".rstrip(), is_name=True),
        Column("in sync", lambda row: "yes" if row["in_sync"] else "no", rank=2),
        Column("behind", lambda row: lag(row, short_count(row.get("lag_operations", 0)))),
        Column("bytes", lambda row: lag(row, short_size(row.get("lag_bytes", 0))), rank=1),
        Column("lag", lambda row: lag(row, age(row.get("lag_s", 0.0) * _MS_PER_S))),
        Column("wait", lambda row: lag(row, age(row.get("ok_wait_s", 0.0) * _MS_PER_S)), rank=4),
        Column("for", lambda row: _since(row.get("since"), now_s), rank=3),
    )


def _since(since_s: int | None, now_s: float) -> str:
    return age(max(0, now_s - since_s) * _MS_PER_S) if since_s else ""
