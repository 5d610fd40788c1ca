"""`qcli clients`: the consumers and producers that are connected to brokers."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import click

from trio_nsq.api.answers import ClientStats, Stats

from ..broker.brokers import Brokers, broker_http_options
from ..broker.name_completion import complete_source
from ..broker.refusals import missing
from ..framework import output
from ..framework.command import DocumentedCommand
from ..framework.errors import ExitCode
from ..framework.options import option, output_format
from ..framework.params import Source, duration, source
from ..records.brokers import ClientRecord
from ..terminal.figures import age, short_count
from ..terminal.fitted_table import Column, fitted_table, output_width

if TYPE_CHECKING:
    from ..broker.admin_client import AdminClient

FORMATS = ("table", "json", "csv", "tsv")
KEYS = tuple(ClientRecord.__annotations__)
_MAX_NAMED = 3


@click.command(
    "clients",
    cls=DocumentedCommand,
    short_help="Show connected consumers and producers.",
    examples={
        "show the consumers of a channel": "qcli clients clicks/archive",
        "show the consumers and producers of a topic": "qcli clients clicks",
        "show the clients of a fleet": "qcli clients --lookupd-http-address 127.0.0.1:4161",
        "list consumers that take no messages": "qcli clients clicks --format json | jq 'select(.ready == 0)'",
    },
    exits={
        ExitCode.FAILURE: "There is no such topic or channel, or standard output cannot be written.",
        ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning,
        ExitCode.PARTIAL: "Some brokers do not answer; standard error lists them.",
    },
    details={
        "Columns": "consumer or producer: its address. channel: where it is subscribed. agent: its library, or its "
        "name if it has none. tls: the version of TLS. in flight: messages that it has not finished. ready: how many "
        "messages it takes (RDY); 0 during a back-off. rate: messages per second that it finished or published, in the "
        "time of --interval. connected: since when. On a narrow terminal, columns are left out, and names are "
        "shortened.",
        "Keys": "kind (consumer or producer), broker, topic, channel (null for a producer), address, client_id, "
        "hostname, agent, tls, tls_version, compression (snappy, deflate or null), identity (that of its token, or "
        "null), in_flight, ready, messages (sent to a consumer, or published by a producer), finished, requeued, rate "
        "(messages per second, null with --interval 0), connect_time (Unix seconds), connected_s.",
        "Which clients": "A producer is a TCP client that has published. It has a record for each topic; nsqd tells "
        "only one of its topics. A client that publishes and consumes is listed as both. Publishers over HTTP, such as "
        "qcli pub to this project's broker, and readers of the log do not stay connected.",
    },
)
@click.argument(
    "wanted", metavar="[TOPIC[/CHANNEL]]", required=False, type=source, shell_complete=complete_source
)
@broker_http_options
@output_format(
    "table: for people. json: write an object per line. csv, tsv: write a line of headings first.",
    *FORMATS,
    records=[ClientRecord],
)
@option(
    "Output",
    "--interval",
    "interval_ms",
    type=duration,
    default="1s",
    help="Ask twice, this long apart, to measure rates. 0: ask once, without rates.",
)
def command(wanted: Source | None, brokers: Brokers, form: str, interval_ms: int) -> None:
    """Show connected consumers and producers.

    Without a topic, show those of all topics; with a channel, only its consumers.
    """
    answers = brokers.read(lambda address: _sampled(address, wanted, interval_ms / 1000))
    records = [record for found in answers.results.values() for record in found.records]
    hidden = sorted({topic for found in answers.results.values() for topic in found.hidden})
    records.sort(key=lambda record: (record["kind"], record["topic"], record["channel"] or ""))
    if form == "table":
        output.write(_tables(records, wanted, output_width(), with_broker=brokers.is_fleet))
    else:
        output.write_records(records, KEYS, form)
    if hidden:
        more = len(hidden) - _MAX_NAMED
        shown = ", ".join(hidden[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
        output.print_diagnostic(
            f"Note: the consumers of {shown} are not listed: this needs a secret with the role read on the topic."
        )
    elif not records:
        output.report_none("connected clients", wanted or "")
    answers.check()


class _Found(NamedTuple):
    """The clients of a broker.

    Attributes:
        hidden: Topics with consumers that the broker does not list to this user.
    """

    records: list[ClientRecord]
    hidden: list[str]


class _Key(NamedTuple):
    """Identifies a row in successive statistics of a broker."""

    kind: str
    topic: str
    channel: str | None
    address: str
    connect_time: int


def _sampled(address: str, wanted: Source | None, interval_s: float) -> _Found:
    """Return the records of a broker's clients, with rates over the interval. Raises Failure."""
    from ..broker.admin_client import AdminClient

    broker = AdminClient(address)
    before: dict[_Key, ClientRecord] = {}
    before_s = time.monotonic()
    if interval_s:
        before, _ = _clients(broker, wanted)
        before_s = time.monotonic()
        time.sleep(interval_s)
    now, unlisted = _clients(broker, wanted)
    elapsed_s = time.monotonic() - before_s
    for key, record in now.items():
        if key in before and elapsed_s > 0:
            record["rate"] = round(max(0, _done(record) - _done(before[key])) / elapsed_s, 1)
    return _Found(list(now.values()), _unreadable(broker, unlisted) if unlisted else [])


def _unreadable(broker: AdminClient, topics: Collection[str]) -> list[str]:
    """Return those of some topics whose consumers the user may not see."""
    from ..broker.rights import identity_at

    identity = identity_at(broker)
    return [topic for topic in topics if identity is not None and not identity.allows("read", topic)]


def _done(record: ClientRecord) -> int:
    """Return the messages that count for the rate: those that a consumer finished, or a producer published."""
    return record["messages"] if record["finished"] is None else record["finished"]


def _clients(broker: AdminClient, wanted: Source | None) -> tuple[dict[_Key, ClientRecord], set[str]]:
    """Return the clients, consumers by channel, then producers; and the topics with consumers that are not listed.

    Raises NotFound: the broker lacks topic or channel.
    """
    stats = broker.stats(*(wanted or (None, None)), clients=True)
    found, has_wanted = _of_stats(stats, broker.address, wanted)
    if wanted is not None and not has_wanted:
        raise missing(wanted, broker.address)
    return found, {
        topic["topic_name"]
        for topic in stats["topics"]
        for channel in topic["channels"]
        if channel["client_count"] and not channel["clients"]
    }


def _of_stats(stats: Stats, broker: str, wanted: Source | None) -> tuple[dict[_Key, ClientRecord], bool]:
    """Return the clients, and whether the broker has the topic or channel."""
    channels = [(topic["topic_name"], channel) for topic in stats["topics"] for channel in topic["channels"]]
    found: dict[_Key, ClientRecord] = {}
    for topic, channel in channels:
        for client in channel["clients"]:
            key, record = _record("consumer", broker, topic, channel["channel_name"], client)
            found[key] = record
    if wanted is None or wanted.channel is None:
        for topic, count, client in _published(stats["producers"], wanted):
            key, record = _record("producer", broker, topic, None, client)
            record["messages"] = count
            found[key] = record
    return found, bool(channels if wanted is not None and wanted.channel is not None else stats["topics"])


def _published(
    producers: Sequence[ClientStats], wanted: Source | None
) -> Iterator[tuple[str, int, ClientStats]]:
    """Yield topic, number of messages and client, for each topic of each producer."""
    for client in producers:
        for each in client["pub_counts"]:
            if wanted is None or each["topic"] == wanted.topic:
                yield each["topic"], each["count"], client


def _record(
    kind: Literal["consumer", "producer"],
    broker: str,
    topic: str,
    channel: str | None,
    client: ClientStats,
) -> tuple[_Key, ClientRecord]:
    compression: Literal["snappy", "deflate"] | None = None
    if client.get("snappy") or client.get("deflate"):
        compression = "snappy" if client.get("snappy") else "deflate"
    consumes = kind == "consumer"
    connect_time = client.get("connect_ts") or 0
    address = client.get("remote_address") or ""
    record: ClientRecord = {
        "kind": kind,
        "broker": broker,
        "topic": topic,
        "channel": channel,
        "address": address,
        "client_id": client.get("client_id"),
        "hostname": client.get("hostname"),
        "agent": client.get("user_agent"),
        "tls": bool(client.get("tls")),
        "tls_version": client.get("tls_version") or None,
        "compression": compression,
        "identity": client.get("auth_identity") or None,
        "in_flight": client.get("in_flight_count") or 0 if consumes else None,
        "ready": client.get("ready_count") or 0 if consumes else None,
        "messages": client.get("message_count") or 0,
        "finished": client.get("finish_count") or 0 if consumes else None,
        "requeued": client.get("requeue_count") or 0 if consumes else None,
        "rate": None,
        "connect_time": connect_time,
        "connected_s": max(0, round(time.time()) - connect_time),
    }
    return _Key(kind, topic, channel, address, connect_time), record


def _tables(
    records: Sequence[ClientRecord], wanted: Source | None, width: int | None, *, with_broker: bool
) -> str:
    texts = []
    for kind in ("consumer", "producer"):
        if rows := [record for record in records if record["kind"] == kind]:
            texts.append(fitted_table(_columns(kind, wanted, with_broker), rows, width))
    return "\n".join(texts)


def _columns(kind: str, wanted: Source | None, with_broker: bool) -> list[Column[ClientRecord]]:
    names = [Column[ClientRecord](kind, lambda row: row["address"], is_name=True)]
    if wanted is None:
        heading = "channel" if kind == "consumer" else "topic"
        names.append(Column(heading, lambda row: str(Source(row["topic"], row["channel"])), is_name=True))
    elif wanted.channel is None and kind == "consumer":
        names.append(Column("channel", lambda row: row["channel"] or "", is_name=True))
    names.append(Column("agent", lambda row: row["agent"] or row["client_id"] or "", is_name=True))
    if with_broker:
        names.append(Column("broker", lambda row: row["broker"], is_name=True))
    names.append(
        Column("tls", lambda row: row["tls_version"] or ("yes" if row["tls"] else "no"), is_name=True)
    )
    counts = [
        Column[ClientRecord]("in flight", lambda row: _count(row["in_flight"]), short="inflt"),
        Column[ClientRecord]("ready", lambda row: _count(row["ready"])),
        Column[ClientRecord](
            "published", lambda row: _count(row["messages"]) if kind == "producer" else "", short="pub"
        ),
        Column[ClientRecord]("rate", lambda row: "" if row["rate"] is None else output.rate(row["rate"])),
        Column[ClientRecord]("connected", lambda row: age(row["connected_s"] * 1000), rank=1),
    ]
    return [*names, *counts]


def _count(number: int | None) -> str:
    return "" if number is None else short_count(number)
