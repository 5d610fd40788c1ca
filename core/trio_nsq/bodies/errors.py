"""The errors of bodies, schemas and registries."""

from ..protocol.errors import NSQError


class BodyError(NSQError, ValueError):
    """A body is not valid, or its schema is unknown: it belongs in the column `unparsed`."""


class BodySchemaError(NSQError, ValueError):
    """A schema cannot be used; the text has the reason."""


class RegistryError(NSQError):
    """The registry refused a request, or its answer cannot be used. The text has no secrets."""


class RegistryUnavailable(RegistryError):
    """The registry does not answer, or is overloaded: a later attempt may succeed."""


class SchemaNotFound(RegistryError):
    """The registry has no such schema or subject."""
