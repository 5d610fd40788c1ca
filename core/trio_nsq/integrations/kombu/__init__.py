"""A transport of kombu, and so a broker of Celery: `nsq://host:port`.

    import trio_nsq.integrations.kombu  # adds the scheme
    from celery import Celery

    app = Celery(broker="nsq://127.0.0.1:4150")

Instead of the import, the setting `broker_transport` may be `"trio_nsq.integrations.kombu:Transport"`.
"""

from kombu.transport import TRANSPORT_ALIASES

from .channel import Channel
from .transport import Transport

__all__ = ["Channel", "Transport"]

TRANSPORT_ALIASES.setdefault("nsq", f"{__name__}:Transport")
