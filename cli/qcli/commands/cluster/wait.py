"""`qcli cluster wait`: waits until a cluster has a leader, and members are in sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from trio_nsq.fleet.cluster import is_in_sync, name_of, replacement_of

from ...broker.brokers import Brokers, broker_http_options
from ...broker.refusals import listed
from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode, Failure
from ...framework.options import option
from ...framework.output import print_diagnostic
from ...framework.params import Integer
from .options import timeout_option

if TYPE_CHECKING:
    from trio_nsq.api.answers import Cluster

_POLL_S = 0.5


@click.command(
    "wait",
    cls=DocumentedCommand,
    short_help="Wait until members are in sync.",
    examples={
        "restart one member after the other": "for host in n1 n2 n3; do ssh $host systemctl restart trio-nsq && "
        "qcli cluster wait --timeout 10m || break; done",
        "wait for a new cluster of three": "qcli cluster wait --members 3 --timeout 1m",
    },
    exits={
        ExitCode.OK: "There is a leader, and the members are in sync.",
        ExitCode.FAILURE: "--timeout is over, and members are not in sync; or the broker is not a member of a cluster.",
        ExitCode.UNREACHABLE: "--timeout is over, and there is no leader, or no member answers.",
    },
)
@broker_http_options
@option(
    "Options",
    "--members",
    type=Integer(min=1),
    help="Wait until N members are in sync, with the leader. By default all that the leader knows.",
)
@timeout_option("Fail after this time. By default, wait without limit.")
def wait(brokers: Brokers, members: int | None, timeout: int | None) -> None:
    """Wait until there is a leader, and members are in sync. For scripts, such as one that restarts all members.

    While no member answers, the command asks again.
    """
    from .views import members_in_sync, view_of, wait_until

    def lacks(cluster: Cluster) -> Failure | None:
        known = len(cluster["members"])
        wanted = known if members is None else members
        if (found := members_in_sync(cluster)) >= wanted:
            return None
        others = [name_of(each) for each in cluster["members"] if not is_in_sync(each)]
        missing = f" Not in sync: {listed(others, 'and')}." if others else ""
        if replaced := [
            each["id"] for each in cluster["members"] if replacement_of(cluster, each) is not None
        ]:
            missing += f" Forget members that are gone with 'qcli cluster remove {' '.join(replaced)}'."
        return Failure(
            f"{found} of {wanted} members of the cluster {cluster['cluster']} are in sync.{missing}"
        )

    cluster, took_s = wait_until(
        lambda: view_of(brokers), lacks, timeout, late="--timeout is over.", poll_s=_POLL_S
    )
    print_diagnostic(
        f"{members_in_sync(cluster)} of {len(cluster['members'])} members of the cluster {cluster['cluster']} are in "
        f"sync, after {took_s:.1f} s."
    )
