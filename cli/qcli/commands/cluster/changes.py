"""`qcli cluster switch`, `promote` and `remove`: another member leads, or one is forgotten."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import click

from trio_nsq.api import broker as api
from trio_nsq.fleet.cluster import leader_of, name_of

from ...broker.address_options import HTTP_OPTION, http_address, unused_tcp_addresses
from ...broker.brokers import Brokers, broker_http_options
from ...broker.connection_options import http_connection
from ...broker.refusals import listed
from ...broker.requests import ask
from ...contexts.choice import require_address
from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode, Failure
from ...framework.output import print_diagnostic
from ...terminal.confirm import UNCONFIRMED, confirm, confirm_by_typing
from .options import member_argument, timeout_option, yes_option

if TYPE_CHECKING:
    from trio_nsq.api.answers import Cluster

_POLL_S = 0.1

_NO_LEADER = "There is no leader, or no member answers."


def _leads(cluster: Cluster) -> str:
    """Return the name of the member that leads."""
    leader = leader_of(cluster)
    return cluster["leader"] if leader is None else name_of(leader)


@click.command(
    "switch",
    cls=DocumentedCommand,
    short_help="Let another member lead.",
    examples={
        "let a member that is in sync lead": "qcli cluster switch --yes",
        "let this one lead, before the leader's machine is stopped": "qcli cluster switch 10.0.0.8:4151",
    },
    exits={
        ExitCode.OK: "Another member leads, or the named one leads already.",
        ExitCode.FAILURE: "Nothing was done: you did not confirm, or no other member, or not the named one, is in "
        "sync. Or another member leads than the named one.",
        ExitCode.UNREACHABLE: f"{_NO_LEADER} After the request: no member leads within --timeout.",
        **UNCONFIRMED,
    },
    details={
        "Effect": "The leader accepts no more publishes, waits until the other member has all, and lets it lead. "
        "Clients are disconnected, and connect again by themselves; no message is lost. Publishes without an answer "
        "must be repeated, as after each lost connection. The former leader follows.",
        "Members": "TO is an id, the first characters of one, or an address: see 'qcli cluster status'. By default, "
        "any member that is in sync may lead.",
        "Access": "The role admin is required.",
    },
)
@member_argument("to", "[TO]", ("in sync",), required=False)
@broker_http_options
@timeout_option("Wait at most this long until another member leads.", "60s")
@yes_option
def switch(to: str | None, brokers: Brokers, timeout: int, yes: bool) -> None:
    """Let another member lead, without losing messages. Waits until it does, and says how long that took.

    Asks for confirmation on a terminal; elsewhere --yes is required.
    """
    from .views import led, member_named, view_of, wait_until

    view = view_of(brokers)
    cluster = led(view)
    target = None if to is None else member_named(cluster, to)
    if target is not None and target["id"] == cluster["leader"]:
        print_diagnostic(f"{name_of(target)} leads the cluster {view.name} already.")
        return
    if not yes:
        other = "another member" if target is None else name_of(target)
        confirm(
            f"Let {other} lead the cluster {view.name} instead of {_leads(cluster)}? Clients are disconnected.",
            "'cluster switch' disconnects clients",
        )
    chosen = ask(view.address, api.switch_leader(None if target is None else target["id"]))

    def lacks(now: Cluster) -> Failure | None:
        is_new = now["epoch"] > cluster["epoch"]
        return None if is_new else Failure(f"{_leads(now)} still leads.", ExitCode.UNREACHABLE)

    now, took_s = wait_until(
        lambda: view_of(brokers),
        lacks,
        timeout,
        late="The switch was requested, and no other member leads yet.",
        poll_s=_POLL_S,
    )
    if now["leader"] != chosen:
        raise Failure(f"{_leads(now)} leads the cluster {view.name}, not {chosen}: see the log of that one.")
    print_diagnostic(
        f"{_leads(now)} leads the cluster {view.name}, epoch {now['epoch']}, after {took_s:.1f} s."
    )


_MEANING = (
    "The member becomes the leader without an election, with the messages that it has. If it has none, it restores "
    "the archive of --restore-from first. Messages that only the lost leader had are lost. Nothing keeps the lost "
    "leader from serving clients, too: it must not run, and must not be started as anything but a member of this "
    "cluster, when it follows, and what only it had is set aside."
)


@click.command(
    "promote",
    cls=DocumentedCommand,
    short_help="Let a member lead although the leader is lost.",
    examples={
        "after the leader's machine is lost": "qcli cluster promote --nsqd-http-address 10.0.0.8:4151",
    },
    exits={
        ExitCode.OK: "The member leads.",
        ExitCode.FAILURE: "Nothing was done: you did not confirm, or the member refused, because it follows a leader "
        "that runs, or lacks messages that it has acknowledged.",
        ExitCode.UNREACHABLE: "The member does not answer, or does not lead within --timeout.",
        **UNCONFIRMED,
    },
    details={
        "Effect": f"{_MEANING} Promote the member that has most, as 'qcli cluster status' of each one shows: one that "
        "was in sync has all messages that were acknowledged.",
        "When": "With --coordinator static:, no member is elected, and this is how another one leads after the leader "
        "is lost. With etcd or a bucket, a member that is in sync is elected by itself.",
        "Address": "The member at exactly this address is promoted. Use its plain HTTP address: without a leader, a "
        "follower does not answer over HTTPS.",
        "Access": "The role admin is required.",
    },
)
@unused_tcp_addresses
@http_address("Promote the member at this HTTP address.")
@http_connection
@timeout_option("Wait at most this long until the member leads.", "60s")
@yes_option
def promote(nsqd_http_address: str, timeout: int, yes: bool) -> None:
    """Let this member lead, although it was not elected: the leader is lost.

    Messages that only the lost leader had are lost, and it must not run. Asks you to type the name of the cluster; if
    standard input is not a terminal, --yes is required.
    """
    from ...broker.admin_client import AdminClient
    from ...broker.requests import ask_client, member_at
    from .views import look_at, wait_until

    require_address(nsqd_http_address, HTTP_OPTION)
    with closing(AdminClient(nsqd_http_address, is_patient=True)) as client:
        member = member_at(client)
        name = member["cluster"]
        if member["role"] == "leader":
            print_diagnostic(f"{name_of(member)} leads the cluster {name} already.")
            return
        if not yes:
            in_sync = "was in sync" if member.get("in_sync") else "was not in sync, and may lack messages"
            print_diagnostic(f"{_MEANING}\n\nThe member {name_of(member)} of the cluster {name} {in_sync}.")
            confirm_by_typing(
                name,
                f"Type the name of the cluster, {name}, to promote it",
                "'cluster promote' may lose messages",
            )
        ask_client(client, api.promote_member())

        def lacks(now: Cluster) -> Failure | None:
            if now["leader"] == member["id"]:
                return None
            return Failure(f"{_leads(now)} leads.", ExitCode.UNREACHABLE)

        now, took_s = wait_until(
            lambda: look_at(nsqd_http_address),
            lacks,
            timeout,
            late="The member was promoted, and does not lead yet.",
            poll_s=_POLL_S,
        )
    print_diagnostic(f"{_leads(now)} leads the cluster {name}, epoch {now['epoch']}, after {took_s:.1f} s.")


@click.command(
    "remove",
    cls=DocumentedCommand,
    short_help="Forget members that are gone.",
    examples={
        "forget a member whose machine is gone": "qcli cluster remove 3f2a9c0d1e2b4a55",
    },
    exits={
        ExitCode.OK: "The members were removed.",
        ExitCode.FAILURE: "You did not confirm, there is no such member, or it leads or is connected. Those named "
        "before one that leads or is connected are removed.",
        ExitCode.UNREACHABLE: _NO_LEADER,
        **UNCONFIRMED,
    },
    details={
        "Effect": "The leader forgets the member: 'status', 'wait' and 'nodes --check' no longer expect it. Its data "
        "folder does not change, and if it is started again, it is a member again. Stop it first.",
        "Members": "Each MEMBER is an id, the first characters of one, or an address: see 'qcli cluster status'.",
        "Access": "The role admin is required.",
    },
)
@member_argument("members", "MEMBER...", ("disconnected",), required=True, is_repeated=True)
@broker_http_options
@yes_option
def remove(members: tuple[str, ...], brokers: Brokers, yes: bool) -> None:
    """Forget members that are gone, such as one whose data folder was lost.

    Asks for confirmation on a terminal; elsewhere --yes is required.
    """
    from .views import led, member_named, view_of

    view = view_of(brokers)
    found = {each["id"]: each for each in (member_named(led(view), name) for name in members)}
    if not yes:
        named = listed([f"{name_of(each)}, which is {each['state']}," for each in found.values()], "and")
        confirm(
            f"Remove {named} from the cluster {view.name}?",
            "'cluster remove' makes a cluster smaller",
        )
    for member in found.values():
        ask(view.address, api.remove_member(member["id"]))
        print_diagnostic(f"{name_of(member)} removed from the cluster {view.name}.")
