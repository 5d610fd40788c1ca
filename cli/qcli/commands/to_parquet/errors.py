"""Turns the errors of an export into failures of the command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...broker.address_options import HTTP_OPTION, TCP_OPTION
from ...framework.errors import Failure, reason_of, unreachable
from ..shared.engine import library_failure


@contextmanager
def library_errors() -> Iterator[None]:
    """Turn what the library raises inside into failures."""
    from trio_nsq.client.errors import BrokerUnreachable, RequestRefused
    from trio_nsq.protocol import NSQError

    from ...broker.topic_log import read_failure
    from ...framework.params import Source

    try:
        yield
    except RequestRefused as error:
        failure = read_failure(error.address, Source(error.topic, None), error.status, error.text)
        if error.text == "NOT_FOUND":
            hint = f"A channel of it can be exported, at least once: {TCP_OPTION} HOST:PORT --channel NAME."
            failure = Failure(f"{failure.message} {hint}", failure.exit_code)
        raise failure from error
    except BrokerUnreachable as error:
        reason = error.reason
        if error.cause is not None and not isinstance(error.cause, TimeoutError):
            reason = reason_of(error.cause)
        raise unreachable(error.address, HTTP_OPTION, reason) from error
    except NSQError as error:
        raise library_failure(error) from error
