"""What is younger than a journal, or a catch-up: its whole content is in the operations since then."""

from .operations import Kind, Operation, is_at_or_below, parent_of


class NamesSince:
    """What happened to names since a beginning.

    Attributes:
        created: Files and folders that are younger; what is in the folders is not listed.
    """

    def __init__(self) -> None:
        self.created: set[bytes] = set()
        self._folders: set[bytes] = set()  # those of `created`
        self._vacated: set[bytes] = set()  # names of older files and folders, which were renamed

    def needs_new(self, operation: Operation) -> bool:
        """Whether a new journal must begin before this operation.

        It gives a name that something older had; or it moves something older into a folder that is created.
        """
        kind, to = operation.kind, operation.to
        if kind in (Kind.CREATE, Kind.CREATE_FOLDER):
            return operation.path in self._vacated
        if kind is Kind.RENAME and not self.is_created(operation.path) and self.is_created(parent_of(to)):
            return True
        return kind in (Kind.RENAME, Kind.LINK) and to in self._vacated

    def add(self, operation: Operation) -> bool:
        """Record an operation; returns whether it gives something older a name."""
        kind, path, created = operation.kind, operation.path, self.created
        match kind:
            case Kind.CREATE:
                created.add(path)
            case Kind.CREATE_FOLDER:
                created.add(path)
                self._folders.add(path)
            case Kind.UNLINK:
                created.discard(path)
            case Kind.REMOVE_FOLDER:
                self._forget_below(path)
            case Kind.LINK:
                if not self.is_created(path):
                    created.discard(operation.to)
                    return True
                created.add(operation.to)
            case Kind.RENAME:
                created.discard(operation.to)
                if not self.is_created(path):
                    self._vacated.add(path)
                    return True
                if path in self._folders:
                    self._forget_below(path)
                    self._folders.add(operation.to)
                created.discard(path)
                created.add(operation.to)
        return False

    def is_created(self, path: bytes) -> bool:
        """Whether a file or folder is younger, or in such a folder."""
        while path:
            if path in self.created:
                return True
            path = parent_of(path)
        return False

    def _forget_below(self, path: bytes) -> None:
        for names in (self.created, self._folders):
            names -= {name for name in names if is_at_or_below(name, path)}
