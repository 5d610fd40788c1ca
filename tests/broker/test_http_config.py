"""Tests for `/config`: nsqd's options in nsqd's encoding; two of them can be changed."""

import http.client
import json
import logging
from pathlib import Path

import pytest

from broker.api import Api, running_api
from broker.auth_server import answer as auth_answer
from broker.auth_server import authorization, running_auth_server
from interop.peers import Broker, nsqd, qcli_serve
from trio_nsq.broker import BoundAddresses, BrokerOptions
from trio_nsq.broker.addresses import Broadcast

KEYS = [
    "log_level", "log_prefix", "id", "tcp_address", "http_address", "https_address", "broadcast_address",
    "broadcast_tcp_port", "broadcast_http_port", "nsqlookupd_tcp_addresses", "auth_http_addresses",
    "http_client_connect_timeout", "http_client_request_timeout", "data_path", "mem_queue_size",
    "max_bytes_per_file", "sync_every", "sync_timeout", "queue_scan_worker_pool_max",
    "queue_scan_selection_count", "msg_timeout", "max_msg_timeout", "max_msg_size", "max_body_size",
    "max_req_timeout", "max_heartbeat_interval", "max_rdy_count", "max_output_buffer_size",
    "max_output_buffer_timeout", "min_output_buffer_timeout", "output_buffer_timeout", "max_channel_consumers",
    "statsd_address", "statsd_prefix", "statsd_interval", "statsd_mem_stats", "statsd_udp_packet_size",
    "statsd_exclude_ephemeral", "e2e_processing_latency_percentiles", "e2e_processing_latency_window_time",
    "tls_cert", "tls_key", "tls_client_auth_policy", "tls_root_ca_file", "tls_required", "tls_min_version",
    "deflate", "snappy", "max_deflate_level",
]  # fmt: skip
NO_KEYS = [
    "config",
    "version",
    "node_id",
    "lookupd_tcp_address",
    "verbose",
    "worker_id",
    "limits",
    "topic_defaults",
    "LOG_LEVEL",
]

DEFAULTS = [
    "--broadcast-tcp-port=1",  # the bound ports differ
    "--broadcast-http-port=2",
    "--tls-min-version=tls1.0",  # documented differences
    "--log-prefix=",
]
CHANGED = [
    "--node-id=7", "--log-level=debug", "--log-prefix=[x] ", "--broadcast-tcp-port=1", "--broadcast-http-port=2",
    "--https-address=", "--lookupd-tcp-address=127.0.0.1:9", "--lookupd-tcp-address=127.0.0.1:10",
    "--http-client-connect-timeout=3s", "--http-client-request-timeout=1500ms",
    "--mem-queue-size=0", "--max-bytes-per-file=1000000", "--sync-every=1", "--sync-timeout=1m", "--msg-timeout=2m",
    "--max-msg-timeout=1h", "--max-msg-size=1000", "--max-body-size=2000", "--max-req-timeout=2h",
    "--max-heartbeat-interval=2m", "--max-rdy-count=9", "--max-output-buffer-size=70000",
    "--max-output-buffer-timeout=40s", "--min-output-buffer-timeout=1ms", "--output-buffer-timeout=1s",
    "--max-channel-consumers=3", "--statsd-address=127.0.0.1:9", "--statsd-prefix=a.%s.b", "--statsd-interval=1h",
    "--statsd-mem-stats=false", "--statsd-udp-packet-size=600", "--statsd-exclude-ephemeral",
    "--e2e-processing-latency-percentile=0.5,1.0", "--e2e-processing-latency-percentile=0.999",
    "--e2e-processing-latency-window-time=1m", "--tls-min-version=tls1.3", "--deflate=false", "--snappy=false",
    "--max-deflate-level=9",
]  # fmt: skip


def answer(broker: Broker, key: str) -> tuple[int, dict[str, str], bytes]:
    """Return the status, the content headers and the value, byte for byte."""
    connection = http.client.HTTPConnection(broker.http_address, timeout=20)
    try:
        connection.request("GET", f"/config/{key}")
        reply = connection.getresponse()
        headers = {name.lower(): text for name, text in reply.getheaders()}
        body = reply.read()
    finally:
        connection.close()
    shown = {name: headers.get(name, "") for name in ("content-type", "x-nsq-content-type")}
    return reply.status, shown, body


@pytest.mark.interop
@pytest.mark.parametrize("flags", [DEFAULTS, CHANGED], ids=["defaults", "changed"])
def test_every_option_is_encoded_as_in_nsqd(tmp_path: Path, flags: list[str]) -> None:
    both = ["--broadcast-address=127.0.0.1", *flags]
    with nsqd(tmp_path / "nsqd", *both) as theirs, qcli_serve(tmp_path / "ours", *both) as ours:
        for key in KEYS + NO_KEYS:
            expected = answer(theirs, key)
            assert expected[0] == (200 if key in KEYS else 400), key
            if key in ("tcp_address", "http_address") and not any(
                flag.startswith(f"--{key}=") for flag in flags
            ):
                assert expected[2].decode() == getattr(theirs, key)
                expected = (*expected[:2], getattr(ours, key).encode())
            if key == "data_path":
                expected = (*expected[:2], str(tmp_path / "ours").encode())
            if key == "https_address" and "--https-address=" not in flags:
                expected = (*expected[:2], b"127.0.0.1:4152")
            assert (key, answer(ours, key)) == (key, expected)


async def put(api: Api, option: str, value: bytes) -> tuple[int, str]:
    """Return the status and the text of a PUT."""
    response = await api.send("PUT", f"/config/{option}", body=value)
    return response.status_code, response.text


async def get(api: Api, option: str) -> str:
    """Return the text of a GET."""
    return (await api.get(f"/config/{option}")).text


@pytest.mark.parametrize(
    ("word", "number", "level"),
    [
        (b"debug", "1", logging.DEBUG),
        (b"INFO", "2", logging.INFO),
        (b"Warn", "3", logging.WARNING),
        (b"error", "4", logging.ERROR),
        (b"fatal", "5", logging.CRITICAL),
    ],
)
async def test_log_level_takes_effect_at_once(tmp_path: Path, word: bytes, number: str, level: int) -> None:
    async with running_api(tmp_path / "d") as api:
        assert await put(api, "log_level", word) == (200, number)
        assert logging.getLogger("trio_nsq").level == level
        assert await get(api, "log_level") == number


async def test_nsqlookupd_addresses_can_be_changed(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        assert await get(api, "nsqlookupd_tcp_addresses") == "[]"
        new = '["127.0.0.1:9","[::1]:10"]'
        assert await put(api, "nsqlookupd_tcp_addresses", new.encode()) == (200, new)
        assert await get(api, "nsqlookupd_tcp_addresses") == new
        assert await put(api, "nsqlookupd_tcp_addresses", b"null") == (200, "[]")
        assert await get(api, "nsqlookupd_tcp_addresses") == "[]"


@pytest.mark.parametrize(
    ("option", "value", "status", "code"),
    [
        ("log_level", b"", 413, "INVALID_VALUE"),
        ("log_level", b"x" * 1_048_576, 400, "INVALID_VALUE"),
        ("log_level", b"x" * 1_048_577, 413, "INVALID_VALUE"),
        ("log_level", b"warning", 400, "INVALID_VALUE"),
        ("log_level", b'"info"', 400, "INVALID_VALUE"),
        ("log_level", b"info\n", 400, "INVALID_VALUE"),
        ("log_level", b"2", 400, "INVALID_VALUE"),
        ("log_level", b"\xff", 400, "INVALID_VALUE"),
        ("nsqlookupd_tcp_addresses", b'"127.0.0.1:9"', 400, "INVALID_VALUE"),
        ("nsqlookupd_tcp_addresses", b"[1]", 400, "INVALID_VALUE"),
        ("nsqlookupd_tcp_addresses", b'["127.0.0.1:9"] x', 400, "INVALID_VALUE"),
        ("nsqlookupd_tcp_addresses", b'["127.0.0.1"]', 400, "INVALID_VALUE"),
        ("nsqlookupd_tcp_addresses", b"[" * 100_000, 400, "INVALID_VALUE"),
        ("mem_queue_size", b"5", 400, "INVALID_OPTION"),
        ("nope", b"5", 400, "INVALID_OPTION"),
        ("nope", b"", 413, "INVALID_VALUE"),
    ],
)
async def test_invalid_changes_change_nothing(
    tmp_path: Path, option: str, value: bytes, status: int, code: str
) -> None:
    async with running_api(tmp_path / "d", nsqlookupd_tcp_addresses=()) as api:
        before = await get(api, option)
        assert await put(api, option, value) == (status, f'{{"message":"{code}"}}')
        assert await get(api, option) == before


async def test_settings_of_topics_are_refused_with_a_hint(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        for option in ("retention_time", "retention_bytes"):
            status, text = await put(api, option, b"5")
            assert status == 400
            assert text.startswith('{"message":"INVALID_OPTION: ')
            assert "PUT /topic/settings" in text


async def test_passwords_are_hidden(tmp_path: Path) -> None:
    async with running_auth_server(auth_answer(authorization(".*", ".*", "admin"))) as server:
        addresses = (f"http://user:hidden@{server.address}/auth", "https://hidden@there:2", "127.0.0.1:3")
        async with running_api(tmp_path / "d", auth_http_addresses=addresses) as api:
            api.client.headers["Authorization"] = "Bearer secret"
            shown = [f"http://xxxxx@{server.address}/auth", "https://xxxxx@there:2", "127.0.0.1:3"]
            assert json.loads(await get(api, "auth_http_addresses")) == shown


async def test_own_options_can_be_read_too(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", sync="interval", checkpoint_interval_ms=5) as api:
        assert await get(api, "sync") == "interval"
        assert await get(api, "checkpoint_interval") == "5000000"


@pytest.mark.parametrize(
    ("template", "prefix"),
    [
        ("nsq.%s", "nsq.10_0_0_1_4151."),
        ("a.%s.b.", "a.10_0_0_1_4151.b."),
        ("%s%s", "10_0_0_1_415110_0_0_1_4151."),
        ("plain", "plain."),
        ("", ""),
    ],
)
def test_statsd_prefix_is_expanded_as_in_nsqd(tmp_path: Path, template: str, prefix: str) -> None:
    options = BrokerOptions(tmp_path, broadcast_address="10.0.0.1")
    bound = BoundAddresses("0.0.0.0:4150", "0.0.0.0:4151")
    assert Broadcast.of(options, bound).statsd_prefix(template) == prefix


def test_broadcast_ports_are_the_bound_ones_by_default(tmp_path: Path) -> None:
    unix = BoundAddresses("/run/nsq.sock", None)
    bound = BoundAddresses("0.0.0.0:4150", "[::]:4151")
    options = BrokerOptions(tmp_path, broadcast_address="here")
    assert Broadcast.of(options, bound) == Broadcast("here", 4150, 4151)
    assert Broadcast.of(options, unix) == Broadcast("here", 0, 0)
    options = BrokerOptions(tmp_path, broadcast_address="here", broadcast_tcp_port=1, broadcast_http_port=2)
    assert Broadcast.of(options, unix) == Broadcast("here", 1, 2)
