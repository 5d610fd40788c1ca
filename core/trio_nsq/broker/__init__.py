"""The broker: nsqd's job, over one durable log per topic.

`state/` is synchronous and takes the time as a parameter. The other folders are the IO around it; `server` wires them.
"""

from .addresses import BoundAddresses
from .errors import PublishRefused, StartupError
from .options import BrokerOptions
from .serve import serve

__all__ = ["BoundAddresses", "BrokerOptions", "PublishRefused", "StartupError", "serve"]
