"""How things are counted in what people read."""


def count_of(count: int, what: str) -> str:
    """A number of things, such as `1 topic` or `2 topics`.

    Args:
        count: 0 or more.
        what: One of them.
    """
    return f"{count} {what}{'' if count == 1 else 's'}"
