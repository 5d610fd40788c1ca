"""The errors of the protocol, and the base class of all errors of this library.

    NSQError
      CommandError      the broker refuses a client's command and sends this as an error frame (broker side)
        AuthRequired      the client must send AUTH first
      FrameError        the peer's bytes violate the NSQ protocol (client side)
      StartupError      a server cannot start

Errors of IO (a lost connection, a refused publish) are in `trio_nsq.client.errors`, errors of the log in
`trio_nsq.log.errors`.
"""

from typing import Any

NON_FATAL_CODES = frozenset({"E_FIN_FAILED", "E_REQ_FAILED", "E_TOUCH_FAILED"})
"""Errors after which the broker keeps the connection; all others close it."""


class NSQError(Exception):
    """The base class of all errors of this library.

    All of them can be pickled and copied with their attributes and notes, so they cross the borders of processes
    (`multiprocessing`, Spark). As with all exceptions, the cause and the traceback stay behind.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Python would call the class with `args`, the text: a constructor with other arguments fails, and the process
        # that waits for the error never gets it.
        return _unfinished, (type(self), self.args), self.__dict__


def _unfinished(kind: type[NSQError], args: tuple[Any, ...]) -> NSQError:
    """Return an error without attributes; `__setstate__` sets them, also those of a compiled class."""
    return kind.__new__(kind, *args)


class StartupError(NSQError):
    """A server cannot start. The text gives the operator the reason and the fix."""


class CommandError(NSQError):
    """A command is refused, with the code and text of the error frame.

    Args:
        code: NSQ's machine-readable code, such as `E_BAD_TOPIC`.
        text: The text after the code and one space; empty for a code without text.
    """

    def __init__(self, code: str, text: str = "") -> None:
        super().__init__(f"{code} {text}" if text else code)
        self.code = code
        self.text = text

    @property
    def fatal(self) -> bool:
        """Whether the broker closes the connection after sending this."""
        return self.code not in NON_FATAL_CODES

    @property
    def wire(self) -> bytes:
        """The data of the error frame."""
        return str(self).encode("utf-8", "surrogateescape")


class AuthRequired(CommandError):
    """A client must send AUTH before a command with this verb."""

    def __init__(self, verb: str) -> None:
        super().__init__("E_AUTH_FIRST", f"AUTH required before {verb}")
        self.verb = verb


class FrameError(NSQError):
    """The peer sent bytes that are not frames, or a frame that is too large."""


_GO_ESCAPES = {
    "\a": r"\a",
    "\b": r"\b",
    "\f": r"\f",
    "\n": r"\n",
    "\r": r"\r",
    "\t": r"\t",
    "\v": r"\v",
    '"': r"\"",
    "\\": r"\\",
}


def quote(name: str) -> str:
    """Quote like Go's `%q`, for error texts. A byte that is not UTF-8 (surrogateescape) becomes `\\xNN`."""
    out = []
    for char in name:
        code = ord(char)
        if char in _GO_ESCAPES:
            out.append(_GO_ESCAPES[char])
        elif char.isprintable():
            out.append(char)
        elif 0xDC80 <= code <= 0xDCFF:  # a lone byte, by surrogateescape
            out.append(f"\\x{code - 0xDC00:02x}")
        elif code < 0x80:
            out.append(f"\\x{code:02x}")
        elif code < 0x10000:
            out.append(f"\\u{code:04x}")
        else:
            out.append(f"\\U{code:08x}")
    return '"' + "".join(out) + '"'


def leaves_of(group: BaseExceptionGroup[Exception]) -> list[Exception]:
    """Return the errors in a group, and in the groups in it."""
    return [
        leaf
        for each in group.exceptions
        for leaf in (leaves_of(each) if isinstance(each, BaseExceptionGroup) else [each])
    ]
