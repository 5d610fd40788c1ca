"""Reads the files of a running server again."""

import logging
from collections.abc import AsyncIterable, Awaitable, Callable

from ..access.auth_file import AuthFileError
from ..protocol.errors import StartupError


async def reload_on_request(
    requests: AsyncIterable[object], *steps: Callable[[], Awaitable[None]], logger: logging.Logger
) -> None:
    """Run all steps at each request; runs until cancelled.

    A step that fails changes nothing, and the other steps are run all the same: a certificate that cannot be used must
    not keep a revoked token valid.

    Args:
        steps: Each reads some files; raises StartupError or AuthFileError if it cannot use them.
        logger: For failures.
    """
    async for _ in requests:
        for step in steps:
            try:
                await step()
            except (StartupError, AuthFileError) as exc:
                logger.error("reload: %s; the previous files stay in use", exc)
            except Exception:
                # A bug: it must not stop the server.
                logger.exception("reload failed; the previous files stay in use")
