"""Decodes what a terminal sends when the user presses keys."""

_NAMED = {
    b"\r": "enter",
    b"\n": "enter",
    b"\x7f": "backspace",
    b"\x08": "backspace",
    b"\x15": "ctrl-u",
    b"\x0c": "ctrl-l",
}
_ESCAPED = {
    "A": "up",
    "B": "down",
    "C": "right",
    "D": "left",
    "H": "home",
    "F": "end",
    "1~": "home",
    "7~": "home",
    "4~": "end",
    "8~": "end",
    "5~": "page-up",
    "6~": "page-down",
}
"""Without the beginning `ESC [` or `ESC O`."""


class KeyDecoder:
    """Bytes in, keys out. A key is a printable ASCII character, or a name such as `page-up` or `enter`."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def unfinished(self) -> bool:
        """Whether a key is incomplete. If no more bytes arrive soon, it was the Escape key: call `finish`."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[str]:
        """Return the keys of these bytes. Leaves out unknown ones."""
        self._rest += data
        keys = []
        while self._rest:
            length, key = _first(self._rest)
            if not length:
                break
            self._rest = self._rest[length:]
            if key:
                keys.append(key)
        return keys

    def finish(self) -> list[str]:
        """Return the key of the bytes that wait for more: Escape."""
        if not self._rest:
            return []
        rest, self._rest = self._rest[1:], b""
        return ["escape", *self.feed(rest)]


def _first(data: bytes) -> tuple[int, str]:
    """Return the number of bytes of the first key, and the key, empty if unknown; 0 if it needs more bytes."""
    if data[:1] != b"\x1b":
        char = data[:1]
        return 1, _NAMED.get(char) or (chr(char[0]) if 32 <= char[0] < 127 else "")
    if len(data) == 1:
        return 0, ""
    if data[1:2] not in (b"[", b"O"):
        return 1, "escape"
    for end in range(2, len(data)):
        if 0x40 <= data[end] <= 0x7E:  # the final byte of a control sequence
            return end + 1, _ESCAPED.get(data[2 : end + 1].decode("latin-1"), "")
    return 0, ""
