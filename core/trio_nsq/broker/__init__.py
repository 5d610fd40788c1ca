"""The broker: nsqd's job, over one durable log per topic.

`state/` is synchronous and takes the time as a parameter. The other folders are the IO around it; `server` wires them.
"""

from ..platform.extras import server_hint

try:
    from .addresses import BoundAddresses
    from .errors import PublishRefused, StartupError
    from .options import BrokerOptions
    from .serve import serve
except ModuleNotFoundError as error:
    if (hint := server_hint(error)) is None:
        raise
    raise ModuleNotFoundError(f"trio_nsq.broker: {hint}", name=error.name) from error

__all__ = ["BoundAddresses", "BrokerOptions", "PublishRefused", "StartupError", "serve"]
