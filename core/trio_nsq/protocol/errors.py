"""The errors of this library: one base class, then by who caused the error.

    NSQError
      CommandError      a client's command is refused: sent to it as an error frame (broker side)
      FrameError        the peer's bytes are not the NSQ protocol (client side)

Those that need IO to happen (a lost connection, a refused publish) are in `trio_nsq.client.errors`, those of
the log in `trio_nsq.log.errors`; all share the base.
"""

NON_FATAL_CODES = frozenset({"E_FIN_FAILED", "E_REQ_FAILED", "E_TOUCH_FAILED"})
"""The connection continues after these; every other error closes it."""


class NSQError(Exception):
    """Base of all errors of this library."""


class CommandError(NSQError):
    """A command is refused, with the code and text of the error frame.

    Args:
        code: NSQ's machine-readable code, such as `E_BAD_TOPIC`.
        text: What follows the code after one space; empty for a bare code.
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


class FrameError(NSQError):
    """The peer sent bytes that are not frames, or too large a frame."""


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
    """Quote as Go's `%q` does, for error texts. A byte that is not UTF-8 (surrogateescape) becomes `\\xNN`."""
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
