"""What requests to NSQ's HTTP APIs say in their parameters, with NSQ's error strings."""

from ..protocol import is_valid_name
from .messages import HTTPError, Request


def given(request: Request, parameter: str) -> str:
    """A parameter that has to be there, whatever it says."""
    if parameter not in request.query:
        raise HTTPError(400, f"MISSING_ARG_{parameter.upper()}")
    return request.query[parameter]


def valid_name(request: Request, parameter: str, invalid: str) -> str:
    """A parameter that has to be a valid name; `invalid` is the error if it is none."""
    name = given(request, parameter)
    if not is_valid_name(name):
        raise HTTPError(400, invalid)
    return name


def channel_names(request: Request) -> tuple[str, str]:
    """The valid names of a topic and a channel, which need not be there."""
    topic = valid_name(request, "topic", "INVALID_ARG_TOPIC")
    return topic, valid_name(request, "channel", "INVALID_ARG_CHANNEL")
