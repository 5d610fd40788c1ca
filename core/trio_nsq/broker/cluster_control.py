"""What a broker that leads a cluster asks of the member that it is part of."""

from typing import Any, Protocol


class ClusterControl(Protocol):
    """The leader of a cluster, for requests of clients.

    Attributes:
        times_led: How often this process became the leader.
    """

    @property
    def times_led(self) -> int: ...

    def status(self) -> dict[str, Any]:
        """Return the cluster and its members, as `GET /cluster` answers."""

    def member(self) -> dict[str, Any]:
        """Return this member, as `GET /cluster/member` answers."""

    def switch(self, to: str = "") -> str:
        """Let another member lead, and return its id: `to`, or one that is in sync.

        Raises:
            ClusterRefusal: None can, or not this one.
        """

    async def remove(self, member: str) -> None:
        """Forget a member that is gone.

        Raises:
            ClusterRefusal: It is connected, unknown, or leads.
            CoordinatorError: The coordinator does not answer.
        """
