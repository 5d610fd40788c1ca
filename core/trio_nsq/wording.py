"""How things are counted in what people read."""


def count_of(count: int, what: str, *, thousands: bool = False) -> str:
    """A number of things, such as `1 topic` or `2 topics`.

    Args:
        count: 0 or more.
        what: One of them.
        thousands: With commas between the thousands.
    """
    number = f"{count:,}" if thousands else str(count)
    return f"{number} {what}{'' if count == 1 else 's'}"
