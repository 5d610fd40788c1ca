"""Tests for the options of `qcli serve`: names, defaults, the syntax of Go, and precedence."""

import dataclasses
import itertools
import os
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from cli.support import DEADLINE_S, FREE_PORTS, Cli, lines_until_ready, options, refusal, serving
from interop.peers import nsqd_program, qcli_serve
from qcli.broker.address_options import HTTP_VARIABLE, TCP_VARIABLE
from qcli.broker.name_completion import TIMEOUT_VARIABLE
from qcli.commands.serve.command import command
from qcli.commands.serve.settings import SETTINGS, cluster_options
from qcli.framework.errors import Failure
from qcli.framework.params import duration
from trio_nsq.broker import BrokerOptions
from trio_nsq.broker.state.settings import TopicSettings
from trio_nsq.cluster.options import ClusterOptions
from trio_nsq.protocol import Limits


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore variables of the user who runs the tests."""
    for name in [name for name in os.environ if name.startswith("QCLI_")]:
        monkeypatch.delenv(name)


# ------------------------------------------------------------------ names and defaults


def test_defaults_are_those_of_the_broker() -> None:
    assert options() == BrokerOptions(data_path=Path())


@pytest.mark.parametrize(
    ("args", "settings"),
    [
        (["--retention-time", "7d", "--retention-bytes", "10GB"], TopicSettings(604_800_000, 10 * 10**9)),
        (
            ["--retention-time", "1d12h", "--retention-bytes", "512MiB"],
            TopicSettings(129_600_000, 512 * 2**20),
        ),
        (["--retention-time", "90m", "--retention-bytes", "4096"], TopicSettings(5_400_000, 4096)),
        (["--retention-time", "forever", "--retention-bytes", "unlimited"], TopicSettings(-1, -1)),
        (["--retention-time", "0"], TopicSettings()),
        (["--expire-idle", "7d"], TopicSettings(expire_idle_ms=604_800_000)),
    ],
)
def test_defaults_of_topics(args: list[str], settings: TopicSettings) -> None:
    assert options(*args).topic_defaults == settings


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("time", "7"), ("time", "d"), ("time", "1h1d"), ("time", "-1s"), ("time", "1.5d"),
        ("bytes", "1.5GB"), ("bytes", "-1"), ("bytes", "10 GB"), ("bytes", "10Gb"), ("bytes", ""),
    ],
)  # fmt: skip
def test_invalid_retention(flag: str, text: str) -> None:
    with pytest.raises(click.BadParameter):
        options(f"--retention-{flag}={text}")


def test_each_option_of_the_broker_has_a_flag() -> None:
    names = {setting.name for setting in SETTINGS}
    fields = {field.name for field in dataclasses.fields(BrokerOptions)}
    fields -= {"limits", "topic_defaults", "pacing"}  # pacing is not a setting
    # nsqd has no flags for these.
    limits = {field.name for field in dataclasses.fields(Limits)} - {
        "heartbeat_interval_ms",
        "output_buffer_size",
    }
    assert (fields | limits) - names == set()


def test_names_of_keys_and_variables() -> None:
    named = {setting.opts[0]: setting for setting in SETTINGS}
    assert len(named) == len({each.key for each in SETTINGS}) == len({each.envvar for each in SETTINGS})
    assert (named["--tls-cert"].key, named["--tls-cert"].envvar) == ("tls_cert", "QCLI_TLS_CERT")
    assert (named["--sync-timeout"].key, named["--sync-timeout"].envvar) == (
        "sync_timeout",
        "QCLI_SYNC_TIMEOUT",
    )
    assert (named["--node-id"].key, named["--node-id"].envvar) == ("id", "QCLI_NODE_ID")
    lookupd = named["--lookupd-tcp-address"]
    assert (lookupd.key, lookupd.envvar) == ("nsqlookupd_tcp_addresses", "QCLI_LOOKUPD_TCP_ADDRESS")
    assert named["--auth-http-address"].key == "auth_http_addresses"
    assert named["--e2e-processing-latency-percentile"].key == "e2e_processing_latency_percentiles"


def test_variables_differ_from_those_of_other_commands() -> None:
    used = {
        TCP_VARIABLE,
        HTTP_VARIABLE,
        TIMEOUT_VARIABLE,
        "QCLI_LINE",
        "QCLI_WORDBREAKS",
        "QCLI_WORDS",
        "QCLI_CURRENT",
    }
    assert used & {setting.envvar for setting in SETTINGS} == set()


def test_options_by_key(tmp_path: Path) -> None:
    # Options of the command, and of the member, which GET /cluster shows.
    others = {"admin", "admin_config", "address_file", "log_format", "worker_id", "verbose", "restore_after"}
    others |= {"processes", "process_ports", "with_lookupd"}
    others |= {field.name for field in dataclasses.fields(ClusterOptions)}
    with qcli_serve(tmp_path / "data", "--max-rdy-count=7", "--output-buffer-timeout=5ms") as broker:
        for setting in SETTINGS:
            if setting.key not in others:
                broker.http("GET", f"/config/{setting.key}")
        assert broker.http("GET", "/config/max_rdy_count") == b"7"
        assert broker.http("GET", "/config/output_buffer_timeout") == b"5000000"
        assert broker.http("GET", "/config/log_prefix") == b"[qcli] "


OTHER_DEFAULTS = {
    # A documented difference: docs/reference/differences.md.
    "tcp-address": "127.0.0.1:4150",
    "http-address": "127.0.0.1:4151",
    "https-address": "127.0.0.1:4152",
    "tls-min-version": "tls1.2",
    "log-prefix": "[qcli] ",
    # The same meaning: nsqd computes the default from the machine, or prints it differently.
    "broadcast-address": None,
    "node-id": None,
    "data-path": ".",
    "tls-required": "false",
    # Without effect.
    "queue-scan-selection-count": None,
    "queue-scan-worker-pool-max": None,
}


@pytest.mark.interop
def test_each_flag_of_nsqd_exists_with_its_default() -> None:
    done = subprocess.run([nsqd_program(), "--help"], capture_output=True, text=True, timeout=DEADLINE_S)
    described = re.findall(r"^  -([a-z0-9-]+)(?: (\S+))?\n(.*)$", done.stderr, re.MULTILINE)
    assert len(described) > 50
    ours = {param.opts[0]: param for param in command.params if isinstance(param, click.Option)}
    for flag, kind, text in described:
        param = ours[f"--{flag}"]
        default = param.default if param.show_default else None
        if flag in OTHER_DEFAULTS:
            assert default == OTHER_DEFAULTS[flag], flag
            continue
        found = re.search(r'\(default "?([^",]*).*\)$', text)
        expected = found[1].lower() if found else ""
        if kind == "duration":
            assert duration(str(default)) == duration(expected), flag
        else:
            # Go usually omits zero values.
            assert str(default) == expected or (default in (None, 0, "false") and not expected), flag


# ------------------------------------------------------------------ on the command line


def test_flags_set_options() -> None:
    given = options(
        "--sync=interval", "--sync-timeout", "1m", "--msg-timeout=90s", "--max-msg-size", "10", "--node-id", "7",
        "--http-address", "", "--mem-queue-size=0", "--tls-cert=c.pem", "--tls-key=k.pem", "--tls-required=tcp-https",
        "--tls-client-auth-policy=require", "--tls-root-ca-file=ca.pem", "--tls-min-version=tls1.3", "--snappy=false",
        "--max-deflate-level=9", "--auth-http-address=a:80", "--auth-http-address=https://b/auth",
        "--lookupd-tcp-address=l:4160", "--broadcast-address=h", "--statsd-address=s:8125", "--statsd-mem-stats=0",
        "--e2e-processing-latency-percentile=0.5,1.0", "--e2e-processing-latency-percentile=0.99",
    )  # fmt: skip
    assert given == BrokerOptions(
        data_path=Path(),
        sync="interval",
        sync_timeout_ms=60_000,
        node_id=7,
        http_address="",
        mem_queue_size=0,
        tls_cert=Path("c.pem"),
        tls_key=Path("k.pem"),
        tls_required="tcp-https",
        tls_client_auth_policy="require",
        tls_root_ca_file=Path("ca.pem"),
        tls_min_version="tls1.3",
        auth_http_addresses=("a:80", "https://b/auth"),
        nsqlookupd_tcp_addresses=("l:4160",),
        broadcast_address="h",
        statsd_address="s:8125",
        statsd_mem_stats=False,
        e2e_processing_latency_percentiles=(1.0, 0.99, 0.5),
        limits=Limits(msg_timeout_ms=90_000, max_msg_size=10, snappy=False, max_deflate_level=9),
    )


@pytest.mark.parametrize(
    ("go_s", "ours"),
    [
        ("-data-path=/x", "--data-path=/x"),
        ("-data-path /x", "--data-path=/x"),
        ("-statsd-prefix -x", "--statsd-prefix=-x"),
        ("-statsd-prefix a=b", "--statsd-prefix=a=b"),
        ("-statsd-prefix=--snappy", "--statsd-prefix=--snappy"),
        ("-snappy=false -deflate=F", "--snappy=false --deflate=false"),
        ("-snappy -node-id 3", "--snappy=true --node-id=3"),
        ("--snappy=false -snappy", ""),
        ("-tls-required", "--tls-required=true"),
        ("--tls-required --node-id 3", "--tls-required=true --node-id=3"),
        ("-tls-required=TCP-HTTPS", "--tls-required=tcp-https"),
        ("-tls-required=1", "--tls-required=true"),
        ("--tls-required=false -statsd-mem-stats=false", "--statsd-mem-stats=false"),
        ("-tls-min-version=TLS1.3", "--tls-min-version=tls1.3"),
        ("-tls-min-version=", ""),
        ("-tls-cert=", ""),
        ("-tls-client-auth-policy=", ""),
        ("-broadcast-address=", ""),
        ("-max-msg-size=0x10", "--max-msg-size=16"),
        ("-node-id 1 -node-id 2", "--node-id=2"),
        (
            "-lookupd-tcp-address a:1 -lookupd-tcp-address=b:2",
            "--lookupd-tcp-address=a:1 --lookupd-tcp-address=b:2",
        ),
        ("-max-req-timeout 0", "--max-req-timeout=0s"),
        ("-config=", ""),
    ],
)
def test_syntax_of_go(go_s: str, ours: str) -> None:
    assert options(*go_s.split()) == options(*ours.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--snappy false", "Write --snappy=false"),
        ("-tls-required tcp-https", "Write -tls-required=tcp-https"),
        ("--snappy 0", "Write --snappy=0"),
        ("--admin 127.0.0.1:4171", "Write --admin=127.0.0.1:4171: the value must follow '='"),
        ("-with-lookupd 0.0.0.0:4161", "Write -with-lookupd=0.0.0.0:4161"),
        ("--admin ./data", r"unexpected extra argument \(./data\)"),
        ("--snappy word", r"unexpected extra argument \(word\)"),
        ("-worker-id 7", r"-worker-id has no effect, see --node-id: leave '7' out"),
        ("-- --snappy", r"unexpected extra argument \(--snappy\)"),
        ("-nonsense", "No such option: --nonsense"),
        ("--nonsense=1", "No such option: --nonsense"),
        ("-x", "No such option: -x"),
        ("-data-path", "requires an argument"),
    ],
)
def test_invalid_syntax(words: str, said: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        options(*words.split())
    assert re.search(said.replace("option: ", "option:? '?"), caught.value.format_message())


@pytest.mark.parametrize(
    "flag",
    [
        "--tcp-address=4150",
        "--tcp-address=",
        "--https-address=./socket",
        "--node-id=1024",
        "--node-id=-1",
        "--sync=never",
        "--msg-timeout=60",
        "--msg-timeout=0",
        "--msg-timeout=-1s",
        "--sync-every=0",
        "--log-level=warning",
        "--max-deflate-level=0",
        "--max-deflate-level=10",
        "--max-msg-size=010",
        "--snappy=maybe",
        "--snappy=",
        "--tls-required=maybe",
        "--tls-min-version=ssl3.0",
        "--tls-client-auth-policy=requires",
        "--lookupd-tcp-address=a:1,b:2",
        "--auth-http-address=ftp://a",
        "--broadcast-tcp-port=65536",
        "--e2e-processing-latency-percentile=0",
        "--e2e-processing-latency-percentile=99",
        "--statsd-interval=60",
    ],
)
def test_invalid_flags_are_usage_errors(flag: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        options(flag)
    assert f"'{flag.partition('=')[0]}'" in caught.value.format_message()


def test_usage_error_ends_the_command(tmp_path: Path) -> None:
    assert "--node-id" in refusal(tmp_path, "-node-id", "1024", code=2)


@pytest.mark.parametrize("flag", ["-version", "--version"])
def test_version(nowhere: Cli, flag: str) -> None:
    assert nowhere("serve", flag).out == nowhere("--version").out != b""


@pytest.mark.parametrize("flag", ["-h", "-help", "--help"])
def test_help(nowhere: Cli, flag: str) -> None:
    result = nowhere("serve", flag)
    assert (result.code, result.err) == (0, "")
    assert b"  --tls-required[=true|false|tcp-https]\n" in result.out
    assert b"  Compression: --deflate, --max-deflate-level, --snappy\n" in result.out
    assert b"--queue-scan" not in result.out
    for title in ("Addresses", "Storage", "TLS and authentication", "Configuration", "Logging"):
        assert f"\n{title}:\n".encode() in result.out


def test_contradicting_values() -> None:
    assert options("--max-output-buffer-timeout=25ms").limits.max_output_buffer_timeout_ms == 25
    with pytest.raises(Failure, match="--min-output-buffer-timeout is longer"):
        options("--max-output-buffer-timeout=24ms")


@pytest.mark.parametrize(
    ("text", "bytes_per_s"), [("50MB", 50_000_000), ("4096", 4096), ("0", 0), ("unlimited", 0)]
)
def test_rate_of_catch_ups(text: str, bytes_per_s: int) -> None:
    flags = ["--cluster=prod", "--coordinator=static:", f"--catch-up-rate={text}"]
    with command.make_context("serve", flags) as ctx:
        found = cluster_options(ctx.params)
    assert found is not None
    assert found.catch_up_rate == bytes_per_s


@pytest.mark.parametrize("flag", ["--catch-up-rate=1MB", "--min-in-sync=2"])
def test_options_of_members_need_a_cluster(flag: str) -> None:
    with command.make_context("serve", [flag]) as ctx:
        with pytest.raises(Failure, match=f"{flag.partition('=')[0]} needs --cluster"):
            cluster_options(ctx.params)


@pytest.mark.parametrize("flag", ["--archive-before-ok", "--archive-retention=90d"])
def test_options_of_archives_need_one(flag: str) -> None:
    with pytest.raises(Failure, match=f"{flag.partition('=')[0]} needs --archive"):
        options(flag)
    options(flag, "--archive=a")


def test_a_standby_needs_an_archive() -> None:
    flags = ["--cluster=prod", "--coordinator=static:", "--restore-after=5s"]
    with command.make_context("serve", flags) as ctx, pytest.raises(Failure, match="needs --restore-from"):
        cluster_options(ctx.params)


def test_required_tls_needs_a_certificate(tmp_path: Path) -> None:
    assert "--tls-cert" in refusal(tmp_path, "-tls-required")


def test_flags_without_effect_are_logged(tmp_path: Path) -> None:
    given = [
        "-verbose",
        "-worker-id=5",
        "--queue-scan-worker-pool-max=8",
        "-queue-scan-selection-count",
        "40",
    ]
    with serving(tmp_path, *given) as broker:
        notices = [line for line in lines_until_ready(broker) if "no effect" in line]
    # Each flag once.
    assert sorted(re.findall(r"WARNING: (--[a-z-]+) has no effect here: ", "".join(notices))) == [
        "--queue-scan-selection-count",
        "--queue-scan-worker-pool-max",
        "--verbose",
        "--worker-id",
    ]
    assert len(notices) == 4


def test_flags_that_are_not_given_are_not_logged(tmp_path: Path) -> None:
    with serving(tmp_path) as broker:
        assert not [line for line in lines_until_ready(broker) if "WARNING" in line]


# ------------------------------------------------------------------ flag, environment, file


class Source(NamedTuple):
    """One option of each type. For each source: the text there, and the broker's value."""

    flag: str
    key: str
    file: tuple[str, Any]
    environment: tuple[str, Any]
    command_line: tuple[str, Any]


SOURCES = [
    Source("tcp-address", "tcp_address", ('"f:1"', "f:1"), ("e:1", "e:1"), ("c:1", "c:1")),
    Source("statsd-prefix", "statsd_prefix", ('"f"', "f"), ("e", "e"), ("", "")),
    Source("http-address", "http_address", ('""', ""), (":0", ":0"), ("/s", "/s")),
    Source("node-id", "id", ("1", 1), ("2", 2), ("3", 3)),
    Source("max-rdy-count", "max_rdy_count", ("1", 1), ("2", 2), ("3", 3)),
    Source("msg-timeout", "msg_timeout", ("1", 1), ("2s", 2_000), ("3m", 180_000)),
    Source("snappy", "snappy", ("false", False), ("true", True), ("false", False)),
    Source("deflate", "deflate", ('"false"', False), ("0", False), ("true", True)),
    Source("tls-required", "tls_required", ("true", "true"), ("false", "false"), ("tcp-https", "tcp-https")),
    Source(
        "tls-min-version",
        "tls_min_version",
        ('"tls1.0"', "tls1.0"),
        ("TLS1.1", "tls1.1"),
        ("tls1.3", "tls1.3"),
    ),
    Source("tls-cert", "tls_cert", ('"f"', Path("f")), ("e", Path("e")), ("", None)),
    Source(
        "lookupd-tcp-address",
        "nsqlookupd_tcp_addresses",
        ('["f:1", "f:2"]', ("f:1", "f:2")),
        ("e:1,e:2", ("e:1", "e:2")),
        ("c:1", ("c:1",)),
    ),
    Source(
        "e2e-processing-latency-percentile",
        "e2e_processing_latency_percentiles",
        ("[0.1, 0.2]", (0.2, 0.1)),
        ("0.3, 0.4", (0.4, 0.3)),
        ("0.5,0.6", (0.6, 0.5)),
    ),
]
PLACES = ("file", "environment", "command_line")


@pytest.mark.parametrize("source", SOURCES, ids=[source.flag for source in SOURCES])
@pytest.mark.parametrize(
    "places", [places for size in range(4) for places in itertools.combinations(PLACES, size)]
)
def test_flag_overrides_environment_overrides_file(
    source: Source, places: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    field = next(setting.name for setting in SETTINGS if setting.opts[0] == f"--{source.flag}")
    assert field

    def value(given: BrokerOptions) -> Any:
        return getattr(given.limits if hasattr(given.limits, field) else given, field)

    expected = getattr(source, places[-1])[1] if places else value(BrokerOptions(data_path=Path()))
    args = []
    if "file" in places:
        (tmp_path / "c.toml").write_text(f"{source.key} = {source.file[0]}\n")
        args = ["--config", str(tmp_path / "c.toml")]
    if "environment" in places:
        variable = f"QCLI_{source.flag.replace('-', '_').upper()}"
        monkeypatch.setenv(variable, source.environment[0])
    if "command_line" in places:
        args.append(f"--{source.flag}={source.command_line[0]}")
    assert value(options(*args)) == expected


def test_empty_variable_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in SETTINGS:
        monkeypatch.setenv(str(setting.envvar), "")
    assert options() == BrokerOptions(data_path=Path())


@pytest.mark.parametrize("variable", ["QCLI_NODE_ID", "QCLI_SERVE_NODE_ID"])
def test_invalid_variable_is_named(nowhere: Cli, variable: str) -> None:
    result = nowhere("serve", env={variable: "1024"})
    assert result.code == 2
    assert f"Invalid value for '{variable}' in the environment" in result.err
    # The error does not name the flag.
    assert "--node-id" not in result.err


def test_serve_and_lookupd_share_an_environment(tmp_path: Path) -> None:
    env = {
        "QCLI_SERVE_TCP_ADDRESS": str(tmp_path / "tcp"),
        "QCLI_SERVE_HTTP_ADDRESS": str(tmp_path / "http"),
        "QCLI_SERVE_DATA_PATH": str(tmp_path / "broker"),
        "QCLI_SERVE_LOG_LEVEL": "error",
        "QCLI_TCP_ADDRESS": FREE_PORTS[1],
        "QCLI_HTTP_ADDRESS": FREE_PORTS[3],
        "QCLI_DATA_PATH": str(tmp_path / "lookupd"),
    }
    cli = Cli("127.0.0.1:1", "127.0.0.1:1", env)
    with cli.running("serve") as broker, cli.running("lookupd") as lookupd:
        ready = f"ready: tcp {tmp_path / 'tcp'}, http {tmp_path / 'http'}, data {tmp_path / 'broker'}\n"
        assert lines_until_ready(broker) == [ready]
        *_, ready = lines_until_ready(lookupd)
        assert ready.startswith("ready: tcp 127.0.0.1:")
        assert ready.endswith(f", data {tmp_path / 'lookupd'}\n")


def test_environment_starts_a_broker(tmp_path: Path) -> None:
    addresses = dict(zip(("QCLI_TCP_ADDRESS", "QCLI_HTTP_ADDRESS"), FREE_PORTS[1::2], strict=True))
    env = addresses | {"QCLI_DATA_PATH": str(tmp_path / "data"), "QCLI_LOG_LEVEL": "error"}
    with Cli("127.0.0.1:1", "127.0.0.1:1", env).running("serve") as broker:
        heard = lines_until_ready(broker)
    assert len(heard) == 1
    assert heard[0].endswith(f", data {tmp_path / 'data'}\n")
