"""What a session keeps of its last description for `/stats`."""

from ...access.policy import Identity


class SharedFields:
    """The fields that many clients have in common, in the form of their maker.

    Args:
        maker: What has made them.
        before, after: The fields before and after the counts of publishes.
        both: All of them, for clients without such counts.
    """

    def __init__(self, maker: object, before: object, after: object, both: object) -> None:
        self.maker = maker
        self.before = before
        self.after = after
        self.both = both


class Description:
    """The part of a client's description that changes only with IDENTIFY and AUTH.

    Args:
        names: The fields with its names and address, in the form of the maker.
        identity: Its identity at that time.
    """

    def __init__(self, names: object, shared: SharedFields, identity: Identity | None) -> None:
        self.names = names
        self.shared = shared
        self.identity = identity
