"""The options of `qcli serve`: one table, from which its flags, environment variables and configuration keys come.

Names, defaults and keys are nsqd's. What differs stands in docs/reference/differences.md.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import click

from ...framework import params
from ...framework.daemon import kinds
from ...framework.daemon.setting import LOG_SETTINGS, Setting, fields_of, under_headings, verbose_setting
from ...framework.errors import Failure

if TYPE_CHECKING:
    from trio_nsq.broker import BrokerOptions


def _descending(_ctx: click.Context, _param: click.Parameter, given: tuple[tuple[float, ...], ...]) -> Any:
    return tuple(sorted(itertools.chain(*given), reverse=True))


LISTEN = "HOST:PORT|PATH"
MIB = 1024**2


SETTINGS = under_headings(
    "Addresses",
    Setting(
        "tcp-address",
        kinds.Kind(params.listen_address, LISTEN),
        "127.0.0.1:4150",
        help="Where clients connect. Port 0 picks a free one; :4150 is every interface; a path is a unix socket.",
    ),
    Setting(
        "http-address",
        kinds.Kind(params.or_nothing(params.listen_address), LISTEN),
        "127.0.0.1:4151",
        help="Where HTTP is served, likewise; '' serves none.",
    ),
    Setting(
        "https-address",
        kinds.Kind(params.or_nothing(params.tcp_listen_address), "HOST:PORT"),
        "127.0.0.1:4152",
        help="Where HTTPS is served, if there is a certificate; '' serves none.",
    ),
    Setting(
        "address-file",
        kinds.FILE,
        help="Once ready, write the bound addresses here, as JSON with the keys tcp_address, http_address and "
        "https_address. The file appears whole, and goes away with the broker.",
    ),
    Setting(
        "node-id",
        kinds.number(params.Integer(0, 1023)),
        key="id",
        help="Part of every message id, 0 to 1023. Not given: derived from the host name.",
    ),
    "Storage",
    Setting(
        "data-path",
        kinds.FOLDER,
        ".",
        help="Where messages are kept. Made if it is missing; its parent has to exist.",
    ),
    Setting(
        "sync",
        kinds.Kind(params.Word(["always", "interval"]), None),
        "always",
        help="always: every OK is on stable storage. interval: see --sync-every and --sync-timeout.",
    ),
    Setting(
        "sync-every",
        kinds.POSITIVE,
        2500,
        help="With --sync interval: sync a topic's file after so many messages, or 16 MiB.",
    ),
    Setting(
        "sync-timeout",
        kinds.POSITIVE_DURATION,
        "2s",
        help="With --sync interval: sync after so long, if there is anything to sync.",
    ),
    Setting(
        "checkpoint-interval",
        kinds.POSITIVE_DURATION,
        "2s",
        help="How often the positions of channels are written. After a crash, what was finished since is "
        "delivered again.",
    ),
    Setting(
        "mem-queue-size",
        kinds.COUNT,
        10_000,
        help="Messages of each topic, the newest, that are kept in memory besides the file.",
    ),
    Setting(
        "cache-bytes",
        kinds.COUNT_BYTES,
        64 * MIB,
        help="Bytes of messages kept in memory, over all topics, whatever --mem-queue-size says.",
    ),
    Setting(
        "max-bytes-per-file",
        kinds.POSITIVE_BYTES,
        100 * MIB,
        help="Size at which a topic's log goes on in a new file.",
    ),
    Setting(
        "retention-time",
        kinds.duration(params.retention_time),
        "0",
        help="Messages that every channel has passed stay readable for this long, such as 7d, or forever. With 0, and "
        "--retention-bytes 0, they go at once. This, too, can be set for a single topic: PUT /topic/settings.",
    ),
    Setting(
        "retention-bytes",
        kinds.Kind(params.byte_size, "BYTES", (int, str), 'an integer, or a size such as "10GB"'),
        "0",
        help="And no more than the newest so many bytes of a topic's messages, such as 10GB. With 0, or unlimited, "
        "--retention-time alone decides; if that is 0, unlimited keeps all.",
    ),
    "Message timeouts",
    Setting(
        "msg-timeout",
        kinds.POSITIVE_DURATION,
        "1m",
        help="A message not finished in this time is delivered again, unless the client asks for another time.",
    ),
    Setting(
        "max-msg-timeout",
        kinds.POSITIVE_DURATION,
        "15m",
        help="The longest such time a client may ask for, also by touching a message.",
    ),
    Setting(
        "max-req-timeout",
        kinds.DURATION,
        "1h",
        help="How long a message that a consumer hands back (REQ) may be deferred at most.",
    ),
    Setting(
        "max-defer",
        kinds.DURATION,
        "8760h",
        help="How long a message may be deferred by its publisher (DPUB, /pub?defer=) at most.",
    ),
    "What clients may ask for",
    Setting("max-msg-size", kinds.POSITIVE_BYTES, MIB, help="Size of one message."),
    Setting(
        "max-body-size",
        kinds.POSITIVE_BYTES,
        5 * MIB,
        help="Size of one command's body, such as that of an MPUB.",
    ),
    Setting("max-rdy-count", kinds.POSITIVE, 2500, help="Messages one connection may have in flight."),
    Setting("max-channel-consumers", kinds.COUNT, 0, help="Consumers of one channel; 0: any number."),
    Setting(
        "max-connections",
        kinds.COUNT,
        0,
        help="Clients connected over TCP, and as many over HTTP; others are refused. 0: as many as the limit of open "
        "files allows (ulimit -Hn), less those that logs need.",
    ),
    Setting("max-topics", kinds.COUNT, 0, help="Topics; further ones are not made. 0: any number."),
    Setting("max-channels", kinds.COUNT, 0, help="Channels of one topic, likewise. 0: any number."),
    Setting("max-heartbeat-interval", kinds.POSITIVE_DURATION, "1m", help="Longest time between heartbeats."),
    Setting(
        "max-output-buffer-size",
        kinds.POSITIVE_BYTES,
        64 * 1024,
        help="Largest output buffer of a connection.",
    ),
    Setting(
        "max-output-buffer-timeout",
        kinds.POSITIVE_DURATION,
        "30s",
        help="Longest time messages may wait in that buffer.",
    ),
    Setting("min-output-buffer-timeout", kinds.DURATION, "25ms", help="Shortest such time."),
    Setting(
        "output-buffer-timeout",
        kinds.POSITIVE_DURATION,
        "250ms",
        help="That time for a client that does not ask for another.",
    ),
    "TLS",
    Setting(
        "tls-cert",
        kinds.FILE,
        help="PEM file with the certificate, and those up to its CA. Clients may have TLS if it is given.",
    ),
    Setting("tls-key", kinds.FILE, help="PEM file with the certificate's key, without a password."),
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
        help="Refuse clients that do not use TLS. tcp-https: plain HTTP is allowed all the same.",
    ),
    Setting(
        "tls-client-auth-policy",
        kinds.Kind(params.Word(["require", "require-verify"], empty=""), None),
        "",
        help="require: clients need a certificate, whoever signed it. require-verify: one that --tls-root-ca-file "
        "vouches for. Either one implies --tls-required.",
    ),
    Setting(
        "tls-root-ca-file",
        kinds.FILE,
        help="PEM file with the CAs of clients' certificates, and of authorization services. Not given: the system's.",
    ),
    Setting(
        "tls-min-version",
        kinds.Kind(params.Word(["tls1.0", "tls1.1", "tls1.2", "tls1.3"], empty="tls1.2"), None),
        "tls1.2",
        help="The oldest TLS that is spoken. nsqd's default is tls1.0, which is out of use.",
    ),
    "Compression",
    Setting("deflate", kinds.BOOLEAN, "true", alone="true", help="Clients may have deflate."),
    Setting(
        "max-deflate-level",
        kinds.number(params.Integer(1, 9)),
        6,
        help="A client that asks for a higher level gets this one.",
    ),
    Setting("snappy", kinds.BOOLEAN, "true", alone="true", help="Clients may have snappy."),
    "Authorization",
    Setting(
        "auth-http-address",
        kinds.Kind(params.http_service, "HOST:PORT|URL"),
        field="auth_http_addresses",
        multiple=True,
        help="A service that says who may publish and subscribe to what. May be given several times; they are asked "
        "in turn until one answers. Not given: everybody may.",
    ),
    "Discovery",
    Setting(
        "lookupd-tcp-address",
        kinds.Kind(params.address, "HOST:PORT"),
        field="nsqlookupd_tcp_addresses",
        multiple=True,
        help="An nsqlookupd to register with. May be given several times.",
    ),
    Setting(
        "broadcast-address",
        kinds.HOST,
        help="The address others are told. Not given: this machine's host name; an nsqlookupd is told the loopback "
        "address if clients connect there alone.",
    ),
    Setting(
        "broadcast-tcp-port", kinds.PORT, 0, help="The TCP port others are told; 0: the one that is bound."
    ),
    Setting(
        "broadcast-http-port", kinds.PORT, 0, help="The HTTP port others are told; 0: the one that is bound."
    ),
    "HTTP requests of the broker's own",
    Setting(
        "http-client-connect-timeout",
        kinds.POSITIVE_DURATION,
        "2s",
        help="How long a connection may take, to an authorization service or an nsqlookupd.",
    ),
    Setting(
        "http-client-request-timeout", kinds.POSITIVE_DURATION, "5s", help="How long such a request may take."
    ),
    "statsd",
    Setting(
        "statsd-address",
        kinds.Kind(params.or_nothing(params.address), "HOST:PORT"),
        "",
        help="Where statistics are sent, over UDP. Not given: nowhere.",
    ),
    Setting(
        "statsd-prefix",
        kinds.TEXT,
        "nsq.%s",
        help="What their names begin with; %s is replaced by the broadcast address and HTTP port.",
    ),
    Setting("statsd-interval", kinds.POSITIVE_DURATION, "1m", help="How often they are sent."),
    Setting(
        "statsd-mem-stats",
        kinds.BOOLEAN,
        "true",
        alone="true",
        help="Send those of the process's memory too.",
    ),
    Setting(
        "statsd-udp-packet-size",
        kinds.POSITIVE_BYTES,
        508,
        help="Size of one datagram, unless one line is longer.",
    ),
    Setting(
        "statsd-exclude-ephemeral",
        kinds.BOOLEAN,
        "false",
        alone="true",
        help="Leave out ephemeral topics and channels.",
    ),
    "End-to-end latency",
    Setting(
        "e2e-processing-latency-percentile",
        kinds.Kind(params.percentiles, "Q[,Q...]", (float, int, str), "a number"),
        field="e2e_processing_latency_percentiles",
        multiple=True,
        callback=_descending,
        help="Percentiles of the time from publish to finish, such as 0.99, for the statistics. May be given several "
        "times. Not given: it is not measured.",
    ),
    Setting(
        "e2e-processing-latency-window-time",
        kinds.POSITIVE_DURATION,
        "10m",
        help="Over how long they are taken.",
    ),
    "Logging",
    *LOG_SETTINGS,
    Setting(
        "queue-scan-worker-pool-max",
        kinds.Kind(click.STRING, "N", (int, str), "an integer"),
        ignored="timers do not scan channels",
        help="Timers do not scan channels here.",
    ),
    Setting(
        "queue-scan-selection-count",
        kinds.Kind(click.STRING, "N", (int, str), "an integer"),
        ignored="timers do not scan channels",
        help="Likewise.",
    ),
    Setting(
        "worker-id",
        kinds.Kind(click.STRING, "[=TEXT]", (int, bool, str), "anything"),
        alone="true",
        ignored="see --node-id",
        help="See --node-id.",
    ),
    verbose_setting(),
)


def broker_options(values: dict[str, Any]) -> BrokerOptions:
    """Put values, by field, where the broker expects them. Raises Failure: they do not go together."""
    from trio_nsq.broker import BrokerOptions
    from trio_nsq.broker.state.settings import TopicSettings
    from trio_nsq.protocol import Limits

    limits = Limits(**fields_of(Limits, values))
    if limits.min_output_buffer_timeout_ms > limits.max_output_buffer_timeout_ms:
        raise Failure("--min-output-buffer-timeout is longer than --max-output-buffer-timeout.")
    defaults = TopicSettings(**fields_of(TopicSettings, values))
    return BrokerOptions(
        limits=limits,
        topic_defaults=defaults,
        **fields_of(BrokerOptions, values),
    )
