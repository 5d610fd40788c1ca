"""The options of `qcli serve`: one table, from which its flags, environment variables and configuration keys come.

Names, defaults and keys are nsqd's. What differs stands in docs/differences.md.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import click

from ...framework.daemon.setting import (
    BOOLEAN,
    COUNT,
    COUNT_BYTES,
    DURATION,
    FILE,
    FOLDER,
    HOST,
    LISTEN,
    LOG_SETTINGS,
    MIB,
    PORT,
    POSITIVE,
    POSITIVE_BYTES,
    POSITIVE_DURATION,
    TEXT,
    Kind,
    Setting,
    duration_kind,
    field_names,
    number_kind,
    under_headings,
    verbose_setting,
)
from ...framework.errors import Failure
from ...framework.params import (
    BooleanOrWord,
    Integer,
    Word,
    address,
    byte_size,
    http_service,
    listen_address,
    or_nothing,
    percentiles,
    retention_time,
    tcp_listen_address,
)

if TYPE_CHECKING:
    from trio_nsq.broker import BrokerOptions


def _descending(_ctx: click.Context, _param: click.Parameter, given: tuple[tuple[float, ...], ...]) -> Any:
    return tuple(sorted(itertools.chain(*given), reverse=True))


SETTINGS = under_headings(
    "Addresses",
    Setting(
        "tcp-address",
        Kind(listen_address, LISTEN),
        "127.0.0.1:4150",
        help="Where clients connect. Port 0 picks a free one; :4150 is every interface; a path is a unix socket.",
    ),
    Setting(
        "http-address",
        Kind(or_nothing(listen_address), LISTEN),
        "127.0.0.1:4151",
        help="Where HTTP is served, likewise; '' serves none.",
    ),
    Setting(
        "https-address",
        Kind(or_nothing(tcp_listen_address), "HOST:PORT"),
        "127.0.0.1:4152",
        help="Where HTTPS is served, if there is a certificate; '' serves none.",
    ),
    Setting(
        "address-file",
        FILE,
        help="Once ready, write the bound addresses here, as JSON with the keys tcp_address, http_address and "
        "https_address. The file appears whole, and goes away with the broker.",
    ),
    Setting(
        "node-id",
        number_kind(Integer(0, 1023)),
        key="id",
        help="Part of every message id, 0 to 1023. Not given: derived from the host name.",
    ),
    "Storage",
    Setting(
        "data-path",
        FOLDER,
        ".",
        help="Where messages are kept. Made if it is missing; its parent has to exist.",
    ),
    Setting(
        "sync",
        Kind(Word(["always", "interval"]), None),
        "always",
        help="always: every OK is on stable storage. interval: see --sync-every and --sync-timeout.",
    ),
    Setting(
        "sync-every",
        POSITIVE,
        2500,
        help="With --sync interval: sync a topic's file after so many messages, or 16 MiB.",
    ),
    Setting(
        "sync-timeout",
        POSITIVE_DURATION,
        "2s",
        help="With --sync interval: sync after so long, if there is anything to sync.",
    ),
    Setting(
        "checkpoint-interval",
        POSITIVE_DURATION,
        "2s",
        help="How often the positions of channels are written. After a crash, what was finished since is "
        "delivered again.",
    ),
    Setting(
        "mem-queue-size",
        COUNT,
        10_000,
        help="Messages of each topic, the newest, that are kept in memory besides the file.",
    ),
    Setting(
        "cache-bytes",
        COUNT_BYTES,
        64 * MIB,
        help="Bytes of messages kept in memory, over all topics, whatever --mem-queue-size says.",
    ),
    Setting(
        "max-bytes-per-file",
        POSITIVE_BYTES,
        100 * MIB,
        help="Size at which a topic's log goes on in a new file.",
    ),
    Setting(
        "retention-time",
        duration_kind(retention_time),
        "0",
        help="Messages that every channel has passed stay readable for this long, such as 7d, or forever. With 0, and "
        "--retention-bytes 0, they go at once. This, too, can be set for a single topic: PUT /topic/settings.",
    ),
    Setting(
        "retention-bytes",
        Kind(byte_size, "BYTES", (int, str), 'an integer, or a size such as "10GB"'),
        "0",
        help="And no more than the newest so many bytes of a topic's messages, such as 10GB. With 0, or unlimited, "
        "--retention-time alone decides; if that is 0, unlimited keeps all.",
    ),
    "Message timeouts",
    Setting(
        "msg-timeout",
        POSITIVE_DURATION,
        "1m",
        help="A message not finished in this time is delivered again, unless the client asks for another time.",
    ),
    Setting(
        "max-msg-timeout",
        POSITIVE_DURATION,
        "15m",
        help="The longest such time a client may ask for, also by touching a message.",
    ),
    Setting(
        "max-req-timeout",
        DURATION,
        "1h",
        help="How long a message that a consumer hands back (REQ) may be deferred at most.",
    ),
    Setting(
        "max-defer",
        DURATION,
        "8760h",
        help="How long a message may be deferred by its publisher (DPUB, /pub?defer=) at most.",
    ),
    "What clients may ask for",
    Setting("max-msg-size", POSITIVE_BYTES, MIB, help="Size of one message."),
    Setting(
        "max-body-size", POSITIVE_BYTES, 5 * MIB, help="Size of one command's body, such as that of an MPUB."
    ),
    Setting("max-rdy-count", POSITIVE, 2500, help="Messages one connection may have in flight."),
    Setting("max-channel-consumers", COUNT, 0, help="Consumers of one channel; 0: any number."),
    Setting(
        "max-connections",
        COUNT,
        0,
        help="Clients connected over TCP, and as many over HTTP; others are refused. 0: as many as the limit of open "
        "files allows (ulimit -Hn), less those that logs need.",
    ),
    Setting("max-topics", COUNT, 0, help="Topics; further ones are not made. 0: any number."),
    Setting("max-channels", COUNT, 0, help="Channels of one topic, likewise. 0: any number."),
    Setting("max-heartbeat-interval", POSITIVE_DURATION, "1m", help="Longest time between heartbeats."),
    Setting(
        "max-output-buffer-size", POSITIVE_BYTES, 64 * 1024, help="Largest output buffer of a connection."
    ),
    Setting(
        "max-output-buffer-timeout",
        POSITIVE_DURATION,
        "30s",
        help="Longest time messages may wait in that buffer.",
    ),
    Setting("min-output-buffer-timeout", DURATION, "25ms", help="Shortest such time."),
    Setting(
        "output-buffer-timeout",
        POSITIVE_DURATION,
        "250ms",
        help="That time for a client that does not ask for another.",
    ),
    "TLS",
    Setting(
        "tls-cert",
        FILE,
        help="PEM file with the certificate, and those up to its CA. Clients may have TLS if it is given.",
    ),
    Setting("tls-key", FILE, help="PEM file with the certificate's key, without a password."),
    Setting(
        "tls-required",
        Kind(
            BooleanOrWord(["tcp-https"]),
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
        Kind(Word(["require", "require-verify"], empty=""), None),
        "",
        help="require: clients need a certificate, whoever signed it. require-verify: one that --tls-root-ca-file "
        "vouches for. Either one implies --tls-required.",
    ),
    Setting(
        "tls-root-ca-file",
        FILE,
        help="PEM file with the CAs of clients' certificates, and of authorization services. Not given: the system's.",
    ),
    Setting(
        "tls-min-version",
        Kind(Word(["tls1.0", "tls1.1", "tls1.2", "tls1.3"], empty="tls1.2"), None),
        "tls1.2",
        help="The oldest TLS that is spoken. nsqd's default is tls1.0, which is out of use.",
    ),
    "Compression",
    Setting("deflate", BOOLEAN, "true", alone="true", help="Clients may have deflate."),
    Setting(
        "max-deflate-level",
        number_kind(Integer(1, 9)),
        6,
        help="A client that asks for a higher level gets this one.",
    ),
    Setting("snappy", BOOLEAN, "true", alone="true", help="Clients may have snappy."),
    "Authorization",
    Setting(
        "auth-http-address",
        Kind(http_service, "HOST:PORT|URL"),
        field="auth_http_addresses",
        multiple=True,
        help="A service that says who may publish and subscribe to what. May be given several times; they are asked "
        "in turn until one answers. Not given: everybody may.",
    ),
    "Discovery",
    Setting(
        "lookupd-tcp-address",
        Kind(address, "HOST:PORT"),
        field="nsqlookupd_tcp_addresses",
        multiple=True,
        help="An nsqlookupd to register with. May be given several times.",
    ),
    Setting(
        "broadcast-address",
        HOST,
        help="The address others are told. Not given: this machine's host name; an nsqlookupd is told the loopback "
        "address if clients connect there alone.",
    ),
    Setting("broadcast-tcp-port", PORT, 0, help="The TCP port others are told; 0: the one that is bound."),
    Setting("broadcast-http-port", PORT, 0, help="The HTTP port others are told; 0: the one that is bound."),
    "HTTP requests of the broker's own",
    Setting(
        "http-client-connect-timeout",
        POSITIVE_DURATION,
        "2s",
        help="How long a connection may take, to an authorization service or an nsqlookupd.",
    ),
    Setting("http-client-request-timeout", POSITIVE_DURATION, "5s", help="How long such a request may take."),
    "statsd",
    Setting(
        "statsd-address",
        Kind(or_nothing(address), "HOST:PORT"),
        "",
        help="Where statistics are sent, over UDP. Not given: nowhere.",
    ),
    Setting(
        "statsd-prefix",
        TEXT,
        "nsq.%s",
        help="What their names begin with; %s is replaced by the broadcast address and HTTP port.",
    ),
    Setting("statsd-interval", POSITIVE_DURATION, "1m", help="How often they are sent."),
    Setting(
        "statsd-mem-stats", BOOLEAN, "true", alone="true", help="Send those of the process's memory too."
    ),
    Setting(
        "statsd-udp-packet-size", POSITIVE_BYTES, 508, help="Size of one datagram, unless one line is longer."
    ),
    Setting(
        "statsd-exclude-ephemeral",
        BOOLEAN,
        "false",
        alone="true",
        help="Leave out ephemeral topics and channels.",
    ),
    "End-to-end latency",
    Setting(
        "e2e-processing-latency-percentile",
        Kind(percentiles, "Q[,Q...]", (float, int, str), "a number"),
        field="e2e_processing_latency_percentiles",
        multiple=True,
        callback=_descending,
        help="Percentiles of the time from publish to finish, such as 0.99, for the statistics. May be given several "
        "times. Not given: it is not measured.",
    ),
    Setting(
        "e2e-processing-latency-window-time", POSITIVE_DURATION, "10m", help="Over how long they are taken."
    ),
    "Logging",
    *LOG_SETTINGS,
    "Accepted from nsqd, without effect here",
    Setting(
        "queue-scan-worker-pool-max",
        Kind(click.STRING, "N", (int, str), "an integer"),
        ignored="timers do not scan channels",
        help="Timers do not scan channels here.",
    ),
    Setting(
        "queue-scan-selection-count",
        Kind(click.STRING, "N", (int, str), "an integer"),
        ignored="timers do not scan channels",
        help="Likewise.",
    ),
    Setting(
        "worker-id",
        Kind(click.STRING, "[=TEXT]", (int, bool, str), "anything"),
        alone="true",
        ignored="see --node-id",
        help="See --node-id.",
    ),
    verbose_setting(),
)


def broker_options(values: dict[str, Any]) -> BrokerOptions:
    """Put values where the broker expects them.

    Args:
        values: By field; those that are no fields of the broker's are left alone.

    Raises:
        Failure: They do not go together.
    """
    from trio_nsq.broker import BrokerOptions
    from trio_nsq.broker.state.settings import TopicSettings
    from trio_nsq.protocol import Limits

    limits = Limits(**{name: values[name] for name in field_names(Limits) & values.keys()})
    if limits.min_output_buffer_timeout_ms > limits.max_output_buffer_timeout_ms:
        raise Failure("--min-output-buffer-timeout is longer than --max-output-buffer-timeout.")
    defaults = TopicSettings(**{name: values[name] for name in field_names(TopicSettings) & values.keys()})
    return BrokerOptions(
        limits=limits,
        topic_defaults=defaults,
        **{name: values[name] for name in field_names(BrokerOptions) & values.keys()},
    )
