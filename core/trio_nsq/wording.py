"""How things are counted and shown in what people read."""


def count_of(count: int, what: str) -> str:
    """A number of things, such as `1 topic` or `1,234 topics`.

    Args:
        count: 0 or more.
        what: One of them.
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def printable(text: str, keep: str = "") -> str:
    """Text without characters that act on a terminal or break a line: those are written as escapes, such as `\\x1b`.

    Args:
        text: It may hold anything; a byte that was no UTF-8 (surrogateescape) becomes `\\xff`.
        keep: Characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    byte = ord(char) - 0xDC00
    return f"\\x{byte:02x}" if 0x80 <= byte <= 0xFF else char.encode("unicode_escape").decode()
