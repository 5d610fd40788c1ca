"""Connect our client to a real nsqd."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from interop.peers import Broker, nsqd
from trio_nsq.client import Consumer

PATIENCE_S = 60.0
"""How long a test may take before it fails instead of hanging."""


@contextmanager
def nsqd_with_channel(data_path: Path) -> Iterator[Broker]:
    """Run an nsqd that already has the channel of `consumer_of`.

    nsqd may start the timers of a new channel up to 5 s late. It starts those of existing channels at once.
    """
    with nsqd(data_path) as first:
        first.create("topic", "channel")
    with nsqd(data_path) as running:
        yield running


def consumer_of(broker: Broker, **options: Any) -> Consumer:
    """Return a consumer of the channel, with defaults for the options that the caller omits."""
    defaults = {"max_in_flight": 200, "output_buffer_timeout_s": 0.025}
    return Consumer("topic", "channel", nsqd_tcp_addresses=[broker.tcp_address], **defaults | options)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings that the client logged."""
    return [record.message for record in caplog.records if record.name == "trio_nsq.client"]
