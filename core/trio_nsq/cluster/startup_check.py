"""Checks whether a member could start, without starting it."""

from functools import partial

from ..broker.options import BrokerOptions
from ..coordination.interface import Coordinator, CoordinatorError
from ..coordination.state import StateError
from ..log import Files
from ..protocol.errors import StartupError
from ..server.startup_checks import problems_of
from .member import check_addresses, check_restore, link_secret, link_tls, open_engine
from .membership import check_cluster, read_membership
from .options import ClusterOptions


def member_problems(options: BrokerOptions, cluster: ClusterOptions) -> list[str]:
    """Return why a member could not start with these options; empty: it could. The coordinator is asked, too."""
    return problems_of(
        [
            partial(check_addresses, options),
            partial(check_restore, options, cluster),
            partial(link_secret, options, cluster),
            partial(link_tls, options, cluster),
            partial(_check_folder, options, cluster),
            partial(_check_coordinator, options, cluster),
        ]
    )


def _check_folder(options: BrokerOptions, cluster: ClusterOptions) -> None:
    check_cluster(read_membership(Files(), options.data_path), cluster.cluster, options.data_path)


def _check_coordinator(options: BrokerOptions, cluster: ClusterOptions) -> None:
    coordinator: Coordinator = open_engine(options, cluster)
    try:
        coordinator.read()
    except (CoordinatorError, StateError) as exc:
        raise StartupError(f"--coordinator: {exc}") from exc
    finally:
        coordinator.close()
