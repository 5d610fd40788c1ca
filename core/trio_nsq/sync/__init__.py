"""The client for scripts, threads and other programs without async code: `Consumer` and `Producer` with a plain `with`.

    import trio_nsq.sync

    with trio_nsq.sync.Producer("127.0.0.1:4150") as producer:
        producer.publish("clicks", b"...")

Each of them runs the async class of the same name in a thread of its own. Errors are those of `trio_nsq.client`.
"""

from .consumer import Consumer, Handler, Message, MessageBatch
from .producer import Producer

__all__ = ["Consumer", "Handler", "Message", "MessageBatch", "Producer"]
