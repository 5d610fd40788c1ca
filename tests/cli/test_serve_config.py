"""Tests for the configuration file of `qcli serve`."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cli.support import lines_until_ready, options, refusal, serving
from interop.peers import nsqd_example_config
from qcli.commands.serve.settings import SETTINGS
from qcli.framework.errors import Failure
from trio_nsq.broker import BrokerOptions
from trio_nsq.protocol import Limits

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore variables of the user who runs the tests."""
    for name in [name for name in os.environ if name.startswith("QCLI_")]:
        monkeypatch.delenv(name)


def configured(tmp_path: Path, text: str) -> BrokerOptions:
    """Return the broker's options for this file."""
    (tmp_path / "c.toml").write_text(text)
    return options("-config", str(tmp_path / "c.toml"))


def test_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert configured(tmp_path, "") == BrokerOptions(data_path=Path())


def test_values_of_every_type(tmp_path: Path) -> None:
    given = configured(
        tmp_path,
        """
        id = 7
        data_path = "/var/lib/nsq"
        http_address = ""
        sync = "interval"
        sync_timeout = 1500
        msg_timeout = "1m30s"
        mem_queue_size = "0"
        snappy = false
        statsd_mem_stats = "false"
        tls_required = "tcp-https"
        tls_min_version = ""
        tls_cert = ""
        nsqlookupd_tcp_addresses = ["a:1", "b:2"]
        auth_http_addresses = "c:3,https://d/e"
        e2e_processing_latency_percentiles = [0.5, 1.0, 1]
        """,
    )
    assert given == BrokerOptions(
        data_path=Path("/var/lib/nsq"),
        node_id=7,
        http_address="",
        sync="interval",
        sync_timeout_ms=1500,
        mem_queue_size=0,
        statsd_mem_stats=False,
        tls_required="tcp-https",
        nsqlookupd_tcp_addresses=("a:1", "b:2"),
        auth_http_addresses=("c:3", "https://d/e"),
        e2e_processing_latency_percentiles=(1.0, 1.0, 0.5),
        limits=Limits(msg_timeout_ms=90_000, snappy=False),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id = 1024", "id: 1024 is not in the range"),
        ("id = true", "id: true is not an integer."),
        ("max_msg_size = 1.5", "max_msg_size: 1.5 is not an integer."),
        ("max_msg_size = 'x'", "max_msg_size: 'x' is not an integer."),
        ("max_deflate_level = 0", "max_deflate_level: 0 is not in the range"),
        ("tcp_address = 4150", "tcp_address: 4150 is not a string."),
        ("tcp_address = 'a'", "tcp_address: 'a' is not host:port"),
        ("msg_timeout = '60'", "msg_timeout: '60' has no unit"),
        (
            "msg_timeout = 1.5",
            'msg_timeout: 1.5 is not a duration such as "1m30s", or an integer, milliseconds.',
        ),
        ("msg_timeout = true", "msg_timeout: true is not a duration"),
        ("msg_timeout = 0", "msg_timeout: It must be longer than 0."),
        ("snappy = 1", "snappy: 1 is not true or false."),
        ("tls_required = 2", "tls_required: '2' is not one of"),
        ("tls_min_version = 'ssl3.0'", "tls_min_version: 'ssl3.0' is not one of"),
        ("log_level = 3", "log_level: 3 is not a string."),
        ("log_level = 'warning'", "log_level: 'warning' is not one of"),
        (
            "nsqlookupd_tcp_addresses = 4160",
            "nsqlookupd_tcp_addresses: 4160 is not a list, each value a string.",
        ),
        ("nsqlookupd_tcp_addresses = [4160]", "nsqlookupd_tcp_addresses: 4160 is not a string."),
        ("nsqlookupd_tcp_addresses = ['a']", "nsqlookupd_tcp_addresses: 'a' is not host:port"),
        (
            "e2e_processing_latency_percentiles = [true]",
            "e2e_processing_latency_percentiles: true is not a number.",
        ),
        (
            "e2e_processing_latency_percentiles = [99]",
            "e2e_processing_latency_percentiles: 99 is not above 0",
        ),
        ("data_path = 2026-01-01", 'data_path: "2026-01-01" is not a string.'),
    ],
)
def test_invalid_value_is_named_with_its_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(Failure) as caught:
        configured(tmp_path, text)
    assert caught.value.message.startswith(f"--config: {tmp_path / 'c.toml'}: {said}")


def test_invalid_value_is_an_error_even_if_a_flag_overrides_it(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("id = 1024")
    with pytest.raises(Failure, match="1024"):
        options("--config", str(tmp_path / "c.toml"), "--node-id=1")


def test_unreadable_files(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    assert (
        refusal(tmp_path, "--config", str(file))
        == f"Error: --config: cannot read {file}: No such file or directory."
    )
    assert f"cannot read {tmp_path}: Is a directory" in refusal(tmp_path, "--config", str(tmp_path))
    for content in (b"not toml", b"a = 1\na = 2", b"a = '\xff'"):
        file.write_bytes(content)
        assert f"Error: --config: {file} is not valid TOML: " in refusal(tmp_path, f"--config={file}")


def test_unknown_keys_are_named(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        "tcp-address = 'x'\nnode_id = 5000\nmem_que_size = 5\n"
        "worker_id = 3\nqueue_scan_worker_pool_max = 8\nverbose = false\n[nsqd]\nid = 5\n"
    )
    with serving(tmp_path, "--config", str(tmp_path / "c.toml")) as broker:
        warnings = [line.partition("WARNING: ")[2] for line in lines_until_ready(broker) if "WARNING" in line]
    said = "".join(warnings)
    assert len(warnings) == 6
    for key, hint in (
        ("tcp-address", " (did you mean tcp_address?)"),
        ("node_id", " (did you mean id?)"),
        ("mem_que_size", " (did you mean mem_queue_size?)"),
        ("nsqd", ""),
    ):
        assert f"unknown key {key} is ignored{hint}\n" in said
    for flag in ("--worker-id", "--queue-scan-worker-pool-max"):
        assert f"{flag} has no effect here" in said


def test_file_named_by_the_environment(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("log_level = 'error'\nlog_prefix = 'x'\n")
    with serving(tmp_path, QCLI_CONFIG=str(tmp_path / "c.toml")) as broker:
        assert len(lines_until_ready(broker)) == 1


def test_example_in_the_documentation_is_valid(tmp_path: Path) -> None:
    page = REPOSITORY / "docs" / "reference" / "configuration.md"
    example = page.read_text().partition("```toml\n")[2].partition("```")[0]
    given = configured(tmp_path, example)
    assert (given.limits.max_msg_size, given.limits.msg_timeout_ms) == (4 * 1024**2, 90_000)
    assert given.tls_required == "tcp-https"
    # Unknown keys would only be named.
    assert set(tomllib.loads(example)) <= {setting.key for setting in SETTINGS}


@pytest.mark.interop
def test_example_file_of_nsqd_starts_a_broker(tmp_path: Path) -> None:
    example = nsqd_example_config()
    address_file = tmp_path / "addresses.json"
    # Nothing listens on port 1; a discovery service could listen on the port of the example.
    flags = [f"-config={example}", "-lookupd-tcp-address=127.0.0.1:1", f"--address-file={address_file}"]
    with serving(tmp_path, *flags) as broker:
        heard = lines_until_ready(broker)
        assert json.loads(address_file.read_text())["tcp_address"].startswith("127.0.0.1:")
    assert not [line for line in heard if "configuration" in line or "no effect" in line]


@pytest.mark.interop
def test_example_file_of_nsqd_sets_the_options() -> None:
    example = nsqd_example_config()
    said: dict[str, Any] = tomllib.loads(example.read_text())
    given = options("--config", str(example))
    assert said["tcp_address"] == given.tcp_address
    assert said["max_msg_size"] == given.limits.max_msg_size
    assert said["max_body_size"] == given.limits.max_body_size
    assert tuple(said["nsqlookupd_tcp_addresses"]) == given.nsqlookupd_tcp_addresses
    assert tuple(said["e2e_processing_latency_percentiles"]) == given.e2e_processing_latency_percentiles
    assert (said["max_output_buffer_timeout"], given.limits.max_output_buffer_timeout_ms) == ("1s", 1000)
    assert (said["tls_cert"], given.tls_cert) == ("", None)
    assert (said["tls_min_version"], given.tls_min_version) == ("", "tls1.2")
