"""Find the logs of a query: its topics on its brokers. Only the driver does this, with blocking calls."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple, TypeVar

from ...api import broker as api
from ...api import lookupd
from ...api.lookupd import ProducerAddress
from ...client.errors import BrokerUnreachable, NotABroker, RequestRefused
from ...client.http.broker_http import BrokerHTTP
from ..logs import LogPlace
from ..segments.places import places_of, topics_in
from .fan_out_query import Answers, FanOutQuery
from .options import ReadOptions, SourceError

_PATH_NOT_FOUND = "NOT_FOUND"
_MAX_ANSWER_BYTES = 64 * 1024 * 1024

_log = logging.getLogger(__name__)

T = TypeVar("T")


class LogKey(NamedTuple):
    """A topic on a broker, which is known by its label."""

    topic: str
    broker: str


class LookupdUnreachable(BrokerUnreachable):
    """A discovery service does not answer."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason)
        self.args = (f"the nsqlookupd at {address} cannot be reached: {reason}",)


class Fleet:
    """Finds logs, in a stream again and again.

    A topic that the query names may not exist on a broker that it names: this is not checked.

    Attributes:
        away: The errors of the servers that did not answer the last time.
    """

    def __init__(self, options: ReadOptions) -> None:
        self.away: dict[str, BrokerUnreachable] = {}
        self._options = options
        self._answers: dict[str, set[LogKey]] = {}  # the last answer of each server
        self._inquiry: FanOutQuery[str, set[LogKey]] = FanOutQuery(
            "the topics and brokers that it had named stay known"
        )

    @property
    def is_fixed(self) -> bool:
        """Whether the options alone determine the logs."""
        options = self._options
        return not options.lookupds and not options.segments and bool(options.subscription.topics)

    def find(self, *, waits_for_all: bool = False) -> dict[LogKey, LogPlace]:
        """Return the logs that are known now.

        Args:
            waits_for_all: Whether to wait for every server for `patience_s`; otherwise for the first one.

        Raises:
            BrokerUnreachable: No server answers.
            RequestRefused: A server refuses the secret.
            StorageError, SegmentsError: The folders of segments cannot be read.
        """
        options = self._options
        topics = options.subscription.topics
        if options.segments:
            return self._find_segments(options.segments)
        keys = [LogKey(topic, broker) for topic in topics for broker in options.brokers]
        if not self.is_fixed:
            requests: dict[str, Callable[[], set[LogKey]]] = {
                address: partial(self._ask_lookupd, address) for address in options.lookupds
            }
            if not topics:
                for broker, address in options.brokers.items():
                    requests[address] = partial(self._ask_broker, broker, address)
            answers = self._inquiry.ask(requests, options.patience_s, waits_for_all=waits_for_all)
            self._answers |= answers.found
            self.away = answers.away
            for found in self._answers.values():
                keys += sorted(found)
        return {key: options.place(*key) for key in dict.fromkeys(keys)}

    def _find_segments(self, folders: Sequence[str]) -> dict[LogKey, LogPlace]:
        subscription = self._options.subscription
        topics = subscription.topics or sorted(
            {topic for folder in folders for topic in topics_in(folder) if subscription.includes(topic)}
        )
        return {LogKey(topic, place.label): place for topic in topics for place in places_of(folders, topic)}

    def _ask_broker(self, broker: str, address: str) -> set[LogKey]:
        """Return the topics of a broker that the pattern selects. Raises BrokerUnreachable, RequestRefused."""
        with closing(self._http(address)) as http:
            names = [topic["topic_name"] for topic in http.ask(api.stats())["topics"]]
        return {LogKey(name, broker) for name in names if self._options.subscription.includes(name)}

    def _ask_lookupd(self, address: str) -> set[LogKey]:
        """Return the logs that a discovery service knows. Raises LookupdUnreachable, RequestRefused."""
        subscription = self._options.subscription
        with closing(self._http(address)) as http:
            try:
                if subscription.topics:
                    return {
                        LogKey(topic, broker)
                        for topic in subscription.topics
                        for broker in _labels(_lookup(http, topic))
                    }
                return {
                    LogKey(topic, broker)
                    for node in http.ask(lookupd.nodes())
                    for topic in node.topics
                    if topic not in node.tombstones and subscription.includes(topic)
                    for broker in _labels([node])
                }
            except NotABroker:
                raise _not_a_lookupd(address) from None
            except BrokerUnreachable as error:
                raise LookupdUnreachable(address, error.reason) from None
            except RequestRefused as error:
                if error.text == _PATH_NOT_FOUND:
                    raise _not_a_lookupd(address) from None
                raise

    def _http(self, address: str) -> BrokerHTTP:
        access = self._options.access
        return BrokerHTTP(
            address, access.tls, access.secret, keep_alive_s=1.0, max_answer_bytes=_MAX_ANSWER_BYTES
        )


def ask_logs(
    query: FanOutQuery[str, dict[LogKey, T]],
    places: Mapping[LogKey, LogPlace],
    ask: Callable[[LogKey, LogPlace], T | None],
    patience_s: float,
    *,
    waits_for_all: bool = False,
) -> Answers[LogKey, T]:
    """Call a function for each log, for all brokers at once; return the results, without None.

    `away` has the logs of brokers that did not answer. Arguments and errors as for `FanOutQuery.ask`.
    """

    def ask_broker(keys: list[LogKey]) -> dict[LogKey, T]:
        found = ((key, ask(key, places[key])) for key in keys)
        return {key: answer for key, answer in found if answer is not None}

    by_broker: dict[str, list[LogKey]] = {}
    for key in places:
        by_broker.setdefault(key.broker, []).append(key)
    requests = {broker: partial(ask_broker, keys) for broker, keys in by_broker.items()}
    answers = query.ask(requests, patience_s, waits_for_all=waits_for_all)
    found = {key: answer for of_broker in answers.found.values() for key, answer in of_broker.items()}
    return Answers(found, {key: answers.away[key.broker] for key in places if key.broker in answers.away})


def ask_all_logs(
    places: Mapping[LogKey, LogPlace],
    ask: Callable[[LogKey, LogPlace], T | None],
    patience_s: float,
    consequence: str,
) -> dict[LogKey, T]:
    """Call a function for each log as `ask_logs` does, once; all brokers must answer.

    Raises:
        BrokerUnreachable: One did not for `patience_s`, or its certificate is not trusted.
    """
    query: FanOutQuery[str, dict[LogKey, T]] = FanOutQuery(consequence, needs_trust=True)
    answers = ask_logs(query, places, ask, patience_s, waits_for_all=True)
    for error in answers.away.values():
        raise error
    return answers.found


def check_topics(options: ReadOptions, with_log: Iterable[LogKey]) -> None:
    """Check that each topic that the query names has a log. Raises SourceError."""
    missing = set(options.subscription.topics) - {key.topic for key in with_log}
    if missing:
        where = ", ".join([*options.brokers, *options.lookupds, *options.segments])
        advice = (
            "correct the name" if options.segments else "create it (qcli topic create), or correct the name"
        )
        raise SourceError(f"there is no topic {', '.join(sorted(missing))} on {where}: {advice}")


def _not_a_lookupd(address: str) -> LookupdUnreachable:
    return LookupdUnreachable(address, "the server is not an nsqlookupd")


def _lookup(http: BrokerHTTP, topic: str) -> list[ProducerAddress]:
    try:
        return http.ask(lookupd.lookup(topic))
    except RequestRefused as error:
        if error.is_without_topic:
            return []
        raise


def _labels(brokers: Iterable[ProducerAddress]) -> Iterable[str]:
    """Yield the HTTP addresses of the brokers that have one."""
    for each in brokers:
        if each.is_usable and each.has_usable_host and (address := each.http_address) is not None:
            yield address
        else:
            _log.warning("nsq: nsqlookupd names a broker without a usable HTTP address: %r", each)
