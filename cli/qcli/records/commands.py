"""Records of commands themselves: `qcli help --format json`."""

from typing import Literal, TypedDict


class _TypeLimits(TypedDict, total=False):
    choices: list[str]
    minimum: float | None
    maximum: float | None


ValueType = Literal["flag", "text", "choice", "integer", "number", "path", "boolean"]


class ArgumentRecord(_TypeLimits):
    """An argument of a command; `choices`, `minimum` and `maximum` if its type has them."""

    name: str
    required: bool
    repeatable: bool
    type: ValueType


class OptionRecord(_TypeLimits):
    """An option of a command; `choices`, `minimum` and `maximum` if its type has them.

    Attributes:
        value: The name of its value; null: a flag.
        default: As the help shows it; null: none.
        environment: The variables that set it.
        section: The heading of the help.
    """

    names: list[str]
    value: str | None
    required: bool
    repeatable: bool
    default: str | None
    environment: list[str]
    section: str
    help: str
    type: ValueType


class ExampleRecord(TypedDict):
    """An example: what it does, and the command line."""

    about: str
    line: str


class _CommandParts(TypedDict, total=False):
    commands: "list[CommandRecord]"
    effect: Literal["read", "write"]
    usage: str
    arguments: list[ArgumentRecord]
    options: list[OptionRecord]
    exit_codes: dict[str, str]
    examples: list[ExampleRecord]
    schema_command: str | None


class CommandRecord(_CommandParts):
    """A command, or a group with the commands below it.

    Attributes:
        command: Its name, with that of its groups.
        commands: Only of a group.
        effect: read: it changes nothing. This and the following are of commands that are no groups.
        exit_codes: The meaning of each.
        schema_command: The command that prints the JSON Schema of its --format json; null: it has no such output.
    """

    command: str
    summary: str
    help: str
