"""How long a follower takes to store what it is sent. No IO; time is a parameter."""


class AnswerTimes:
    """Measures from a send to the answer that has it, for one send at a time and the first one after it."""

    def __init__(self) -> None:
        self._asked: tuple[int, float] | None = None
        self._next: tuple[int, float] | None = None
        self._longest_s = 0.0

    def sent(self, number: int, now_s: float) -> None:
        """Record that operations up to this one were sent."""
        if self._asked is None:
            self._asked = number, now_s
        elif self._next is None:
            self._next = number, now_s

    def stored(self, number: int, now_s: float) -> None:
        """Record that the follower has stored operations up to this one."""
        while self._asked is not None and self._asked[0] <= number:
            self._longest_s = max(self._longest_s, now_s - self._asked[1])
            self._asked, self._next = self._next, None

    def take_longest_s(self, now_s: float) -> float:
        """Return the longest time since the last call, also of what is not answered yet; 0: nothing was sent."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return max(longest_s, now_s - self._asked[1]) if self._asked is not None else longest_s
