"""A warning for programs that forget to answer messages, so that the brokers send no more."""

import logging

import trio

from .receive_queue import ReceiveQueue
from .subscription import FlowControl

STALL_S = 10.0
"""How long no message is answered before the warning; it comes within twice this time."""

_logger = logging.getLogger("trio_nsq.client")


async def warn_of_stalls(source: str, flow: FlowControl, queue: ReceiveQueue) -> None:
    """Warn when the program waits for messages and answers none of those that it has; runs until cancelled.

    It warns once, and again after further answers.

    Args:
        source: `topic/channel`, for the log.
    """
    answered, warned = -1, False
    while True:
        await trio.sleep(STALL_S)
        before, answered = answered, flow.finished + flow.requeued
        if answered != before:
            warned = False
        elif not warned and flow.awaits_answers and queue.is_awaited:
            warned = True
            _logger.warning(
                "%s: all %d messages that may be in flight are unanswered, and none was answered for %.0f s. The "
                "brokers send no more. Call finish() or requeue() for each message, or raise max_in_flight",
                source,
                flow.max_in_flight,
                STALL_S,
            )
