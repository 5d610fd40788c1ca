"""The connections of a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trio_nsq.client import ConnectionFailed
from trio_nsq.client.connection.connection import connect
from trio_nsq.client.connection.options import OFF, ConnectionSettings

from ...broker.failures import connection_failure
from ...framework.params import Source
from .link import Link

if TYPE_CHECKING:
    from ...broker.connection_options import ConnectOptions


async def open_links(
    addresses: Sequence[str],
    count: int,
    connecting: ConnectOptions,
    source: Source | None = None,
    *,
    buffered: bool = True,
) -> list[Link]:
    """Connect to every broker.

    Args:
        addresses: The brokers' TCP addresses.
        count: The connections to each of them.
        source: Subscribe to this channel; None: do not.
        buffered: Let the broker buffer messages before it sends them, by its defaults.

    Raises:
        Failure: A broker is unreachable or refuses.
    """
    settings = ConnectionSettings(**connecting.options())
    if not buffered:
        settings = replace(settings, output_buffer_size=OFF)
    links: list[Link] = []
    try:
        for address in addresses:
            for _ in range(count):
                connection = await connect(address, settings)
                if source is not None:
                    assert source.channel is not None
                    await connection.subscribe(source.topic, source.channel)
                links.append(Link(connection))
    except BaseException as error:
        for link in links:
            link.close()
        if isinstance(error, ConnectionFailed):
            raise connection_failure(error) from error
        raise
    return links
