"""Names of topics and channels (NSQ protocol: topic and channel names), and of idempotent producers."""

import re
from typing import Final

MAX_NAME_LENGTH: Final = 64
EPHEMERAL_SUFFIX: Final = "#ephemeral"

_NAME: Final = re.compile(r"[.a-zA-Z0-9_-]+(#ephemeral)?")
_PRODUCER: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")


def is_valid_name(name: str) -> bool:
    """Whether `name` is a valid topic or channel name: 1 to 64 bytes, including the suffix `#ephemeral`."""
    return 1 <= len(name) <= MAX_NAME_LENGTH and _NAME.fullmatch(name) is not None


def is_valid_producer(name: str) -> bool:
    """Whether `name` is a valid name of an idempotent producer."""
    return _PRODUCER.fullmatch(name) is not None


def is_ephemeral(name: str) -> bool:
    """Whether the topic or channel of this name is kept in memory only and deleted with its last user."""
    return name.endswith(EPHEMERAL_SUFFIX)
