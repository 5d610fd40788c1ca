"""Connects `pub` to its brokers."""

import math
from collections.abc import Awaitable, Callable, Mapping

import trio

from trio_nsq.client import AuthRefused, ConnectionFailed, Producer, PublishFailed
from trio_nsq.protocol import Limits

from ...broker.brokers import combined
from ...broker.connection_options import ConnectOptions
from ...broker.failures import connection_failure
from ...framework.errors import Failure
from .batches import Batch
from .options import PubOptions
from .send import NumberedSender, Sender, TCPSender, numbered_sender

OTHERS_S = 1.0
"""How long to wait for more brokers, once one is connected, if each message goes to one broker."""

_ANY_TOPIC = "qcli-pub"
"""A topic name to ask a broker for the numbers of, which creates nothing."""


class LateSender:
    """Sends to a broker that was unreachable at the start: connects once there is something to send.

    Args:
        connect: Connects; raises ConnectionFailed.
        failure: Why the broker was unreachable; the first batch fails with it.
    """

    at_once = 1  # the limit of every sender
    batch_size = NumberedSender.batch_size

    def __init__(self, connect: Callable[[], Awaitable[Sender]], failure: ConnectionFailed) -> None:
        self._connect = connect
        self._failure: ConnectionFailed | None = failure
        self._sender: Sender | None = None

    @property
    def may_repeat(self) -> bool:
        """See `Sender`; before it is connected, nothing was sent."""
        return self._sender is not None and self._sender.may_repeat

    async def send(self, batch: Batch) -> None:
        """Publish messages. Raises PublishFailed, also if the broker is unreachable."""
        if self._sender is None:
            await trio.lowlevel.checkpoint()
            try:
                failure, self._failure = self._failure, None
                if failure is not None:
                    raise failure
                self._sender = await self._connect()
            except ConnectionFailed as error:
                raise PublishFailed(error.reason, maybe_stored=False) from error
        await self._sender.send(batch)

    async def end(self) -> None:
        if self._sender is not None:
            await self._sender.end()


async def connect(
    options: PubOptions, brokers: Mapping[str, str], is_spread: bool, nursery: trio.Nursery
) -> dict[str, Sender]:
    """Connect to all brokers at once, until the nursery is cancelled.

    Args:
        brokers: Their HTTP addresses by TCP address.
        is_spread: Whether each message goes to one broker. Then one broker that is connected is enough.

    Returns the senders by TCP address, in the same order.

    Raises Failure: a broker that is needed is unreachable, or one refuses the secret.
    """
    connecting = ConnectOptions.of_command()
    found: dict[str, Sender] = {}
    failures: dict[str, ConnectionFailed] = {}
    scope = trio.CancelScope()

    async def open_one(address: str) -> Sender:
        return await _connect(options, address, brokers[address], connecting, nursery)

    async def try_one(address: str) -> None:
        try:
            found[address] = await open_one(address)
        except ConnectionFailed as error:
            failures[address] = error
        else:
            if is_spread and not options.no_retry and scope.deadline == math.inf:
                scope.deadline = trio.current_time() + OTHERS_S

    with scope:
        async with trio.open_nursery() as attempts:
            for address in brokers:
                attempts.start_soon(try_one, address)
    needed = not is_spread or options.no_retry or not found
    if failures and (needed or any(isinstance(error, AuthRefused) for error in failures.values())):
        in_order = {address: failures[address] for address in brokers if address in failures}
        raise _unreachable(in_order, several=len(brokers) > 1)
    for address in brokers:
        if address not in found:
            failure = failures.get(address) or ConnectionFailed(address, f"no answer within {OTHERS_S:g} s")

            async def later(address: str = address) -> Sender:
                return await open_one(address)

            found[address] = LateSender(later, failure)
    return {address: found[address] for address in brokers}


def _unreachable(failures: Mapping[str, ConnectionFailed], *, several: bool) -> Failure:
    found = [connection_failure(error, address) for address, error in failures.items()]
    failure = combined(found, partial=False)
    text = failure.message
    if several:
        text += f"{chr(10) if len(found) > 1 else ' '}Nothing was published to any broker."
    return Failure(text, failure.exit_code)


async def _connect(
    options: PubOptions,
    address: str,
    http_address: str,
    connecting: ConnectOptions,
    nursery: trio.Nursery,
) -> Sender:
    """Connect to a broker, until the nursery is cancelled. Raises ConnectionFailed: it is unreachable, or refuses."""
    producer = Producer(
        address,
        max_msg_size=options.max_msg_size,
        # An MPUB with one message has 8 more bytes.
        max_body_size=max(Limits().max_body_size, options.max_msg_size + 8),
        ordered=True,  # acknowledged messages are the first ones, without a gap
        **connecting.options(),
    )
    await nursery.start(_hold, producer)
    over_tcp = TCPSender(producer)
    if options.no_retry:
        return over_tcp
    topic = options.common_topic or _ANY_TOPIC
    numbered = await numbered_sender(address, http_address, topic, connecting, over_tcp)
    if numbered is None:
        return over_tcp
    nursery.start_soon(_close_at_end, numbered)
    return numbered


async def _hold(producer: Producer, task_status: trio.TaskStatus[None]) -> None:
    async with producer:
        task_status.started()
        await trio.sleep_forever()


async def _close_at_end(sender: NumberedSender) -> None:
    try:
        await trio.sleep_forever()
    finally:
        sender.close()
