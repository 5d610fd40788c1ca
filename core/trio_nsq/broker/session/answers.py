"""Error frames for commands that did nothing."""

from collections.abc import Sequence

from ...protocol import CommandError
from ...protocol.frames import encode_error
from ..errors import PublishRefused, TopicFull


def failure_frames(verb: str, failed: Sequence[tuple[bytes, str]]) -> bytes:
    """Return the error frames for ids for which a FIN, REQ or TOUCH did nothing: pairs of the id and the reason.

    One piece of bytes however many there are: one client sends thousands of unknown ids at once.
    """
    before = f"E_{verb}_FAILED {verb} ".encode()
    return b"".join(
        [
            encode_error(b"%s%s failed %s" % (before, message_id, reason.encode()))
            for message_id, reason in failed
        ]
    )


def publish_refusal(verb: str, reason: PublishRefused) -> CommandError:
    """The error of a PUB, MPUB or DPUB that was refused."""
    # A code of its own: with nsqd's, something of it may have been stored.
    code = "E_TOPIC_FULL" if isinstance(reason, TopicFull) else f"E_{verb}_FAILED"
    return CommandError(code, f"{verb} failed {reason}")
