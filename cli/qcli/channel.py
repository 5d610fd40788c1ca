"""`qcli channel`: create, delete, empty, pause and unpause channels."""

from __future__ import annotations

import click

from .administration import Action, action_command
from .commands import DocumentedGroup, Example
from .exit_codes import ExitCode

_ACTIONS = [
    Action(
        "create",
        "created",
        "Create channels.\n\nTheir topics have to exist. A channel that exists already stays as it is. The first "
        "channel of a topic gets what has been published so far, later ones what is published from now on.",
    ),
    Action(
        "delete",
        "deleted",
        "Delete channels, with the messages they hold.\n\nAsks first on a terminal; elsewhere it needs --yes. "
        "Consumers are disconnected.",
        destroys=True,
    ),
    Action(
        "empty",
        "emptied",
        "Throw away the messages of channels.\n\nThose in flight and deferred go too. Asks first on a terminal; "
        "elsewhere it needs --yes.",
        destroys=True,
    ),
    Action(
        "pause",
        "paused",
        "Stop delivering the messages of channels to consumers.\n\nMessages go on arriving in the channel. "
        "The pause outlasts a restart of the broker.",
    ),
    Action("unpause", "unpaused", "Deliver the messages of channels to consumers again."),
]

_EXAMPLES = {
    "create": [Example("before anything is published", "qcli channel create clicks/archive clicks/alerts")],
    "delete": [Example("without being asked", "qcli channel delete --yes clicks/archive")],
    "empty": [Example("drop a backlog", "qcli channel empty clicks/archive")],
    "pause": [Example("hold deliveries back", "qcli channel pause clicks/archive")],
    "unpause": [Example("deliver again", "qcli channel unpause clicks/archive")],
}


@click.group(
    "channel",
    cls=DocumentedGroup,
    short_help="Create, delete, empty or pause channels.",
    examples=[
        Example("a new channel", "qcli channel create clicks/archive"),
        Example("hold deliveries back, and let them go again", "qcli channel pause clicks/archive"),
    ],
    exits={
        ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning,
        ExitCode.PARTIAL: "It was done for some of the names only; the others are named on standard error.",
    },
)
def command() -> None:
    """Create, delete, empty, pause and unpause channels."""


for _action in _ACTIONS:
    command.add_command(action_command("channel", _action, _EXAMPLES[_action.name]))
