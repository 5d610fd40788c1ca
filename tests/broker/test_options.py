"""Tests of `BrokerOptions`: values that no broker can have are refused when the options are made."""

from pathlib import Path
from typing import Any

import pytest

from trio_nsq.broker import BrokerOptions
from trio_nsq.protocol import Limits


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"sync": "never"}, ValueError, "sync is 'never'; it must be one of always, interval"),
        ({"node_id": 1024}, ValueError, "node_id is 1024; it must be within 0..1023"),
        ({"sync_timeout_ms": 0}, ValueError, "sync_timeout_ms is 0; it must be at least 1"),
        ({"max_topics": -1}, ValueError, "max_topics is -1; it must be at least 0"),
        ({"broadcast_tcp_port": 70_000}, ValueError, "broadcast_tcp_port is 70000; it must be within 0..65535"),
        ({"limits": Limits(max_msg_size=-1)}, ValueError, "limits.max_msg_size is -1; it must be at least 0"),
        ({"limits": Limits(min_output_buffer_timeout_ms=31_000)}, ValueError, "more than max_output_buffer_timeout_ms"),
        ({"e2e_processing_latency_percentiles": (1.5,)}, ValueError, "1.5; it must be within (0, 1]"),
        ({"data_path": "data"}, TypeError, "data_path is 'data'; it must be a pathlib.Path"),
        ({"nsqlookupd_tcp_addresses": "a:1"}, TypeError, "is 'a:1'; it must be a tuple of strings"),
        ({"auth_http_addresses": (1,)}, TypeError, "an item of auth_http_addresses is 1; it must be a string"),
        ({"limits": None}, TypeError, "limits is None; it must be an instance of Limits"),
        ({"cache_bytes": 1.5}, TypeError, "cache_bytes is 1.5; it must be an integer"),
    ],
)  # fmt: skip
def test_values_that_no_broker_can_have(values: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        BrokerOptions(**{"data_path": Path("data"), **values})
    assert text in str(raised.value)


def test_the_least_values() -> None:
    BrokerOptions(Path(), node_id=0, sync_every=1, cache_bytes=0, e2e_processing_latency_percentiles=(1.0,))
