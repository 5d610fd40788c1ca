"""Whatever a client sends, in whatever pieces, and whatever has to wait: every command is answered, in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import trio
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from broker.support import (
    PATIENCE_S,
    HeldFiles,
    RawClient,
    connected,
    dpub,
    identify,
    mpub,
    pub,
    running_broker,
    settle,
)
from soak import examples
from trio_nsq.broker.state.settings import TopicSettings
from trio_nsq.event_loop.pacing import Pacing

UNKNOWN = b"0123456789abcdef"
COMMANDS = (
    "PUB", "PUB", "PUB other", "PUB new", "MPUB", "DPUB", "MPUB too many", "PUB invalid", "IDENTIFY", "NOP", "RDY",
    "FIN", "REQ", "TOUCH", "SUB", "SUB new", "CLS", "AUTH", "NOPE",
)  # fmt: skip
PUBLISHES = ("PUB", "PUB other", "PUB new", "MPUB", "DPUB")
BEFORE_SUB = (*PUBLISHES, "IDENTIFY", "NOP")
AFTER_SUB = (*PUBLISHES, "NOP", "RDY", "FIN", "REQ", "TOUCH")
EVENTS = ("hold", "release", "settle")
"""What happens between two pieces of the data."""
OK, END = "OK", "the end"
MESSAGE = 2
"""The type of a frame with a message."""


@dataclass
class Model:
    """Says what NSQ's protocol answers.

    Attributes:
        is_over: The connection is closed.
    """

    survives: bool
    state: Literal["new", "subscribed", "closing"] = "new"
    is_over: bool = False

    def answers(self, command: str) -> list[str]:
        """Return the answers to a command: `OK`, the code of an error, or the end."""
        is_new = self.state == "new"
        if command.startswith(("PUB", "MPUB", "DPUB")):
            if command == "PUB invalid":
                return self._end("E_BAD_MESSAGE")
            if command == "MPUB too many":
                return ["E_TOPIC_FULL"] if self.survives else self._end("E_TOPIC_FULL")
            return [OK]
        if command.startswith("SUB"):
            if not is_new:
                return self._end("E_INVALID")
            self.state = "subscribed"
            return [OK]
        if command in ("RDY", "FIN", "REQ", "TOUCH"):
            if is_new:
                return self._end("E_INVALID")
            return [] if command == "RDY" else [f"E_{command}_FAILED"]
        if command == "CLS":
            if self.state != "subscribed":
                return self._end("E_INVALID")
            self.state = "closing"
            return ["CLOSE_WAIT"]
        if command == "IDENTIFY":
            return [OK] if is_new else self._end("E_INVALID")
        if command == "AUTH":
            return self._end("E_AUTH_DISABLED" if is_new else "E_INVALID")
        return [] if command == "NOP" else self._end("E_INVALID")

    def _end(self, error: str) -> list[str]:
        self.is_over = True
        return [error, END]


def encoded(command: str, number: int) -> bytes:
    """Return the bytes of a command."""
    body = b"%d" % number
    texts = {
        "PUB": pub("t", body),
        "PUB other": pub("u", body),
        "PUB new": pub(f"new{number}", body),
        "MPUB": mpub("t", body, body),
        "DPUB": dpub("t", 1000, body),
        "MPUB too many": mpub("full", *[body] * 2000),
        "PUB invalid": pub("t", b""),
        "IDENTIFY": identify(),
        "NOP": b"NOP\n",
        "RDY": b"RDY 1\n",
        "FIN": b"FIN %s\n" % UNKNOWN,
        "REQ": b"REQ %s 0\n" % UNKNOWN,
        "TOUCH": b"TOUCH %s\n" % UNKNOWN,
        "SUB": b"SUB silent c\n",
        "SUB new": b"SUB silent%d c#ephemeral\n" % number,
        "CLS": b"CLS\n",
        "AUTH": b"AUTH\n\0\0\0\1x",
        "NOPE": b"NOPE\n",
    }
    return texts[command]


async def next_answer(client: RawClient) -> str:
    """Return the next answer; messages come in between."""
    while (frame := await client.frame()) is not None and frame[0] == MESSAGE:
        pass
    if frame is None:
        return END
    kind, data = frame
    return data.partition(b" ")[0].decode() if kind == 1 else data.decode()


async def converse(
    folder: Path, sync: str, commands: list[str], survives: bool, cuts: list[tuple[float, str]]
) -> tuple[list[str], list[str]]:
    """Return the answers that the model expects, and those of a broker."""
    model, expected, data = Model(survives), [], b""
    for number, command in enumerate(commands):
        data += encoded(command, number)
        if not model.is_over:
            expected += model.answers(command)
    files = HeldFiles()
    pacing = Pacing(fast_sync_s=1e-6)  # always in a thread, which can be held
    full = TopicSettings(max_messages=1000)
    async with running_broker(
        folder / "d", files=files, sync=sync, topic_defaults=full, pacing=pacing
    ) as bound:
        async with connected(bound.tcp_address) as other:
            for topic in ("t", "u", "silent"):
                await other.publish(topic, b"makes the file")
        async with connected(bound.tcp_address) as client:
            await client.send(identify(survive_refusals=survives))
            await client.ok()
            sent = 0
            for part, event in sorted(cuts):
                upto = int(part * len(data))
                await client.send(data[sent:upto])
                sent = upto
                if event == "hold":
                    files.release()
                    files.hold("sync", "replace")
                elif event == "release":
                    files.release()
                else:
                    await settle()
            files.release()
            await client.send(data[sent:])
            got: list[str] = []
            while len(got) < len(expected):
                if (answer := await next_answer(client)) != END or expected[-1:] == [END]:
                    got.append(answer)
                if answer == END:
                    break
    return expected, got


def commands_from(choices: Sequence[str], *, at_most: int) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(choices), max_size=at_most)


def conversation(before: list[str], after: list[str], end: list[str]) -> list[str]:
    """Return commands that a client may send, up to the last few: most others end the connection soon."""
    return [*before, "SUB", *after, *end]


@settings(max_examples=examples(40), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@example(
    "always",
    ["PUB", "SUB new", "FIN", "PUB new", "NOPE"],
    True,
    [(0.0, "hold"), (0.3, "settle"), (0.9, "settle")],
)
@example("interval", ["PUB", "MPUB too many", "PUB"], False, [])
@example("always", ["SUB", "PUB", "FIN", "MPUB", "REQ", "PUB other", "TOUCH", "PUB", "CLS"], True, [])
@given(
    st.sampled_from(["always", "interval"]),
    st.builds(
        conversation,
        commands_from(BEFORE_SUB, at_most=8),
        commands_from(AFTER_SUB, at_most=20),
        commands_from(COMMANDS, at_most=5),
    ),
    st.booleans(),
    st.lists(st.tuples(st.floats(0, 1), st.sampled_from(EVENTS)), max_size=8),
)
def test_every_command_is_answered_in_order(
    sync: str, commands: list[str], survives: bool, cuts: list[tuple[float, str]]
) -> None:
    async def check() -> None:
        with TemporaryDirectory() as folder, trio.fail_after(PATIENCE_S):
            expected, got = await converse(Path(folder), sync, commands, survives, cuts)
            assert got == expected

    trio.run(check)
