"""The tables that topics declare with the setting `table`, on all brokers that have them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..protocol.tables import DeclaredTable
from .allowed_tables import AllowedPlace, is_allowed
from .table_places import ICEBERG, parts_of


@dataclass(slots=True)
class DeclaredTables:
    """The tables of topics.

    Attributes:
        tables: Those of topics that can be written, by topic.
        problems: Why others cannot, a sentence with the topic each, by topic.
    """

    tables: dict[str, DeclaredTable] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def declared_tables(
    settings: Mapping[str, Mapping[str, str]],
    current: Mapping[str, DeclaredTable],
    allowed: Sequence[AllowedPlace] = (),
) -> DeclaredTables:
    """Return the table of each topic.

    A topic has the table that one of its brokers declares, also of the brokers that declare none: they may have created
    the topic later. Two topics cannot have the same table, nor one folder for tables of two formats.

    Args:
        settings: The setting `table` of each topic that a broker has, empty without one, by the broker's address.
        current: The tables that are being written: of several topics with the same table, the one that has it keeps it.
        allowed: The places where tables may be; empty: anywhere.
    """
    found = DeclaredTables()
    for topic, texts in _by_topic(settings).items():
        if len(texts) > 1:
            where = " and ".join(f"{text} on {broker}" for text, broker in sorted(texts.items()))
            found.problems[topic] = (
                f"{topic}: its brokers declare different tables: {where}. Set the same one on all: "
                f"qcli topic set {topic} table=TABLE"
            )
            continue
        (text,) = texts
        try:
            table = DeclaredTable.parse(text)
        except ValueError as exc:
            found.problems[topic] = f"{topic}: the table {text!r} cannot be used: {exc}"
            continue
        if is_allowed(table, allowed):
            found.tables[topic] = table
        else:
            found.problems[topic] = (
                f"{topic}: its table {table} is in no place of --allow-table. Declare another one, or start "
                "qcli pipeline run with this place, too"
            )
    _leave_out_shared(found, current)
    return found


def _by_topic(settings: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Return the tables that each topic declares, each with a broker that has it."""
    found: dict[str, dict[str, str]] = {}
    for broker, topics in sorted(settings.items()):
        for topic, text in topics.items():
            if text:
                found.setdefault(topic, {}).setdefault(text, broker)
    return dict(sorted(found.items()))


def _leave_out_shared(found: DeclaredTables, current: Mapping[str, DeclaredTable]) -> None:
    topics_of: dict[tuple[str, ...], list[str]] = {}
    tables = dict(found.tables)
    for topic, table in tables.items():
        topics_of.setdefault(_place_of(table), []).append(topic)
    for topics in topics_of.values():
        for topic in topics if len(topics) > 1 else ():
            table = tables[topic]
            if current.get(topic) == table:
                continue
            others = " and ".join(each for each in topics if each != topic)
            is_same = {tables[each].format for each in topics} == {table.format}
            found.problems[topic] = (
                f"{topic}: its table {table} {'is that' if is_same else 'has the folder'} of {others}, too. Each "
                f"topic needs its own: qcli topic set {topic} table=TABLE"
            )
            del found.tables[topic]


def _place_of(table: DeclaredTable) -> tuple[str, ...]:
    """Return what all names of a table have in common, and other tables in its folder."""
    kind = ICEBERG if table.format == ICEBERG else ""
    try:
        return kind, *parts_of(table)
    except ValueError:
        return kind, table.target  # refused when it is opened
