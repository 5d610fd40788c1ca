"""Connects to the brokers and publishes."""

from __future__ import annotations

from contextlib import AsyncExitStack

import trio

from trio_nsq.client import ConnectionFailed, Producer
from trio_nsq.protocol import Limits

from ...broker.address_options import TCP_OPTION
from ...broker.connection_options import ConnectOptions
from ...framework.errors import Failure, connection_failure
from ...framework.output import silence_library
from ...framework.signals import watch_signals
from ..shared.rate_limiter import RateLimiter
from .input import READ_BYTES
from .options import PubOptions
from .publish import PublishPipeline, PublishResult
from .send import Sender, TCPSender, numbered_sender

RATED_READ_BYTES = 4096
"""With --rate: what is read is published soon, also when a signal ends the reading."""


async def publish(options: PubOptions, brokers: dict[str, str]) -> PublishResult:
    """Publish all input to each broker, or as much as can be.

    Args:
        options: The command line.
        brokers: The HTTP address of each, by its TCP address.

    Raises:
        Failure: A broker cannot be reached; nothing was published.
    """
    silence_library()
    connecting = ConnectOptions.of_command()
    async with AsyncExitStack() as stack:
        senders = {}
        for address, http_address in brokers.items():
            senders[address] = await _connect(options, address, http_address, connecting, stack)
        batch_size = min(sender.batch_size for sender in senders.values())
        async with trio.open_nursery() as nursery:
            pipeline = PublishPipeline(
                senders,
                delimiter=options.delimiter,
                max_msg_size=options.max_msg_size,
                batch_size=options.batch_size or batch_size,
                retry=not options.no_retry,
                limiter=RateLimiter(options.rate, trio.current_time()) if options.rate else None,
            )
            await nursery.start(watch_signals, pipeline.stop)
            if options.shows_progress:
                from ...terminal.progress_line import show_progress

                nursery.start_soon(show_progress, pipeline.result)
            await pipeline.run(options.inputs, RATED_READ_BYTES if options.rate else READ_BYTES)
            for broker in pipeline.result.brokers:
                if broker.failure is None:
                    await senders[broker.address].end()
            nursery.cancel_scope.cancel()
    return pipeline.result


async def _connect(
    options: PubOptions, address: str, http_address: str, connecting: ConnectOptions, stack: AsyncExitStack
) -> Sender:
    """Connect to a broker, until the stack is left.

    Raises:
        Failure: It cannot be reached, or refuses.
    """
    producer = Producer(
        address,
        max_msg_size=options.max_msg_size,
        # A message may be the only one of its MPUB, which holds two numbers besides.
        max_body_size=max(Limits().max_body_size, options.max_msg_size + 8),
        ordered=True,  # so that what is acknowledged are the first messages, without a gap
        **connecting.options(),
    )
    try:
        await stack.enter_async_context(producer)
    except ConnectionFailed as error:
        failure = connection_failure(address, TCP_OPTION, error)
        if len(options.nsqd_tcp_addresses) > 1:
            failure = Failure(f"{failure.message} Nothing was published to any broker.", failure.exit_code)
        raise failure from error
    over_tcp = TCPSender(producer, options.topic, options.defer_ms)
    if options.no_retry:
        return over_tcp
    numbered = await numbered_sender(
        address, http_address, options.topic, options.defer_ms, connecting, over_tcp
    )
    return numbered or over_tcp
