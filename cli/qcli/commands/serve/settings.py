"""The options of `qcli serve`: one table of flags, environment variables and configuration keys.

Names, defaults and keys are nsqd's; docs/reference/differences.md lists the exceptions.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import click

from ...framework import params
from ...framework.daemon import kinds
from ...framework.daemon.security_settings import (
    audit_log_setting,
    auth_file_setting,
    certificate_settings,
    http_access_settings,
    tls_client_settings,
)
from ...framework.daemon.setting import LOG_SETTINGS, Setting, fields_of, under_headings, verbose_setting
from ...framework.errors import Failure

if TYPE_CHECKING:
    from trio_nsq.broker import BrokerOptions
    from trio_nsq.cluster.options import ClusterOptions


def _descending(_ctx: click.Context, _param: click.Parameter, given: tuple[tuple[float, ...], ...]) -> Any:
    return tuple(sorted(itertools.chain(*given), reverse=True))


LISTEN = "HOST:PORT|PATH"
RESTORE_AFTER_MS = 30_000
ADMIN_ADDRESS = "127.0.0.1:4171"
LOOKUPD_ADDRESS = "127.0.0.1:4160"
MIB = 1024**2


_SIZE = kinds.Kind(params.byte_size, "BYTES", (int, str), 'an integer, or a size such as "10GB"')

SETTINGS = under_headings(
    "Addresses",
    Setting(
        "tcp-address",
        kinds.Kind(params.listen_address, LISTEN, writes=True),
        "127.0.0.1:4150",
        help="Listen here; :4150 is every interface.",
    ),
    Setting(
        "http-address",
        kinds.Kind(params.or_nothing(params.listen_address), LISTEN, writes=True),
        "127.0.0.1:4151",
        help="Serve HTTP here; '' serves none.",
    ),
    Setting(
        "https-address",
        kinds.Kind(params.or_nothing(params.tcp_listen_address), "HOST:PORT"),
        "127.0.0.1:4152",
        help="Serve HTTPS here if --tls-cert is given; '' serves none.",
        brief=True,
    ),
    Setting(
        "admin",
        kinds.Kind(params.or_nothing(params.tcp_listen_address), "[=HOST:PORT]"),
        "",
        alone=ADMIN_ADDRESS,
        help=f"Run its web console, too, at {ADMIN_ADDRESS}.",
    ),
    Setting(
        "admin-config",
        kinds.FILE,
        help="With --admin: read options of the console from this TOML file, which has the keys of 'qcli admin "
        "--config': logins with OpenID Connect, masks of bodies, title, audit log. The broker gives the addresses, TLS "
        "and the log options.",
        brief=True,
    ),
    Setting(
        "processes",
        kinds.Kind(params.CountOrWord(1, 256, "auto"), "N|auto", (int, str), "an integer or auto"),
        "",
        help="Run N brokers behind these ports; auto: one for each core.",
    ),
    Setting(
        "process-ports",
        kinds.number(params.Integer(0, 65535 - 3 * 256), "PORT"),
        0,
        help="With --processes: the first port of the processes' own. Process I listens at this port + 3 x I for TCP, "
        "and at the next two for HTTP and HTTPS. 0: free ports.",
        brief=True,
    ),
    Setting(
        "with-lookupd",
        kinds.Kind(params.or_nothing(params.tcp_listen_address), "[=HOST:PORT]"),
        "",
        alone=LOOKUPD_ADDRESS,
        help="With --processes: run a discovery service, too, at this TCP address, and HTTP at the next port.",
        brief=True,
    ),
    Setting(
        "address-file",
        kinds.WRITTEN_FILE,
        help="Write the bound addresses to this file when the broker is ready: JSON with the keys tcp_address, "
        "http_address and https_address; with --admin also admin_address and admin_url; with --processes also "
        "processes, lookupd_tcp_address and lookupd_http_address. The file is replaced "
        "atomically, and removed when the broker stops.",
        brief=True,
    ),
    "Storage",
    Setting(
        "data-path",
        kinds.FOLDER,
        ".",
        help="Keep messages in this folder. Its parent must exist.",
    ),
    Setting(
        "sync",
        kinds.Kind(params.Word(["always", "interval"]), None),
        "always",
        help="always: an OK means on disk. interval: sync later.",
    ),
    Setting(
        "sync-every",
        kinds.POSITIVE,
        2500,
        help="With --sync interval, sync a topic's file after this many messages, or 16 MiB.",
        brief=True,
    ),
    Setting(
        "sync-timeout",
        kinds.POSITIVE_DURATION,
        "2s",
        help="With --sync interval, sync after this time if there is unsynced data.",
        brief=True,
    ),
    Setting(
        "checkpoint-interval",
        kinds.POSITIVE_DURATION,
        "2s",
        help="Write the positions of channels at this interval. After a crash, messages finished since then "
        "are delivered again.",
        brief=True,
    ),
    Setting(
        "mem-queue-size",
        kinds.COUNT,
        10_000,
        help="Keep this many of a topic's newest messages in memory, in addition to the file.",
        brief=True,
    ),
    Setting(
        "cache-bytes",
        kinds.COUNT_BYTES,
        64 * MIB,
        help="Keep at most this many bytes of messages in memory, over all topics, regardless of "
        "--mem-queue-size.",
        brief=True,
    ),
    Setting(
        "max-bytes-per-file",
        kinds.POSITIVE_BYTES,
        100 * MIB,
        help="Start a new file of a topic's log at this size.",
        brief=True,
    ),
    Setting(
        "retention-time",
        kinds.duration(params.retention_time),
        "0",
        help="Keep what all channels have passed: 7d, or forever.",
    ),
    Setting(
        "retention-bytes",
        _SIZE,
        "0",
        help="Keep at most this many bytes of a topic's newest messages readable, such as 10GB. With 0 or "
        "unlimited, --retention-time alone decides; if that is 0, unlimited keeps all messages, and with 0 they are "
        "deleted when every channel has passed them.",
        brief=True,
    ),
    Setting(
        "expire-idle",
        kinds.duration(params.long_duration),
        "0",
        help="Delete topics and channels that were idle for this long, such as 7d, unless their own setting says "
        "otherwise. 0: none.",
        brief=True,
    ),
    Setting(
        "archive",
        kinds.Kind(click.STRING, "URL"),
        "",
        help="Archive all changes here, such as in s3://bucket/nsq.",
    ),
    Setting(
        "archive-interval",
        kinds.POSITIVE_DURATION,
        "1s",
        help="Archive this often. So much can be lost with the machine.",
        brief=True,
    ),
    Setting(
        "archive-retention",
        kinds.duration(params.retention_time),
        "0",
        help="How long the archive keeps old states, and messages that every channel has passed, such as 90d. "
        "0: for ever.",
        brief=True,
    ),
    Setting(
        "archive-before-ok",
        kinds.BOOLEAN,
        "false",
        help="Acknowledge a message when it is archived: nothing acknowledged is lost with the machine.",
        brief=True,
    ),
    Setting(
        "restore-from",
        kinds.Kind(click.STRING, "URL"),
        "",
        help="Restore the data folder from this archive, if it is missing or empty. With --cluster: also if no other "
        "member may lead; see --restore-after.",
        brief=True,
    ),
    Setting(
        "node-id",
        kinds.number(params.Integer(0, 1023)),
        key="id",
        help="Use this number, 0 to 1023, in message ids. By default it is derived from the host name.",
        brief=True,
    ),
    "Cluster",
    Setting(
        "cluster",
        kinds.TEXT,
        "",
        help="Be a member of this cluster.",
    ),
    Setting(
        "coordinator",
        kinds.Kind(click.STRING, "URL"),
        "",
        help="Let this decide who leads: etcd, or a bucket.",
    ),
    Setting(
        "coordinator-password-file",
        kinds.FILE,
        help="Read the password of etcd's user from the first line of this file.",
        brief=True,
    ),
    Setting(
        "min-in-sync",
        kinds.number(params.Integer(1, 64)),
        1,
        help="Refuse publishes while fewer members have all messages, counting the leader. With 1, the leader goes on "
        "alone if it loses the others.",
        brief=True,
    ),
    Setting(
        "catch-up-rate",
        _SIZE,
        "0",
        help="Read at most this many bytes per second for a member that catches up, such as 50MB. 0 and unlimited: as "
        "fast as possible.",
        brief=True,
    ),
    Setting(
        "restore-after",
        kinds.DURATION,
        "30s",
        help="With --restore-from, restore this member, and lead, if there is no leader for this time, and the lost "
        "one was alone in sync.",
        brief=True,
    ),
    Setting(
        "cluster-auth-secret-file",
        kinds.FILE,
        help="Send other members the token in the first line of this file, which needs the role replicate there; with "
        "--admin also the role read, because the console sends it, too. It is read for each connection.",
        brief=True,
    ),
    Setting(
        "cluster-tls",
        kinds.BOOLEAN,
        "false",
        help="Connect to other members over TLS only. --tls-root-ca-file verifies their certificates, and they may ask "
        "for --tls-cert.",
        brief=True,
    ),
    Setting(
        "on-leader",
        kinds.Kind(click.STRING, "COMMAND"),
        "",
        help="Run this in a shell when this member begins to lead, such as a command that moves an IP address.",
        brief=True,
    ),
    Setting(
        "on-follower",
        kinds.Kind(click.STRING, "COMMAND"),
        "",
        help="Run this in a shell when this member begins to follow.",
        brief=True,
    ),
    "Message timeouts",
    Setting(
        "msg-timeout",
        kinds.POSITIVE_DURATION,
        "1m",
        help="Deliver a message again if it is not finished in this time, unless the client asked for another.",
        brief=True,
    ),
    Setting(
        "max-msg-timeout",
        kinds.POSITIVE_DURATION,
        "15m",
        help="Limit the message timeout that a client may ask for, and how long it may touch a message.",
        brief=True,
    ),
    Setting(
        "max-req-timeout",
        kinds.DURATION,
        "1h",
        help="Limit the delay of a message that a consumer requeues (REQ).",
        brief=True,
    ),
    Setting(
        "max-defer",
        kinds.DURATION,
        "8760h",
        help="Limit the delay of a message that a producer defers (DPUB, /pub?defer=).",
        brief=True,
    ),
    "Limits",
    Setting("max-msg-size", kinds.MESSAGE_BYTES, MIB, help="Limit the size of a message.", brief=True),
    Setting(
        "max-body-size",
        kinds.MESSAGE_BYTES,
        5 * MIB,
        help="Limit the size of a command's body, such as an MPUB.",
        brief=True,
    ),
    Setting(
        "max-rdy-count",
        kinds.POSITIVE,
        2500,
        help="Limit the messages in flight on one connection.",
        brief=True,
    ),
    Setting(
        "max-channel-consumers",
        kinds.COUNT,
        0,
        help="Limit the consumers of one channel; 0: no limit.",
        brief=True,
    ),
    Setting(
        "max-connections",
        kinds.COUNT,
        0,
        help="Limit the clients connected over TCP, and separately those over HTTP; further clients are "
        "refused. 0: as many as the limit of open files allows (ulimit -Hn), less those that logs need.",
        brief=True,
    ),
    Setting("max-topics", kinds.COUNT, 0, help="Limit the number of topics; 0: no limit.", brief=True),
    Setting("max-channels", kinds.COUNT, 0, help="Limit the channels of one topic; 0: no limit.", brief=True),
    Setting(
        "max-heartbeat-interval",
        kinds.POSITIVE_DURATION,
        "1m",
        help="Limit the time between heartbeats that a client may ask for.",
        brief=True,
    ),
    Setting(
        "max-output-buffer-size",
        kinds.POSITIVE_BYTES,
        64 * 1024,
        help="Limit the output buffer of a connection that a client may ask for.",
        brief=True,
    ),
    Setting(
        "max-output-buffer-timeout",
        kinds.POSITIVE_DURATION,
        "30s",
        help="Limit the longest time that messages may wait in the output buffer.",
        brief=True,
    ),
    Setting(
        "min-output-buffer-timeout",
        kinds.DURATION,
        "25ms",
        help="Limit the shortest time that messages may wait in the output buffer.",
        brief=True,
    ),
    Setting(
        "output-buffer-timeout",
        kinds.POSITIVE_DURATION,
        "250ms",
        help="Let messages wait this long in the output buffer of a client that does not ask for a time.",
        brief=True,
    ),
    "TLS and authentication",
    *certificate_settings(),
    Setting(
        "tls-required",
        kinds.Kind(
            params.BooleanOrWord(["tcp-https"]),
            "[=true|false|tcp-https]",
            (bool, int, str),
            "true, false or tcp-https",
        ),
        "false",
        alone="true",
        help="Refuse clients without TLS. tcp-https: allow plain HTTP.",
    ),
    *tls_client_settings(", for authorization services and for discovery services"),
    auth_file_setting(),
    Setting(
        "auth-http-address",
        kinds.Kind(params.http_service, "HOST:PORT|URL"),
        field="auth_http_addresses",
        multiple=True,
        help="Ask this service what a client may do whose token is not in --auth-file. May be repeated: the "
        "services are asked in turn.",
        brief=True,
    ),
    Setting(
        "http-open-metrics", kinds.BOOLEAN, "false", help="Allow GET /metrics without a token.", brief=True
    ),
    *http_access_settings(", also publishes"),
    "Compression",
    Setting("deflate", kinds.BOOLEAN, "true", help="Allow clients to use deflate.", brief=True),
    Setting(
        "max-deflate-level",
        kinds.number(params.Integer(1, 9)),
        6,
        help="Limit the deflate level; clients that ask for a higher one get this one.",
        brief=True,
    ),
    Setting("snappy", kinds.BOOLEAN, "true", help="Allow clients to use snappy.", brief=True),
    "Discovery",
    Setting(
        "lookupd-tcp-address",
        kinds.Kind(params.address, "HOST:PORT"),
        field="nsqlookupd_tcp_addresses",
        multiple=True,
        help="Register with this nsqlookupd. May be repeated.",
    ),
    Setting(
        "lookupd-tls",
        kinds.BOOLEAN,
        "false",
        help="Register over TLS only. --tls-root-ca-file verifies the certificate of the nsqlookupd, which may ask for "
        "--tls-cert.",
        brief=True,
    ),
    Setting(
        "lookupd-auth-secret-file",
        kinds.FILE,
        help="Register with the token in the first line of this file. It is read for each connection.",
        brief=True,
    ),
    Setting(
        "broadcast-address",
        kinds.HOST,
        help="Announce this address to discovery services and clients. By default it is this machine's host "
        "name; an nsqlookupd gets the loopback address if the broker listens there only.",
        brief=True,
    ),
    Setting(
        "broadcast-tcp-port", kinds.PORT, 0, help="Announce this TCP port; 0: the bound port.", brief=True
    ),
    Setting(
        "broadcast-http-port", kinds.PORT, 0, help="Announce this HTTP port; 0: the bound port.", brief=True
    ),
    Setting(
        "topology-region",
        kinds.TEXT,
        "",
        help="Deliver to consumers in this region, if none in the same zone is ready, before all others.",
        brief=True,
    ),
    Setting(
        "topology-zone",
        kinds.TEXT,
        "",
        help="Deliver to consumers in this zone first, while they are ready. They name it in IDENTIFY.",
        brief=True,
    ),
    "HTTP client",
    Setting(
        "http-client-connect-timeout",
        kinds.POSITIVE_DURATION,
        "2s",
        help="Wait this long for a connection to an authorization service or nsqlookupd.",
        brief=True,
    ),
    Setting(
        "http-client-request-timeout",
        kinds.POSITIVE_DURATION,
        "5s",
        help="Wait this long for the answer to such a request.",
        brief=True,
    ),
    "statsd",
    Setting(
        "statsd-address",
        kinds.Kind(params.or_nothing(params.address), "HOST:PORT"),
        "",
        help="Send statistics to this address over UDP.",
        brief=True,
    ),
    Setting(
        "statsd-prefix",
        kinds.METRIC_PREFIX,
        "nsq.%s",
        help="Begin names of statistics with this; %s is replaced by the broadcast address and the HTTP port.",
        brief=True,
    ),
    Setting(
        "statsd-interval", kinds.POSITIVE_DURATION, "1m", help="Send statistics at this interval.", brief=True
    ),
    Setting(
        "statsd-mem-stats",
        kinds.BOOLEAN,
        "true",
        help="Include statistics of the process's memory.",
        brief=True,
    ),
    Setting(
        "statsd-udp-packet-size",
        kinds.POSITIVE_BYTES,
        508,
        help="Limit the size of a datagram, except for a single longer line.",
        brief=True,
    ),
    Setting(
        "statsd-exclude-ephemeral",
        kinds.BOOLEAN,
        "false",
        help="Leave out ephemeral topics and channels.",
        brief=True,
    ),
    "End-to-end latency",
    Setting(
        "e2e-processing-latency-percentile",
        kinds.Kind(params.percentiles, "Q[,Q...]", (float, int, str), "a number"),
        field="e2e_processing_latency_percentiles",
        multiple=True,
        callback=_descending,
        help="Measure these percentiles of the time from publish to finish, such as 0.99, for the statistics. "
        "Repeat the option for several. By default nothing is measured.",
        brief=True,
    ),
    Setting(
        "e2e-processing-latency-window-time",
        kinds.POSITIVE_DURATION,
        "10m",
        help="Compute the percentiles over this time.",
        brief=True,
    ),
    "Logging",
    *LOG_SETTINGS,
    audit_log_setting(),
    Setting(
        "queue-scan-worker-pool-max",
        kinds.Kind(click.STRING, "N", (int, str), "an integer"),
        ignored="timers do not scan channels",
        help="Accepted, without effect.",
    ),
    Setting(
        "queue-scan-selection-count",
        kinds.Kind(click.STRING, "N", (int, str), "an integer"),
        ignored="timers do not scan channels",
        help="Accepted, without effect.",
    ),
    Setting(
        "worker-id",
        kinds.Kind(click.STRING, "[=TEXT]", (int, bool, str), "anything"),
        alone="true",
        ignored="see --node-id",
        help="Accepted, without effect: see --node-id.",
    ),
    verbose_setting(),
)


def broker_options(values: dict[str, Any]) -> BrokerOptions:
    """Return the broker's options from values by field. Raises Failure: values contradict each other."""
    from trio_nsq.broker import BrokerOptions
    from trio_nsq.broker.state.settings import TopicSettings
    from trio_nsq.protocol import Limits

    limits = Limits(**fields_of(Limits, values))
    if limits.min_output_buffer_timeout_ms > limits.max_output_buffer_timeout_ms:
        raise Failure("--min-output-buffer-timeout is longer than --max-output-buffer-timeout.")
    for name in ("archive_before_ok", "archive_retention_ms"):  # it would promise what is not done
        if values[name] and not values["archive"]:
            raise Failure(f"--{name.removesuffix('_ms').replace('_', '-')} needs --archive.")
    defaults = TopicSettings(**fields_of(TopicSettings, values))
    return BrokerOptions(limits=limits, topic_defaults=defaults, **fields_of(BrokerOptions, values))


def cluster_options(values: dict[str, Any]) -> ClusterOptions | None:
    """Return the options of a member; None: the broker is alone. Raises Failure: an option lacks another one."""
    from trio_nsq.cluster.options import ClusterOptions

    if not values["cluster"]:
        for name in ("coordinator", "cluster_tls", "cluster_auth_secret_file", "coordinator_password_file"):
            if values[name]:
                raise Failure(f"--{name.replace('_', '-')} needs --cluster.")
        for name, default in (("min_in_sync", 1), ("catch_up_rate", 0)):
            if values[name] > default:
                raise Failure(f"--{name.replace('_', '-')} needs --cluster.")
        if values["restore_after_ms"] != RESTORE_AFTER_MS:
            raise Failure("--restore-after needs --cluster.")
        return None
    if values["restore_after_ms"] != RESTORE_AFTER_MS and not values["restore_from"]:
        raise Failure("--restore-after needs --restore-from.")
    if not values["coordinator"]:
        raise Failure(
            "--cluster needs --coordinator, which decides the member that leads: s3://BUCKET/FOLDER, etcd://HOST:2379 "
            "or static:. See 'qcli serve --help'."
        )
    limited = {"catch_up_rate": max(0, values["catch_up_rate"])}  # below 0: unlimited
    return ClusterOptions(**fields_of(ClusterOptions, values | limited))
