"""Topic and channel names (NSQ protocol: topic and channel names)."""

import re

MAX_NAME_LENGTH = 64
EPHEMERAL_SUFFIX = "#ephemeral"

_NAME = re.compile(r"[.a-zA-Z0-9_-]+(#ephemeral)?")


def is_valid_name(name: str) -> bool:
    """Say whether `name` may name a topic or a channel: 1 to 64 bytes, the suffix `#ephemeral` included."""
    return 1 <= len(name) <= MAX_NAME_LENGTH and _NAME.fullmatch(name) is not None


def is_ephemeral(name: str) -> bool:
    """Say whether the topic or channel of this name lives in memory only and goes with its last user."""
    return name.endswith(EPHEMERAL_SUFFIX)
