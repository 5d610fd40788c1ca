"""The log levels of NSQ's programs."""

import logging

LOG_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}


def level_number(logger: logging.Logger) -> int:
    """Return the number by which NSQ's `/config/log_level` tells the level: 1 for debug, up to 5 for fatal."""
    return 1 + sum(logger.getEffectiveLevel() > level for level in list(LOG_LEVELS.values())[:-1])


def parse_level(body: bytes) -> int:
    """Return the level of a word in any letter case. Raises ValueError."""
    level = LOG_LEVELS.get(body.decode("utf-8", "replace").lower())
    if level is None:
        raise ValueError("not a log level")
    return level
