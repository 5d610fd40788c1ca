"""What an export does with values that its columns do not have."""

from enum import StrEnum

from ...protocol.errors import NSQError


class SchemaContract(StrEnum):
    """What happens to fields without a column, and to values that do not fit their column, as of dlt.

    Attributes:
        EVOLVE: New fields become columns, and columns get wider types where their place can have them.
        FREEZE: The export ends with `SchemaViolation`.
        DISCARD_VALUE: The value is left out of the row, and counted.
        DISCARD_ROW: The whole row is left out, and counted.
    """

    EVOLVE = "evolve"
    FREEZE = "freeze"
    DISCARD_VALUE = "discard-value"
    DISCARD_ROW = "discard-row"


class SchemaViolation(NSQError):
    """A message does not fit the schema, and the contract is `SchemaContract.FREEZE`; the text has the reason."""
