import math
import re
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from trio_nsq import __version__, sync
from trio_nsq.client import (
    ConnectionOptions,
    ConnectionSettings,
    Consumer,
    ConsumerOptions,
    ConsumerSettings,
    DiscoveryOptions,
    DiscoverySettings,
    Producer,
    ProducerOptions,
    ProducerSettings,
)
from trio_nsq.testing import FakeProducer, FakeSyncProducer


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (ConnectionOptions, ConnectionSettings),
        (DiscoveryOptions, DiscoverySettings),
        (ConsumerOptions, ConsumerSettings),
        (ProducerOptions, ProducerSettings),
    ],
)
def test_options_and_settings_have_the_same_names(options: Any, settings: Any) -> None:
    assert list(options.__annotations__) == list(settings.__dataclass_fields__)


@pytest.mark.parametrize("make", [Producer, sync.Producer, partial(Consumer, "topic", "channel")])
def test_addresses_are_a_list_or_a_single_one(make: Callable[..., object]) -> None:
    for name in ("nsqd_tcp_addresses", "lookupd_http_addresses"):
        for addresses in ("127.0.0.1:1", ["127.0.0.1:1"], ("127.0.0.1:1", "127.0.0.1:2")):
            make(**{name: addresses})


@pytest.mark.parametrize("make", [Producer, sync.Producer, partial(Consumer, "topic", "channel")])
@pytest.mark.parametrize("name", ["nsqd_tcp_addresses", "lookupd_http_addresses"])
@pytest.mark.parametrize(
    ("addresses", "kind", "reason"),
    [
        ("a:1,b:1", ValueError, "has several addresses in one string, 'a:1,b:1'; give a list of addresses"),
        ("localhost", ValueError, "address 'localhost' has no port"),
        (b"a:1", TypeError, "is b'a:1'; it must be an address, or a list of addresses"),
        (4150, TypeError, "is 4150; it must be an address, or a list of addresses"),
        ([4150], TypeError, "has 4150; an address must be a string such as '127.0.0.1:4150'"),
    ],
)
def test_invalid_addresses_are_refused(
    make: Callable[..., object], name: str, addresses: object, kind: type[Exception], reason: str
) -> None:
    with pytest.raises(kind, match=reason):
        make(**{name: addresses})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"silence_timeout_s": 0}, "silence_timeout_s is 0; it must be more than 0"),
        ({"publish_timeout_s": 0}, "publish_timeout_s is 0; it must be more than 0, or None"),
        ({"lookupd_poll_interval_s": 0}, "lookupd_poll_interval_s is 0"),
        ({"nsqd_tcp_addresses": []}, "nsqd_tcp_addresses is empty; at least one is needed"),
    ],
)
def test_invalid_options_of_producers_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Producer(**options)


def test_identify_has_the_client_and_its_settings() -> None:
    assert ConnectionSettings(client_id="me", msg_timeout_s=2, sample_rate=5).identify() == {
        "client_id": "me",
        "hostname": socket.gethostname(),
        "user_agent": f"trio-nsq/{__version__}",
        "feature_negotiation": True,
        "heartbeat_interval": 30000,
        "msg_timeout": 2000,
        "sample_rate": 5,
        "output_buffer_size": 16384,
        "output_buffer_timeout": 250,
        "tls_v1": False,
        "snappy": False,
        "deflate": False,
        "deflate_level": 6,
    }


def test_broker_may_be_silent_for_two_heartbeat_intervals() -> None:
    assert ConnectionSettings(heartbeat_interval_s=1.5).read_timeout_s == 3.0
    assert ConnectionSettings(heartbeat_interval_s=-1).read_timeout_s == math.inf


@pytest.mark.parametrize(
    "options",
    [
        {"dial_timeout_s": 0},
        {"heartbeat_interval_s": 0},
        {"heartbeat_interval_s": 0.999},
        {"heartbeat_interval_s": -2},
        {"msg_timeout_s": -1},
        {"msg_timeout_s": 0.999},
        {"sample_rate": -1},
        {"sample_rate": 100},
        {"output_buffer_size": 63},
        {"output_buffer_size": -2},
        {"output_buffer_timeout_s": -0.5},
        {"heartbeat_interval_s": math.inf},
        {"msg_timeout_s": math.inf},
        {"output_buffer_timeout_s": math.inf},
        {"deflate_level": 0},
        {"deflate_level": 10},
    ],
)
def test_value_outside_the_protocol_is_refused_by_name(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=name):
        ConnectionSettings(**options)


@pytest.mark.parametrize("value", [-1, 0, 64])
def test_special_values_are_accepted(value: int) -> None:
    ConnectionSettings(output_buffer_size=value, output_buffer_timeout_s=value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"snappy": True, "deflate": True}, "snappy is True; it must be False if deflate is True"),
        ({"tls_key": "k"}, "tls_cert is None; it must be given if tls_key is"),
        ({"tls_v1": True, "tls_root_ca_file": "/nowhere"}, "tls_root_ca_file /nowhere: No such file"),
        ({"tls_v1": True, "tls_root_ca_file": __file__}, "tls_root_ca_file .*: "),
        ({"tls_v1": True, "tls_cert": "/nowhere"}, "tls_cert /nowhere, tls_key None: No such file"),
        ({"tls_v1": True, "tls_cert": __file__}, "tls_cert .*: "),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ConnectionSettings(**options)


@pytest.mark.parametrize(
    ("make", "name", "said"),
    [
        (
            partial(Consumer, "t", "c"),
            "dial_timeout",
            "Consumer() got an unexpected keyword argument 'dial_timeout'",
        ),
        (partial(Consumer, "t", "c"), "max_inflight", "Did you mean 'max_in_flight'?"),
        (
            partial(Consumer, "t", "c"),
            "max_attempts",
            "'max_attempts'; it is an argument of run()",
        ),
        (partial(sync.Consumer, "t", "c"), "auto_touch", "it is an argument of run()"),
        (partial(sync.Consumer, "t", "c"), "idle_timeout", "Did you mean 'idle_timeout_s'?"),
        (
            Producer,
            "reconnect_mins",
            "Producer() got an unexpected keyword argument 'reconnect_mins'. Did you mean 're",
        ),
        (Producer, "timeout_s", "'timeout_s'; it is an argument of flush(), publish(), publish_many(), "),
        (sync.Producer, "timeout_s", "'timeout_s'; it is an argument of flush(), publish(), "),
        (Producer, "low_rdy_timeout_s", "Producer() got an unexpected keyword argument 'low_rdy_timeout_s'"),
    ],
)
def test_error_of_an_unknown_option_names_the_class(
    make: Callable[..., object], name: str, said: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        make(**{name: 1})


def test_secret_is_not_shown() -> None:
    assert "hush" not in repr(ConnectionSettings(auth_secret="hush"))


@pytest.mark.parametrize(
    "make",
    [
        partial(Consumer, "t", "c"),
        partial(sync.Consumer, "t", "c"),
        Producer,
        sync.Producer,
        FakeProducer,
        FakeSyncProducer,
    ],
)
def test_options_in_milliseconds_are_deprecated(make: Callable[..., object]) -> None:
    text = "msg_timeout_ms is deprecated: use msg_timeout_s=1.5, in seconds"
    with pytest.warns(DeprecationWarning, match=text) as warned:
        make(msg_timeout_ms=1500)
    assert {each.filename for each in warned} == {__file__}
    with (
        pytest.warns(DeprecationWarning, match="use heartbeat_interval_s=0.5"),
        pytest.raises(ValueError, match=r"heartbeat_interval_s is 0\.5; it must be -1 or at least 1"),
    ):
        make(heartbeat_interval_ms=500)
    with pytest.warns(DeprecationWarning, match="use output_buffer_timeout_s=-1"):
        make(output_buffer_timeout_ms=-1)
    with pytest.raises(TypeError, match="msg_timeout_s and msg_timeout_ms are both given"):
        make(msg_timeout_ms=1000, msg_timeout_s=1)
    with pytest.raises(TypeError, match="msg_timeout_ms is '1s'; it must be a number"):
        make(msg_timeout_ms="1s")


def test_deprecated_options_are_those_of_their_client() -> None:
    old: dict[str, Any]
    for name in ("default_requeue_delay_ms", "max_requeue_delay_ms"):
        old = {name: 1000}
        with pytest.warns(DeprecationWarning, match=name):
            Consumer("t", "c", **old)
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            Producer(**old)
    old = {"max_req_timeout_ms": None}
    with pytest.warns(DeprecationWarning, match="use max_req_timeout_s=None"):
        Producer(**old)
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_req_timeout_ms'"):
        Consumer("t", "c", **old)


def test_identify_has_whole_milliseconds() -> None:
    for seconds, milliseconds in (
        (0, 0),
        (-1, -1),
        (0.0001, 1),
        (0.025, 25),
        (1.001, 1001),
        (60 * 60, 3_600_000),
    ):
        said = ConnectionSettings(output_buffer_timeout_s=seconds).identify()
        assert said["output_buffer_timeout"] == milliseconds
