"""The client for programs without async code: `Consumer` and `Producer` as ordinary context managers.

    import trio_nsq.sync

    with trio_nsq.sync.Producer("127.0.0.1:4150") as producer:
        producer.publish("clicks", b"...")

Each runs the async class of the same name in its own thread. The errors are those of `trio_nsq.client`.
"""

from .consumer import Consumer, GivenUp, Handler, OnFailure, RunOptions
from .message import Message, MessageBatch
from .producer import Producer, Receipt

__all__ = [
    "Consumer",
    "GivenUp",
    "Handler",
    "Message",
    "MessageBatch",
    "OnFailure",
    "Producer",
    "Receipt",
    "RunOptions",
]
