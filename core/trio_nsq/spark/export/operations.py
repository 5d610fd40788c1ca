"""The values of the field that says what a message does to the row of its key: those of Debezium, DMS and Maxwell.

Case does not matter. Other values are unknown: nothing says whether such a message is a row or removes one.
"""

UPSERTS = frozenset({"c", "r", "u", "i", "create", "read", "insert", "update", "upsert"})
"""The message is the new row of its key. `r` is a row of a snapshot."""
DELETES = frozenset({"d", "delete"})
"""The key has no row any more."""


def is_operation(value: object) -> bool:
    """Whether a value of the field is known."""
    return isinstance(value, str) and value.lower() in UPSERTS | DELETES
