"""The broker: nsqd's job, over one durable log per topic.

`topic`, `channel`, `consumer` and `broker` are synchronous state that takes the time as a parameter; `server`,
`connection`, `publisher` and `data_folder` are the IO around it.
"""

from .addresses import BoundAddresses
from .errors import PublishRefused, StartupError
from .options import BrokerOptions
from .serve import serve

__all__ = ["BoundAddresses", "BrokerOptions", "PublishRefused", "StartupError", "serve"]
