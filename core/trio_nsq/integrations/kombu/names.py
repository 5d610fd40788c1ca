"""Names of queues and exchanges as names of topics and channels."""

import re
from hashlib import sha256

from ...protocol.names import EPHEMERAL_SUFFIX, MAX_NAME_LENGTH, is_ephemeral, is_valid_name

_REFUSED = re.compile(r"[^.a-zA-Z0-9_-]+")
_DIGEST_LENGTH = 8


def nsq_name(name: str, *, ephemeral: bool = False) -> str:
    """Return a name for a topic or channel: the same if NSQ allows it, else a similar one that ends in a hash.

    Args:
        ephemeral: The topic or channel is ephemeral; the suffix is part of the result.
    """
    suffix = EPHEMERAL_SUFFIX if ephemeral and not is_ephemeral(name) else ""
    if is_valid_name(name + suffix):
        return name + suffix
    digest = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_LENGTH]
    longest = MAX_NAME_LENGTH - len(suffix) - 1 - _DIGEST_LENGTH
    return f"{_REFUSED.sub('-', name)[:longest]}-{digest}{suffix}"
