"""The options of a member of a cluster."""

from dataclasses import dataclass
from pathlib import Path

from ..text.arguments import check_int, check_options


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The configuration of one member.

    Attributes:
        cluster: The name of the cluster.
        coordinator: The URL of the engine that decides who leads: see `open_coordinator`.
        coordinator_password_file: The first line of this file is the password of the coordinator's user.
        min_in_sync: Publishes are refused while fewer members are in sync, with the leader.
        catch_up_rate: How many bytes of its folder the leader reads per second for a follower that catches up; 0: no
            limit.
        restore_from: The archive of this cluster, from which a member may be restored, and lead: see `Standby`. Empty:
            none is.
        restore_after_ms: That happens if for this time there is no leader, and no other member may lead.
        cluster_auth_secret_file: The first line of this file is the token, with the role `replicate`, that this member
            sends to others. It is read for each connection.
        cluster_tls: Connect to other members over TLS only. The broker's `tls_root_ca_file` verifies their
            certificates, and they may ask for `tls_cert`.
        on_leader, on_follower: Commands for the shell, run when this member begins to lead, and when it begins to
            follow; empty for none.

    Raises:
        TypeError: A value has another type.
        ValueError: A value is out of range. `serve_member` checks the name, the URL and the files.
    """

    cluster: str
    coordinator: str
    coordinator_password_file: Path | None = None
    min_in_sync: int = 1
    catch_up_rate: int = 0
    restore_from: str = ""
    restore_after_ms: int = 30_000
    cluster_auth_secret_file: Path | None = None
    cluster_tls: bool = False
    on_leader: str = ""
    on_follower: str = ""

    def __post_init__(self) -> None:
        check_options(self)
        check_int("min_in_sync", self.min_in_sync, 1, 64)
        check_int("catch_up_rate", self.catch_up_rate, 0)
        check_int("restore_after_ms", self.restore_after_ms, 0)
