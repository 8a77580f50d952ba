"""How long a scheduler stays out of elections after a reign that ended by itself.

A core that fails at once would else be elected again at once, for ever, and the standby hardly ever. Each
such reign in a row doubles the rest; one that lasted is followed by none.
"""

from __future__ import annotations


class Rest:
    """Seconds. LASTING_S: a reign as long has not failed at once."""

    LASTING_S, FIRST_S, LONGEST_S = 10.0, 0.5, 15.0

    def __init__(self) -> None:
        self._next_s = self.FIRST_S

    def after(self, lasted_s: float) -> float:
        if lasted_s >= self.LASTING_S:
            self._next_s = self.FIRST_S
            return 0.0
        rest_s, self._next_s = self._next_s, min(2.0 * self._next_s, self.LONGEST_S)
        return rest_s
