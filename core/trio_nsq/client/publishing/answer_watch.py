"""Notice that a broker does not answer publishes. No IO; time is a parameter."""


class AnswerWatch:
    """Measures for how long one command has been the oldest unanswered one.

    The caller looks at intervals, so watching costs nothing per command.

    Args:
        interval_s: The time between two calls of `observe`. If a call is late, the program was busy and did not read
            answers: the delay does not count.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._oldest: object | None = None
        self._waited_s = 0.0
        self._observed_at = 0.0

    def observe(self, oldest: object | None, now: float) -> float:
        """Return for how long this command has been the oldest, in seconds; None is no command."""
        if oldest is None or oldest is not self._oldest:
            self._waited_s = 0.0
        else:
            self._waited_s += min(now - self._observed_at, 2 * self.interval_s)
        self._oldest = oldest
        self._observed_at = now
        return self._waited_s

    def restart(self) -> None:
        """Count from the next call on: the command is sent over another connection."""
        self._oldest = None
