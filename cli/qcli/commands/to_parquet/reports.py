"""The reports of `to-parquet`, for people and for programs."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from trio_nsq.spark.export.request import ExportRequest, ExportResult
from trio_nsq.text.wording import count_of

from ...framework.errors import ExitCode
from ...framework.output import print_diagnostic, rate, size, with_counts


def json_record(
    request: ExportRequest,
    outcome: ExportResult,
    engine: str,
    elapsed_s: float,
    unavailable: Iterable[str],
) -> dict[str, Any]:
    """Return the object of `--format json`."""
    fields = dataclasses.asdict(outcome)
    for name in ("gaps", "planned_bytes"):
        del fields[name]
    head = {"topic": request.topic, "folder": request.place, "engine": engine or None}
    tail = {"unavailable": sorted(unavailable), "elapsed_s": round(elapsed_s, 3)}
    return {**head, **fields, **tail}


LOSS_CODES = (ExitCode.PARTIAL, ExitCode.DAMAGED, ExitCode.MISSING)
"""The exit codes of losses; of several topics, the first one counts."""


def loss_code(result: ExportResult) -> ExitCode:
    """Return the exit code for what an export could not write, although it has not failed."""
    if result.without_column:
        return ExitCode.PARTIAL
    if result.damaged or result.unread:
        return ExitCode.DAMAGED
    return ExitCode.MISSING if result.missing else ExitCode.OK


def totals(outcomes: Collection[ExportResult], elapsed_s: float) -> str:
    """Return the sum of several topics."""
    total = ExportResult()
    for each in outcomes:
        total.merge(each)
    return _written(total, count_of(len(outcomes), "topic"), _files(total), elapsed_s)


def print_notes(
    outcome: ExportResult, topic: str = "", masks: Iterable[tuple[str, str]] = (), *, quiet: bool
) -> None:
    """Print what the user should know about the values of an export.

    Args:
        topic: The topic, if it is one of several.
        masks: Those of the layout, to warn of those that have hidden nothing.
    """
    about = f"{topic}: " if topic else ""
    idle = [field for field, _ in masks if field not in outcome.masked]
    if idle and outcome.messages:
        print_diagnostic(
            f"Warning: {about}--mask has hidden no value of {', '.join(idle)} in "
            f"{count_of(outcome.messages, 'message')}: check the name, also upper and lower case."
        )
    if outcome.widened and not quiet:
        wider = ", ".join(sorted(set(outcome.widened)))
        print_diagnostic(f"Note: {about}wider types of columns, because values need them: {wider}.")
    if outcome.new_columns and not quiet:
        new = ", ".join(f"{field} ({kind})" for field, kind in outcome.new_columns.items())
        print_diagnostic(f"Note: {about}new columns: {new}.")
    if outcome.without_column:
        print_diagnostic(
            f"Warning: {about}the headers of {count_of(outcome.without_column, 'message')} are not written: the files "
            "have no column for them. Export to a new folder to keep them."
        )
    if outcome.discarded:
        total = count_of(sum(outcome.discarded.values()), "value")
        print_diagnostic(
            f"Warning: {about}the schema contract left out {total}: {_worst(outcome.discarded)}."
        )
    if outcome.misfits:
        print_diagnostic(f"Warning: {about}{_misfits_warning(outcome)}")
        if outcome.milliseconds:
            names = ", ".join(sorted(outcome.milliseconds))
            print_diagnostic(
                f"Note: {about}{names} seems to be in milliseconds, and a number in a column of type timestamp is in "
                "seconds. Give it the type timestamp(ms), in another folder."
            )


def summary(request: ExportRequest, outcome: ExportResult, elapsed_s: float) -> str:
    catalog = request.table.catalog if request.table else ""
    table = f" and the table {catalog}/{request.table.name}" if request.table and catalog else ""
    if request.layout.key:
        return _written(outcome, request.topic, f"merged into {request.place}{table}", elapsed_s)
    return _written(outcome, request.topic, f"{_files(outcome)} in {request.place}{table}", elapsed_s)


def _files(outcome: ExportResult) -> str:
    return f"written to {count_of(outcome.files, 'file')} ({size(outcome.file_bytes)})"


def _written(outcome: ExportResult, of: str, where: str, elapsed_s: float) -> str:
    text = (
        f"{count_of(outcome.messages, 'message')} ({size(outcome.body_bytes)}) of {of} {where} in {elapsed_s:.2f} s: "
        f"{rate(outcome.messages / elapsed_s)} messages/s"
    )
    return with_counts(
        text,
        (outcome.skipped_messages, f"{count_of(outcome.skipped_messages, 'message')} written before"),
        (outcome.upserted, f"{count_of(outcome.upserted, 'row')} upserted"),
        (outcome.deleted, f"{count_of(outcome.deleted, 'row')} deleted"),
        (outcome.outdated, "{} outdated"),
        (outcome.filtered, "{} left out by --where"),
        (outcome.unparsed, "{} in the column unparsed"),
        (outcome.discarded_rows, "{} left out by the schema contract"),
        (outcome.dead_letters, "{} to the dead-letter topic"),
        (outcome.for_one_channel, "{} copies for one channel left out"),
        (outcome.repeated, "{} repeated deliveries left out"),
        (outcome.compacted, f"{count_of(outcome.compacted, 'small file')} of the table merged"),
        (outcome.missing, "{} missing"),
    )


_FIELDS_SHOWN = 10


def _worst(counts: Mapping[str, int]) -> str:
    """Return the fields with most values."""
    worst = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    fields = ", ".join(f"{field} ({count:,})" for field, count in worst[:_FIELDS_SHOWN])
    return fields + (f" and {len(worst) - _FIELDS_SHOWN:,} more" if len(worst) > _FIELDS_SHOWN else "")


def _misfits_warning(outcome: ExportResult) -> str:
    """Return the warning about values that did not fit, and where they are."""
    where = "The columns are null there, and the column unparsed has the whole bodies."
    if outcome.dead_letters:
        where = "The dead-letter topic has these messages."
    elif outcome.discarded_rows and not outcome.unparsed:
        where = "These messages are left out."
    total = count_of(sum(outcome.misfits.values()), "value")
    return f"{total} did not fit the types of their columns: {_worst(outcome.misfits)}. {where}"
