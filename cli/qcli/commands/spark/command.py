"""`qcli spark`: prepares for spark-submit."""

import click

from ...framework.command import Example, LazyGroup


@click.group(
    "spark",
    cls=LazyGroup,
    modules={"bundle": "qcli.commands.spark.bundle"},
    short_help="Prepare for spark-submit.",
    examples=[Example("write what spark-submit needs", "qcli spark bundle ./submit")],
)
def command() -> None:
    """Prepare for spark-submit."""
